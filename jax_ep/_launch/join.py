"""Joins a job whose coordination service is in a process of its own (``coordinator.py``).

jax.distributed.initialize (jax 0.10.2 to 0.11) has no option for that: in process 0 it always
starts a service, at ``coordinator_bind_address``, and then connects to ``coordinator_address`` like
every other process. So process 0 gets an address for a service that nobody will ask, at a port of
the kernel's choice, and that service is stopped at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from jax_ep import _jax_compat

_NOBODYS_ADDRESS = "127.0.0.1:0"
# Process 0 writes one when it looks for its devices, and XLA refuses to write it again: one that is
# started again would have no devices. They are made from what all processes have written of their
# own devices, which stays, so the second ones are equal. (XLA of jax 0.10.2 to 0.11.)
_TOPOLOGIES = tuple(f"{name}:global_topology/{name}" for name in ("cpu", "cuda", "rocm"))
_COPIES = "jax_ep/launch/"  # of those that a process 0 that was started again has removed


def join(
    address: str,
    num_processes: int,
    process_id: int,
    local_device_ids: Sequence[int] | None,
    timeout_s: int,
    *,
    process_0_is_gone: bool,
) -> None:
    """``jax.distributed.initialize``, as a client also in process 0.

    Args:
        address: of the coordinator.
        num_processes: of the job.
        process_id: the number of this one.
        local_device_ids: its GPUs, None for JAX's choice.
        timeout_s: for the coordinator to answer.
        process_0_is_gone: it comes no more: this process sees to what that one has removed.
    """
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=local_device_ids,
        coordinator_bind_address=_NOBODYS_ADDRESS,
        initialization_timeout=timeout_s,
    )
    client = _jax_compat.distributed_client()
    if process_id == 0:
        _jax_compat.stop_own_coordination_service()
        _make_way(client)
    elif process_0_is_gone:
        _restore(client)


def _make_way(client: Any) -> None:
    for name in _TOPOLOGIES:
        topology = _value(client, name)
        if topology is not None:
            client.key_value_set_bytes(_COPIES + name, topology, allow_overwrite=True)
            client.key_value_delete(name)


def _restore(client: Any) -> None:
    for name in _TOPOLOGIES:
        copy = _value(client, _COPIES + name)
        if copy is not None:
            with contextlib.suppress(Exception):  # ALREADY_EXISTS: process 0 has found its devices
                client.key_value_set_bytes(name, copy)


def _value(client: Any, key: str) -> bytes | None:
    try:
        value: bytes = client.key_value_try_get_bytes(key)
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
    return value


def leave(process_id: int) -> None:
    """Before a process ends: others that are started again later need what it may have removed."""
    if process_id == 0:
        with contextlib.suppress(Exception):  # without the coordinator nobody is started again
            _restore(_jax_compat.distributed_client())
