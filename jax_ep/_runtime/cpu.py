"""The CPU half of a start: connects the heaps of a host and shares out its cores."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import jax

from jax_ep import _env, _warn
from jax_ep._runtime.bootstrap import Exchange


def start(session: Any, exchange: Exchange) -> Any:
    """Connects and starts a new `_core.Session`; ends it on any error."""
    try:
        records = exchange.share("connect", {}, session.local_blob())
        session.connect({process: blob for process, (_, blob) in records.items()})
        exchange.share("connected", {})
        session.start()
        exchange.share("started", {})  # who could not start says so here: nobody waits for it below
        session.barrier(exchange.timeout_s)
        exchange.share("ready", {})
    except BaseException as error:
        session.abort(f"process {exchange.me} failed in create_group: {error!r}")
        raise
    return session


def warn_about_small_pool() -> None:
    """XLA:CPU's thread pool deadlocks when virtual devices outnumber it (docs/tuning.md)."""
    devices = jax.local_device_count("cpu")
    text = os.environ.get("NPROC", "")
    pool = int(text) if text.isdigit() else len(os.sched_getaffinity(0))
    if devices > 1 and pool < max(2 * devices, 8):
        _warn.warn(
            f"jax_ep: this process has {devices} CPU devices but XLA's thread pool has {pool} "
            "threads; XLA:CPU can deadlock on such a pool once many executions are queued. Set "
            "NPROC=32 or more in the environment before jax is imported, or use `python -m jax_ep "
            "launch`",
            RuntimeWarning,
        )


def threads_per_rank(greetings: dict[int, Any], host: str, teams: Any) -> int:
    """This rank's share of the cores that the group's processes of this host may use, at least one.

    JAX_EP_THREADS_PER_RANK overrides. Processes may be bound to cores of their own.
    """
    wanted = _env.positive_int("JAX_EP_THREADS_PER_RANK")
    if wanted is not None:
        return wanted
    here = {process for process, record in greetings.items() if record["host"] == host}
    ranks_here = sum(device.process_index in here for team in teams for device in team)
    cores = {
        core
        for process in here
        for first, last in greetings[process]["cpus"]
        for core in range(first, last + 1)
    }
    share = len(cores) // max(1, ranks_here)
    return max(1, min(share, len(os.sched_getaffinity(0))))


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """`numbers` as [first, last] of each run, for a greeting: hosts have hundreds of cores.

    >>> ranges({0, 1, 2, 8})
    [[0, 2], [8, 8]]
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs
