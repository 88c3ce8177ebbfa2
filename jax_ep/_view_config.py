"""The Config of a view: a group's, with other sizes for which the group has room."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict, cast

from jax_ep import _config
from jax_ep._config import Config


class ViewSizes(TypedDict, total=False):
    """The fields of Config that a view may have other than its group."""

    num_experts: int
    physical_experts: int | None
    top_k: int
    hidden: int
    align: int
    recv_rows: int | None
    capacity_factor: float | None
    overflow: Literal["drop", "poison"]


_AT_MOST = ("top_k", "hidden")
_CAPACITY = ("recv_rows", "capacity_factor")


def shrink(most: Config, config: Config, num_ranks: int, sizes: ViewSizes) -> Config:
    """`config` with `sizes` in place of its own, for a view of a group whose Config is `most`."""
    given = cast(dict[str, Any], sizes)
    known = {field.name for field in dataclasses.fields(Config)}
    for name, value in given.items():
        if name not in ViewSizes.__annotations__:
            fix = f"create a group for another {name}" if name in known else "correct the name"
            raise ValueError(
                f"jax_ep.Group.view: got {name}={value!r}, expected some of "
                f"{', '.join(ViewSizes.__annotations__)}; {fix}"
            )
    if any(name in given for name in _CAPACITY):
        given = dict.fromkeys(_CAPACITY) | given  # at most one of the two is given
    hidden = given.get("hidden", config.hidden)
    if config.wire is not None and (wrong := config.wire.misfit(hidden, config.dtype)):
        raise ValueError(
            f"jax_ep.Group.view: got hidden={hidden} in a group with wire={config.wire}, expected "
            f"{wrong}; a view has its group's wire, so create the group with it, or choose a "
            "hidden that it fits"
        )
    view = dataclasses.replace(config, **given)
    slots, room = _config.physical_experts(view), _config.physical_experts(most)
    experts = "num_experts" if view.physical_experts is None else "physical_experts"
    limits = {name: (getattr(view, name), getattr(most, name)) for name in _AT_MOST}
    for name, (got, limit) in ({experts: (slots, room)} | limits).items():
        if got > limit:
            raise ValueError(
                f"jax_ep.Group.view: got {name}={got}, expected at most {limit}, for which the "
                "group has room; create the group with the largest of all layers"
            )
    if slots % num_ranks:
        raise ValueError(
            f"jax_ep.Group.view: got {experts}={slots}, expected a multiple of the group's "
            f"{num_ranks} ranks, at most {room}; use {_config.align_up(slots, num_ranks)}"
        )
    _config.check_sizes("jax_ep.Group.view", view, num_ranks)
    return view
