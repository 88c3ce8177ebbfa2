"""The plot of one case of a benchmark report."""

from __future__ import annotations

from typing import Any

from jax_ep._cli.bench_report_cases import OPERATIONS, OURS
from jax_ep._cli.inline_svg import INK, drawing

_COLORS = {
    OURS: "#2da44e",
    "all_gather + psum_scatter": "#4c8dff",
    "all_to_all, padded": "#e08a00",
    "ragged_all_to_all": "#d1507c",
}
_MARKERS = dict(zip(_COLORS, "osD^", strict=True))
_STEP = 0.19  # between the methods of an operation


def plot(case: dict[str, Any], number: int) -> str:
    """Medians as points and quartiles as lines, by operation, on a logarithmic axis."""
    names = [name for name in _COLORS if any(r["method"] == name for r in case["results"])]
    with drawing(f"case{number}") as (pyplot, done):
        from matplotlib import lines, ticker

        height = 0.9 + len(OPERATIONS) * (0.28 + 0.2 * len(names))
        figure, axes = pyplot.subplots(figsize=(5.4, height), layout="constrained")
        for place, name in enumerate(names):
            for row, operation in enumerate(OPERATIONS):
                found = [
                    r for r in case["results"] if (r["method"], r["operation"]) == (name, operation)
                ]
                for result in found:
                    _point(axes, result, row + (place - (len(names) - 1) / 2) * _STEP)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.set_xlim(low / 1.15, high * 1.9)  # room for the numbers
        axes.set_yticks(range(len(OPERATIONS)), [o.replace(", ", ",\n") for o in OPERATIONS])
        axes.set_ylim(len(OPERATIONS) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda us, _: duration(us)))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(axis="x", alpha=0.25, color=INK)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.set_xlabel("time of one call (logarithmic)")
        handles = [
            lines.Line2D([], [], color=_COLORS[n], marker=_MARKERS[n], linestyle="", label=n)
            for n in names
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
        return done(figure, f"Times of {case['name']}; the table has the numbers")


def duration(us: float) -> str:
    """Three digits, in us, ms or s."""
    value, unit = (us, "us") if us < 1e3 else (us / 1e3, "ms") if us < 1e6 else (us / 1e6, "s")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def _point(axes: Any, result: dict[str, Any], y: float) -> None:
    color = _COLORS[result["method"]]
    axes.plot([result["q1_us"], result["q3_us"]], [y, y], color=color, linewidth=3, alpha=0.5)
    marker = _MARKERS[result["method"]]
    axes.plot([result["median_us"]], [y], marker=marker, color=color, markersize=6)
    axes.annotate(
        duration(result["median_us"]),
        (max(result["q3_us"], result["median_us"]), y),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )
