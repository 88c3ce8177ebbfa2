"""What a custom call can only know where it is lowered: its module, and the devices that run it."""

from __future__ import annotations

import hashlib
from typing import Any

import jax

from jax_ep import _jax_compat, _mesh
from jax_ep._group import Group


def check(mesh: jax.sharding.Mesh | None, group: Group) -> bool:
    """Raises unless every device of `mesh` has the rank that create_group gave it.

    Args:
        mesh: around the operation that is lowered; None if its devices are not known yet.
        group: the operation's.

    Returns:
        Whether the handler must compare positions instead, as the devices are not known yet.
    """
    if not group.native:
        return False
    _refuse_stored_programs(group)
    if mesh is None:
        return True
    expected = _mesh.teams(group.mesh, group.axes)
    got = _mesh.teams(mesh, group.axes)
    if {tuple(team) for team in got} == {tuple(team) for team in expected}:
        return False
    raise ValueError(
        f"jax_ep: got a program over a mesh whose ranks along {group.axis!r} are the devices "
        f"{_ids(got)}, expected {_ids(expected)} as in the mesh of {group!r}; pass that mesh to "
        "jax.shard_map, or create a group for this one"
    )


def _refuse_stored_programs(group: Group) -> None:
    """On CPUs ranks of several processes meet by XLA's run ids, which one that is loaded has not.

    JAX stores what process 0 has compiled, and only there: the next time process 0 loads it and the
    others compile, and each waits for the other until timeout_s.
    """
    processes = {device.process_index for device in group.mesh.devices.flat}
    if group.platform == "cpu" and len(processes) > 1 and _jax_compat.stores_programs():
        raise ValueError(
            f"jax_ep: got JAX's persistent compilation cache for a program of {group!r}, expected "
            "it off on CPUs in jobs of several processes, where process 0 would load what the "
            "others compile; set JAX_ENABLE_COMPILATION_CACHE=false, or unset "
            "JAX_COMPILATION_CACHE_DIR"
        )


def module_key(text: str) -> int:
    """Names a lowered module: a hash of the program, in the upper half (xla_ffi/site.h).

    Nothing else will do: XLA's run ids depend on the program, so what it carries must not tell what
    else this process has lowered.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little", signed=True) or 1) << 32


def _ids(teams: Any) -> list[list[int]]:
    return [[device.id for device in team] for team in teams]
