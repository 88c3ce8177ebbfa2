"""The FP8 wire's place in the public API; nothing is behind it yet."""

from __future__ import annotations

from typing import NoReturn

import jax

from jax_ep._config import Layout, Mode, Pad
from jax_ep._group import Group
from jax_ep._types import Plan


def dispatch_quantized(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    *,
    plan: Plan | None = None,
    mode: Mode | None = None,
    layout: Layout | None = None,
    pad: Pad = "zero",
) -> NoReturn:
    """Dispatch that delivers FP8 values and scales; not implemented in this version.

    Args:
        group: as in `dispatch`.
        x: as in `dispatch`.
        topk_idx: as in `dispatch`.
        topk_weights: as in `dispatch`.
        plan: as in `dispatch`.
        mode: as in `dispatch`.
        layout: as in `dispatch`.
        pad: as in `dispatch`.

    Returns:
        Nothing yet.

    Raises:
        NotImplementedError: always.

    Example:
        >>> recv = jax_ep.dispatch(group, x, topk_idx)  # instead, for now
    """
    raise NotImplementedError(
        "jax_ep.dispatch_quantized: the FP8 wire is not implemented in this version; "
        "use jax_ep.dispatch"
    )
