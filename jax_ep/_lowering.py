"""What a custom call can only know where it is lowered: its module, and the devices that run it."""

from __future__ import annotations

import hashlib
import importlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_ep import _jax_compat, _sharding

if TYPE_CHECKING:
    from jax_ep._group import Group

_keys_lock = threading.Lock()
_keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by module


def attributes_at(lowering: _jax_compat.Lowering, group: Group) -> dict[str, Any]:
    """The attributes of every custom call of `group`; checks who will run it."""
    _check_devices(lowering, group)
    return {"module": np.int64(_module_key(lowering))}


def _module_key(lowering: _jax_compat.Lowering) -> int:
    """Names the module to xla_ffi/site.h, which numbers the calls of each.

    The upper half is a hash of the module's name, the lower half tells living modules of one name
    apart. On other platforms than the CPU nobody numbers calls, and the text of a program must not
    depend on what else was lowered in this process.
    """
    name = hashlib.blake2b(lowering.module_name.encode(), digest_size=4).digest()
    first = int.from_bytes(name, "little", signed=True) << 32
    if "cpu" not in lowering.platforms:
        return first
    with _keys_lock:
        key = _keys.get(lowering.module)
        if key is not None:
            return key
        key = first
        taken = set(_keys.values())
        while key in taken:
            key += 1
        _keys[lowering.module] = key
        core = _core()
        if core is not None:
            core.begin_module(key)
        return key


def _core() -> Any:
    """The extension, or None where it is not built (groups that only lower need none)."""
    try:
        return importlib.import_module("jax_ep._core")
    except ImportError:
        return None


def _check_devices(lowering: _jax_compat.Lowering, group: Group) -> None:
    """Raises unless every device has the rank that create_group gave it."""
    if not group.native or lowering.mesh is None:
        return
    expected = _sharding.teams(group.mesh, group.axes)
    got = _sharding.teams(lowering.mesh, group.axes)
    if {tuple(team) for team in got} == {tuple(team) for team in expected}:
        return
    raise ValueError(
        f"jax_ep: got a program over a mesh whose ranks along {group.axis!r} are the devices "
        f"{_ids(got)}, expected {_ids(expected)} as in the mesh of {group!r}; pass that mesh to "
        "jax.shard_map, or create a group for this one"
    )


def _ids(teams: Any) -> list[list[int]]:
    return [[device.id for device in team] for team in teams]
