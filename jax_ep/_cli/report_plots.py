"""The plots of ``report --html``."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_ep._cli.inline_svg import INK, drawing

_BAR = "#2da44e"


def load_plot(load: Any, name: str) -> str:
    """Bars of f64[P], and their mean; NaN is not known."""
    with drawing(name) as (pyplot, done):
        figure, axes = pyplot.subplots(figsize=(7.2, 2.6), layout="constrained")
        axes.bar(range(load.size), np.nan_to_num(load), width=0.8, color=_BAR)
        if not np.isnan(load).all():
            axes.axhline(np.nanmean(load), color=INK, linewidth=1, linestyle="--")
        axes.set_xlabel("expert (dashed: the mean)")
        axes.set_ylabel("pairs (token, k)")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        return done(figure, "Pairs of each expert")


def waits_plot(waits: dict[str, Any], name: str) -> str:
    """Heat maps of f64[N, N] seconds, one for each phase, on one scale."""
    with drawing(name) as (pyplot, done):
        figure, all_axes = pyplot.subplots(
            1,
            len(waits),
            figsize=(2.7 * len(waits) + 0.8, 3.0),
            layout="constrained",
            squeeze=False,
        )
        most = max([float(matrix.max()) for matrix in waits.values()] + [1e-9])
        for axes, (phase, matrix) in zip(all_axes[0], waits.items(), strict=True):
            image = axes.imshow(matrix, cmap="viridis", vmin=0, vmax=most)
            axes.set_title(phase)
            axes.set_xlabel("waited for")
            for axis in (axes.xaxis, axes.yaxis):
                axis.get_major_locator().set_params(integer=True)
        all_axes[0][0].set_ylabel("rank that waits")
        figure.colorbar(image, ax=list(all_axes[0]), label="seconds", shrink=0.8)
        return done(figure, "Seconds that ranks waited for each other, by phase")
