"""Measured costs, each from a file of benchmarks/results, which says how it was measured."""

from __future__ import annotations

import dataclasses

from simulator import gpu_runs
from simulator.results import read


@dataclasses.dataclass(frozen=True)
class CpuCosts:
    """Ranks on CPUs; times are of one core.

    Attributes:
        message_us: one message over libfabric's TCP, whatever its length.
        wire_us_per_byte: in addition, for each byte of it: sender and receiver together.
        local_us_per_byte: for each byte that a rank must move in dispatch and combine.
        ll_pair_us: dispatch and combine of mode ll inside a node, of one rank.
        memcpy_us_per_byte: a copy on one core, in the same run: to compare machines.
    """

    message_us: float
    wire_us_per_byte: float
    local_us_per_byte: float
    ll_pair_us: float
    memcpy_us_per_byte: float


@dataclasses.dataclass(frozen=True)
class GpuCosts:
    """Ranks on GPUs.

    Attributes:
        command_us: a proxy thread takes a command from a GPU's ring, and posts it to no network.
        signal_us: from a kernel through both proxies to a kernel, without a network.
        plan_us: the plan of a node.
        dispatch_us_per_byte, combine_us_per_byte: mode ht inside a node, for each byte of the rows
            that a rank receives, copies and padding included.
        piece_us: (dispatch, combine) of mode ht between nodes: kernels of a piece, without rows.
        ll_us: (dispatch, combine) of mode ll between nodes: the kernels of a call of one token.
        ll_us_per_token: of mode ll inside a node, for each token of 7,168 elements.
        stage_gb_s: kernels store to, and load from, pinned host memory.
        copy_gb_s: a copy engine between two GPUs, which all_gather inside a node cannot exceed.
    """

    command_us: float
    signal_us: float
    plan_us: float
    dispatch_us_per_byte: float
    combine_us_per_byte: float
    piece_us: tuple[float, float]
    ll_us: tuple[float, float]
    ll_us_per_token: tuple[float, float]
    stage_gb_s: tuple[float, float]
    copy_gb_s: float


def cpu() -> CpuCosts:
    """From `network_cpu` and `exchange_cpu`, both of two cores that were busy all the time."""
    cores = 2
    wire = read("network_cpu")["wire"]["bandwidth (gigabytes_per_s)"]
    short, long = 14336, 262144
    short_us, long_us = (
        size / wire[str(size)]["jax_ep"]["median"] / 1e3 * cores for size in (short, long)
    )
    per_byte = (long_us - short_us) / (long - short)
    exchange = read("exchange_cpu")
    local = exchange["virtual_devices"]
    moved = local["must_move_bytes_per_process"] * local["processes"]
    decode = exchange["ll"]
    return CpuCosts(
        message_us=short_us - short * per_byte,
        wire_us_per_byte=per_byte,
        local_us_per_byte=local["median_us"]["jax_ep"] * cores / moved,
        ll_pair_us=decode["median_us"]["jax_ep"] * cores / decode["ranks"],
        memcpy_us_per_byte=local["median_us"]["memcpy"] / moved,
    )


def gpu() -> GpuCosts:
    """From `kernels_ring_1xh200`, `kernels_ht_4xh200`, `_ll_4xh200` and `_nodes_2xh200`.

    What kernels between nodes cost is from runs over `cuda` (simulator/gpu_runs.py): of a piece
    from calls in 64 and in 128 rounds, in mode ll from calls of one token without the network.
    """
    ring = read("kernels_ring_1xh200")
    one = next(run for run in ring["ring"] if run["rings"] == 1 and run["threads"] == 1)
    ht = next(
        run
        for run in read("kernels_ht_4xh200")["runs"]
        if run.get("rows") and run["sms"] == 32 and run["hidden"] == 7168
    )
    row_bytes = ht["rows"] * ht["hidden"] * 2
    tokens = read("kernels_ll_4xh200")["runs"][0]["tokens"]
    slopes = [(tokens["512"][i] - tokens["32"][i]) / (512 - 32) for i in (0, 1)]
    nodes = read("kernels_nodes_2xh200")["runs"][0]
    by_rounds = {run.rounds: run for run in gpu_runs.ht()}
    pieces = [(by_rounds[128].us[i] - by_rounds[64].us[i]) / (128 - 64) for i in (0, 1)]
    (one_token,) = [run for run in gpu_runs.ll() if run.tokens == 1]
    on_the_way = ring["signal_us"]["p50"] + gpu_runs.copy_engines().latency_us
    return GpuCosts(
        command_us=1 / one["mcmd_per_s"],
        signal_us=ring["signal_us"]["p50"],
        plan_us=ht["plan_us"],
        dispatch_us_per_byte=ht["dispatch_us"] / row_bytes,
        combine_us_per_byte=ht["combine_us"] / row_bytes,
        piece_us=(pieces[0], pieces[1]),
        ll_us=(one_token.us[0] - on_the_way, one_token.us[1] - on_the_way),
        ll_us_per_token=(slopes[0], slopes[1]),
        stage_gb_s=(nodes["host_stores_gb_per_s"], nodes["host_loads_gb_per_s"]),
        copy_gb_s=ht["copy_engine_gb_per_s"],
    )
