"""Meshes, axes and ranks: arithmetic on the mesh of a group, outside of any program."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


def axis_tuple(axis: str | tuple[str, ...]) -> tuple[str, ...]:
    """The axis names of a group, always as a tuple."""
    if isinstance(axis, str) or not isinstance(axis, Iterable):
        return (axis,)
    return tuple(axis)


def axis_size(mesh: Any, axes: tuple[str, ...]) -> int:
    """Ranks along `axes` of `mesh`."""
    return math.prod(mesh.shape[name] for name in axes)


def teams(mesh: Any, axes: tuple[str, ...]) -> Any:
    """Devices of a concrete mesh as [team, rank]: the group's axes last, in the group's order."""
    others = [name for name in mesh.axis_names if name not in axes]
    order = [mesh.axis_names.index(name) for name in (*others, *axes)]
    return np.transpose(mesh.devices, order).reshape(-1, axis_size(mesh, axes))


def local_ranks(mesh: Any, axes: tuple[str, ...], process: int) -> tuple[int, ...]:
    """Ranks of the devices of `process`, over all teams, ascending."""
    return tuple(
        rank
        for rank, devices in enumerate(teams(mesh, axes).T)
        if any(device.process_index == process for device in devices)
    )


def is_owned(mesh: Any) -> bool:
    """Whether every device of the mesh belongs to this job, so that programs can run on it."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return False
    devices = set(mesh.devices.flat)
    try:
        return devices <= set(jax.devices(next(iter(devices)).platform))
    except RuntimeError:  # no such backend in this job
        return False
