"""Scatter plots for HTML reports as inline SVG, which are readable in black and white."""

from collections.abc import Mapping, Sequence

from .tables import Numbered, render

_WIDTH, _HEIGHT, _MARGIN, _TICKS = 680, 340, 52, 6
_BOUND = (
    "The bar above a point is its bound, the speedup if a step took only the time of its forward passes. The line "
    "through a point is its 95 % interval. The dotted line is the speedup if a step took as long as a baseline step."
)
_PERPLEXITY = (
    "Lossy methods change the perplexity; lossless methods have the target's. Low perplexity alone is not quality: "
    "repetitive text also has low perplexity."
)


def method_charts(groups: Mapping[float, Sequence[Numbered]]) -> list[str]:
    """Plot speedup against tokens per step and, if there are lossy methods, perplexity, for each temperature."""
    charts = []
    for temperature, rows in groups.items():
        at = f", temperature {temperature:g}" if len(groups) > 1 else ""
        title = f"Speedup against tokens per step{at}"
        charts.append(_scatter(rows, "tokens_per_step", title, "tokens per step (τ)", _BOUND))
        if not all(row.get("lossless") for _, row in rows):
            title = f"Speed against perplexity{at}"
            charts.append(_scatter(rows, "perplexity", title, "perplexity of the output under the target", _PERPLEXITY))
    return [chart for chart in charts if chart]


def _scatter(rows: Sequence[Numbered], metric: str, title: str, x_title: str, caption: str) -> str:
    """Plot the speedup of rows against a metric as SVG. Return an empty string if no row has both values."""
    known = [(n, row) for n, row in rows if row.get(metric) is not None and row.get("speedup") is not None]
    if not known:
        return ""
    from_zero = metric == "tokens_per_step"
    values = [float(row[metric]) for _, row in known]
    heights = [row["speedup"] for _, row in known] + [(row.get("speedup_interval") or [0, 0])[1] for _, row in known]
    heights += [row.get("bound") or 0 for _, row in known] if from_zero else []
    left, right, top = 0.0 if from_zero else 0.95 * min(values), 1.05 * max(values), 1.05 * max(heights)

    def x(value: float) -> float:
        return round(_MARGIN + (_WIDTH - 2 * _MARGIN) * (value - left) / (right - left), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * value / top, 1)

    shares = [index / (_TICKS - 1) for index in range(_TICKS)]
    values_of = {"metric": metric, "rows": known, "x": x, "y": y, "from_zero": from_zero, "end": min(right, top)}
    ticks = {"x_ticks": [left + share * (right - left) for share in shares], "y_ticks": [top * each for each in shares]}
    sizes = {"width": _WIDTH, "height": _HEIGHT, "margin": _MARGIN}
    return render("chart.html", title=title, x_title=x_title, caption=caption, **values_of, **ticks, **sizes)
