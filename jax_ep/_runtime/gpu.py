"""The GPU half of a start: finds XLA's arenas, joins the memory of node-mates, starts a session.

How ranks reach each other's rows is decided here, once per group (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jax_ep import _env, _extension, _gpu_library
from jax_ep._runtime import bootstrap, descriptors


def load_library() -> None:
    """Loads the GPU library, which needs no GPU.

    Raises:
        NotImplementedError: it is not installed, or of another version; the text says what to do.
    """
    _extension.load().load_gpu_library(_gpu_library.path())


def check_flags() -> None:
    """Refuses XLA flags that would run calls of one group at the same time.

    Raises:
        ValueError: XLA_FLAGS holds such a flag.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_command_buffer_scheduling_mode=CONCURRENT" in flags:
        raise ValueError(
            "jax_ep.create_group: got --xla_gpu_command_buffer_scheduling_mode=CONCURRENT in "
            "XLA_FLAGS, expected a mode that keeps the order of calls; remove the flag"
        )


def check_elastic(num_ranks: int, node_size: int, num_processes: int) -> None:
    """Refuses what a group that goes on without some of its processes cannot have.

    Raises:
        ValueError: it has several nodes, or XLA_FLAGS lets a compilation wait for all processes.
    """
    if node_size != num_ranks:
        raise ValueError(
            f"jax_ep.create_group: got Config.elastic=True on GPUs with {node_size} of {num_ranks} "
            "ranks in a node, expected all; leave elastic out, or node_size"
        )
    if num_processes > 1 and _flag("xla_gpu_shard_autotuning") not in ("false", "0"):
        raise ValueError(
            "jax_ep.create_group: got Config.elastic=True on GPUs of several processes, expected "
            "--xla_gpu_shard_autotuning=false in XLA_FLAGS; without it a program that is compiled "
            "after a loss waits for what the lost process would have measured. Set it before jax "
            "is imported"
        )


def _flag(name: str) -> str | None:
    """What XLA_FLAGS, or the file that it names, says of a flag last."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        try:
            flags = pathlib.Path(flags).read_text()
        except OSError:
            return None
    said = re.findall(rf"(?:^|\s)--{name}(?:=(\S*))?(?=\s|$)", flags)
    return said[-1].lower() if said else None


def start(
    options: Any, exchange: bootstrap.Exchange, devices: Sequence[Any], mates: Collection[int]
) -> Any:
    """A started `_core.GpuSession` for this process's `devices`; collective over the processes.

    `mates` are the processes whose memory this one maps: those that share a node with it, or all
    of its host.

    Raises:
        ValueError: XLA_FLAGS or an environment variable does not fit, or GPUs of one node cannot
            reach each other's memory.
        NotImplementedError: the GPU library is not installed.
        MemoryError: too little device memory.
    """
    check_flags()
    zero_copy = _env.flag("JAX_EP_ZERO_COPY")
    probes = [] if zero_copy is False else [_probe(device) for device in devices]
    session = _extension.load().GpuSession(
        options=options,
        library_path=_gpu_library.path(),
        live_pointers=[array.unsafe_buffer_pointer() for array in probes] or [0] * len(devices),
        min_arena_bytes=_min_arena_bytes(devices[0]),
        require_arena=zero_copy is True,
        max_sms=_env.positive_int("JAX_EP_GPU_SMS") or 0,  # 0: by need, call by call
        use_tma=_env.flag("JAX_EP_GPU_TMA") is not False,
    )
    try:
        unmapped = _connect(session, exchange, mates)
        records = exchange.share("connected", {"unmapped": unmapped})
        reasons = [record["unmapped"] for record, _ in records.values() if record["unmapped"]]
        if reasons:
            session.forbid_arenas(reasons[0])
        session.start()
        exchange.share("started", {})
    except BaseException as error:
        session.abort(f"process {exchange.me} failed in create_group: {error!r}")
        raise
    return session


def _connect(session: Any, exchange: bootstrap.Exchange, mates: Collection[int]) -> str:
    """Joins the memory of the mates; returns why an arena could not be mapped, or ""."""
    if exchange.alone:
        return str(session.connect({}, {}))
    own = session.export_fds()
    received: dict[int, list[int]] = {}
    try:
        pids = {p: pid for p, pid in exchange.pids.items() if p != exchange.me and p in mates}
        with descriptors.serve(own, pids.values()) as address:
            records = exchange.share("connect", {"fds": address}, session.local_blob())
            for process, pid in pids.items():
                server = records[process][0]["fds"]
                received[process] = descriptors.fetch(server, pid, exchange.timeout_s)
            exchange.share("fetched", {})  # nobody stops serving before all have fetched
        blobs = {process: blob for process, (_, blob) in records.items()}
        return str(session.connect(blobs, received))
    finally:
        for fd in (*own, *(fd for fds in received.values() for fd in fds)):
            with contextlib.suppress(OSError):
                os.close(fd)


def _probe(device: Any) -> jax.Array:
    """A live buffer of XLA's allocator on `device`."""
    array: jax.Array = jax.device_put(np.zeros(256, np.uint8), device)
    return array.block_until_ready()


def _min_arena_bytes(device: Any) -> int:
    """An exported range is worth having if it holds most of what XLA may use."""
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return int(limit) // 2
