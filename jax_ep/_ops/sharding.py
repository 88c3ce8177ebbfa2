"""A group inside shard_map: where a rank stands, and whether an operation may be called there."""

from __future__ import annotations

import jax
from jax import lax

from jax_ep import _jax_compat
from jax_ep._group import Group


def rank_index(group: Group) -> jax.Array:
    """This rank, i32[]: row-major over the group's axes."""
    return lax.axis_index(group.axes)


def position(group: Group) -> jax.Array:
    """Where this device stands in the mesh as `_mesh.teams` has it, i32[1]: team * N + rank."""
    mesh = _jax_compat.context_mesh()
    manual = _jax_compat.manual_axes(mesh)
    others = (name for name in mesh.axis_names if name not in group.axes and name in manual)
    return lax.axis_index((*others, *group.axes)).reshape(1)


def loose_axes() -> list[str]:
    """Axes of size > 1 of the mesh around a call that are not Manual there."""
    mesh = _jax_compat.context_mesh()
    manual = _jax_compat.manual_axes(mesh)
    return [name for name, size in mesh.shape.items() if size > 1 and name not in manual]


def check_call(group: Group, operation: str) -> None:
    """Raises unless `operation` may be traced here: open group, its axis, its mesh, Manual axes."""
    if not isinstance(group, Group):
        raise ValueError(
            f"jax_ep.{operation}: got group of type {type(group).__name__}, expected a "
            "jax_ep.Group; pass what create_group returned"
        )
    if group.closed:
        raise ValueError(
            f"jax_ep.{operation}: got a closed group ({group!r}), expected an open one; "
            "create a new group with jax_ep.create_group"
        )
    mesh = _jax_compat.context_mesh()
    manual = frozenset() if mesh.empty else _jax_compat.manual_axes(mesh)
    missing = [name for name in group.axes if name not in manual]
    if missing:
        raise ValueError(
            f"jax_ep.{operation} was called outside the group's mesh axis {missing[0]!r}: got "
            f"manual axes {sorted(manual)}, expected {list(group.axes)} among them; call it inside "
            "jax.shard_map(..., mesh=mesh) over that axis"
        )
    expected = tuple(group.mesh.shape.items())
    got = tuple(mesh.shape.items())
    if got != expected:
        raise ValueError(
            f"jax_ep.{operation}: got a different mesh {dict(got)} around the call than that of "
            f"the group over axis {group.axis!r}, expected {dict(expected)}; create a group for "
            "this mesh"
        )
    if group.implementation == "xla":
        return
    if loose := loose_axes():
        raise ValueError(
            f"jax_ep.{operation}: mesh axis {loose[0]!r} of size {mesh.shape[loose[0]]} is not "
            "Manual where the op is called, expected every axis of size > 1 to be (XLA would "
            f"gather the operands); add {loose[0]!r} to the axis_names of jax.shard_map, or create "
            "the group with implementation='xla'"
        )
