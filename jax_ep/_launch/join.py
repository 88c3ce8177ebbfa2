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
# Process 0 writes it when it looks for its devices, and XLA refuses to write it again: one that is
# started again would have no devices. It is made from what all processes have written of their own
# devices, which stays, so the second one is equal. (XLA of jax 0.10.2 to 0.11, for CPUs.)
_TOPOLOGY = "cpu:global_topology/cpu"
_of_the_life_before: list[bytes] = []  # what this process has taken away: at most one


def join(
    address: str,
    num_processes: int,
    process_id: int,
    local_device_ids: Sequence[int] | None,
    timeout_s: int,
) -> None:
    """``jax.distributed.initialize``, as a client also in process 0."""
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=local_device_ids,
        coordinator_bind_address=_NOBODYS_ADDRESS,
        initialization_timeout=timeout_s,
    )
    if process_id == 0:
        _jax_compat.stop_own_coordination_service()
        _make_way(_jax_compat.distributed_client())


def _make_way(client: Any) -> None:
    with contextlib.suppress(Exception):  # NOT_FOUND: this is its first life
        _of_the_life_before.append(client.key_value_try_get_bytes(_TOPOLOGY))
        client.key_value_delete(_TOPOLOGY)


def leave() -> None:
    """Before a process ends: others that are started again later need what it may have taken."""
    client = _jax_compat.distributed_client()
    for topology in _of_the_life_before:
        with contextlib.suppress(Exception):  # ALREADY_EXISTS: it has looked for its devices
            client.key_value_set_bytes(_TOPOLOGY, topology)
