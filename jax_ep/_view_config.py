"""The Config of a view: a group's, with other sizes for which the group has room."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_ep import _config
from jax_ep._config import Config

_AT_MOST = ("num_experts", "top_k", "hidden")
_CAPACITY = ("recv_rows", "capacity_factor")
_CHANGEABLE = (*_AT_MOST, "align", *_CAPACITY, "overflow")


def shrink(most: Config, config: Config, num_ranks: int, sizes: dict[str, Any]) -> Config:
    """`config` with `sizes` in place of its own, for a view of a group whose Config is `most`."""
    for name in sizes:
        if name not in _CHANGEABLE:
            raise ValueError(
                f"jax_ep.Group.view: got {name}={sizes[name]!r}, expected some of "
                f"{', '.join(_CHANGEABLE)}; create a group for another {name}"
            )
    if any(name in sizes for name in _CAPACITY):
        sizes = dict.fromkeys(_CAPACITY) | sizes  # at most one of the two is given
    view = dataclasses.replace(config, **sizes)
    for name in _AT_MOST:
        if getattr(view, name) > getattr(most, name):
            raise ValueError(
                f"jax_ep.Group.view: got {name}={getattr(view, name)}, expected at most "
                f"{getattr(most, name)}, for which the group has room; create the group with the "
                "largest of all layers"
            )
    _config.check_sizes("jax_ep.Group.view", view, num_ranks)
    return view
