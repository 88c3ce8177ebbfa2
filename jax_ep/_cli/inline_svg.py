"""Plots as SVGs that live inside a page, and take its colors and its font."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

INK = "#010203"  # stands for the page's own text color


@contextlib.contextmanager
def drawing(name: str) -> Iterator[tuple[Any, Callable[[Any, str], str]]]:
    """(pyplot, a function of a figure and its label that closes it and returns its SVG).

    Args:
        name: what the ids in the SVG begin with; another one for each plot of a page.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 10,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
        ),
    }

    def done(figure: Any, label: str) -> str:
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
        return _inline(text.getvalue(), name, label)

    with pyplot.rc_context(settings):
        yield pyplot, done


def _inline(svg: str, name: str, label: str) -> str:
    """The <svg> alone: ids that begin with the name, the page's ink and font, no own size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'id="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r'<svg width="[^"]*" height="[^"]*"', "<svg", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
