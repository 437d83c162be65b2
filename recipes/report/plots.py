"""Plots of results, with matplotlib (the extra `report`), readable in black and white."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MARKERS = "osD^v<>P"
_LINES = ("-", "--", "-.", ":")
_INCHES = (7.0, 4.4)
_WANTED = (
    "there is no plot, for matplotlib is not installed: pip install draftsmith[report], then the same command again"
)


def missing_matplotlib() -> str | None:
    """What to tell a user who has no matplotlib; None where it is installed."""
    return None if find_spec("matplotlib") is not None else _WANTED


def draw_saturation(results: Mapping[str, Any], path: Path) -> None:
    """Tokens per step over the conversations that the table was counted on: for each number of sequences a curve, with
    95 % intervals over prompts, and a horizontal line, r = 1 for all pairs. Source: `slim.txt`, figure 7.

    Args:
        results: what `saturation.run_saturation` writes.
        path: a .png; written whole or not at all.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    sizes = [row["conversations"] for row in results["sizes"]]
    for place, (sequences, base) in enumerate(results["baseline"].items()):
        rows = [row["sequences"][sequences] for row in results["sizes"]]
        values = [row["tokens_per_step"] for row in rows]
        bars = [
            [value - row["interval"][0] for value, row in zip(values, rows, strict=True)],
            [row["interval"][1] - value for value, row in zip(values, rows, strict=True)],
        ]
        shade, line = f"{min(0.6, 0.3 * place)}", _LINES[place % len(_LINES)]
        look: dict[str, Any] = {"color": shade, "linestyle": line, "marker": _MARKERS[place % len(_MARKERS)]}
        word = f"{sequences} sequence" + "s" * (sequences != "1")
        axes.errorbar(sizes, values, yerr=bars, capsize=3, label=f"{word}, table", **look)
        axes.axhline(base["tokens_per_step"], color=shade, linestyle=line, linewidth=0.8)
        axes.annotate(
            f"{word}, r = 1", (1, base["tokens_per_step"]), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            fontsize="small", color=shade,
        )  # fmt: skip
        enough = results["verdict"][sequences]["enough"]
        if enough is not None:
            axes.axvline(enough, color=shade, linestyle=":", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_xlabel("conversations that the table was counted on (dotted: where more stops paying)")
    axes.set_ylabel("tokens per step")
    axes.legend(loc="best", frameon=False)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.png")
    try:
        figure.savefig(unfinished, dpi=150, metadata={"Software": None})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
