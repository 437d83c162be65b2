"""Draw the figures of README and the documentation: `python docs/figures.py`."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "bench" / "results" / "coder-epyc.json"
SPEEDUP = ROOT / "docs" / "assets" / "speedup.svg"
BARS = {
    "suffix eagle T=0": "suffix decoding and EAGLE-3",
    "eagle tree T=0": "EAGLE-3, trees of 5 nodes",
    "trimmed 3 T=0": "0.5B model, 16k tokens, γ = 3",
    "small model 2 T=0": "0.5B model, γ = 2",
    "autoregressive T=0": "autoregressive baseline",
}
"""Rows of the results, with their names in the figure."""
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 760, 250, 90, 52, 36, 20
CAPTION = "Qwen2.5-Coder-1.5B-Instruct, 80 questions, 128 tokens, temperature 0, batch 1"
HARDWARE = "Two cores of an AMD EPYC (CPU), int8; lines are 95 % intervals; all texts are the target's own"


def draw_speedup() -> str:
    """Return the figure of the speedup by method as SVG."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["coder"]["int8, batch 1"]["all"]["rows"]
    scale, height = (WIDTH - LEFT - RIGHT) / 2.4, TOP + ROW * len(BARS) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="14" fill="#1f2937">',
        f"<title>Speedup by method: {escape(CAPTION)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="{WIDTH / 2}" y="24" text-anchor="middle" font-weight="bold">{escape(CAPTION)}</text>',
    ]
    for number, (name, label) in enumerate(BARS.items()):
        row, y = rows[name], TOP + ROW * number
        middle, end = y + BAR / 2, LEFT + scale * row["speedup"]
        low, high = (LEFT + scale * value for value in row["speedup_interval"])
        colour = "#9ca3af" if name.startswith("autoregressive") else "#4f46e5"
        lines += [
            f'<text x="{LEFT - 10}" y="{middle + 5}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="#111827" stroke-width="2"/>',
            f'<text x="{max(high, LEFT + scale) + 8:.1f}" y="{middle + 5}">{row["speedup"]:.2f}×</text>',
        ]
    base, bottom = LEFT + scale, TOP + ROW * len(BARS) - 8
    lines += [
        f'<path d="M{base:.1f} {TOP - 8}V{bottom}" stroke="#111827" stroke-dasharray="4 3"/>',
        f'<text x="{WIDTH / 2}" y="{height - 14}" text-anchor="middle" font-size="12">{escape(HARDWARE)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


STEP = ROOT / "docs" / "assets" / "step.svg"
STEP_ROWS = (
    ("Text", "#e5e7eb", ("The", "tree", "keeps", "", "", "", "")),
    ("Drafter proposes", "#c7d2fe", ("", "", "", "its", "green", "leaves", "all")),
    ("Target scores", "#c7d2fe", ("", "", "", "its ✓", "green ✓", "needles", "")),
    ("New text", "#e5e7eb", ("The", "tree", "keeps", "its", "green", "needles", "")),
)
"""Label, colour and tokens of the rows of the second figure."""
SHADES = {"✓": "#bbf7d0", "needles": "#fde68a"}
STEP_NOTES = (
    "one forward pass of the target scores all draft tokens",
    "two of them and its own token are kept: τ = 3",
)


def draw_step() -> str:
    """Return the figure of one step of speculative decoding as SVG."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 236" role="img" font-family="sans-serif" '
        'font-size="14" fill="#1f2937">',
        "<title>One step of speculative decoding</title>",
        '<rect width="760" height="236" rx="6" fill="#ffffff"/>',
    ]
    for number, (label, colour, tokens) in enumerate(STEP_ROWS):
        y = 16 + 46 * number
        lines.append(f'<text x="10" y="{y + 22}">{label}</text>')
        for place, token in enumerate(tokens):
            if token:
                shade = SHADES.get(token, SHADES["✓"] if "✓" in token or (number == 3 and place > 2) else colour)
                lines.append(f'<rect x="{140 + 87 * place}" y="{y}" width="81" height="34" rx="4" fill="{shade}"/>')
                lines.append(f'<text x="{180.5 + 87 * place}" y="{y + 22}" text-anchor="middle">{token}</text>')
    lines.append(f'<text x="444" y="222" text-anchor="middle" font-size="13">{STEP_NOTES[0]}; {STEP_NOTES[1]}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


FIGURES = {SPEEDUP: draw_speedup, STEP: draw_step}

if __name__ == "__main__":
    for path, draw in FIGURES.items():
        path.write_text(draw(), encoding="utf-8")
