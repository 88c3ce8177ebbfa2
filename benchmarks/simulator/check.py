"""The simulator against real exchanges of 2 to 16 ranks on this machine's cores."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

from run_cpu import run as run_program
from run_cpu import worker_result

from simulator import costs, model, traffic

CASES = ((2, 1), (4, 1), (8, 1), (8, 2), (16, 2), (16, 4))  # ranks, node size
LIMIT_S = 600
PROGRAM = pathlib.Path(__file__).with_name("real_run.py")


def run(ranks: int, node_size: int, *options: str) -> dict[str, Any]:
    """One real run: what real_run.py prints."""
    command = [sys.executable, str(PROGRAM), "--ranks", str(ranks), "--node-size", str(node_size)]
    env = {"NPROC": "64", "JAX_EP_SOCKET_IFNAME": "lo"}
    result: dict[str, Any] = worker_result(run_program([*command, *options], env, LIMIT_S))
    return result


def compare(real: dict[str, Any]) -> dict[str, Any]:
    """What the simulator says of a real run, and real over simulated.

    Times are also compared with costs scaled by how fast the machine copied memory in that run: it
    may be another machine than that of the costs, and it may be busy.
    """
    measured = costs.cpu()
    cores = len(os.sched_getaffinity(0))
    slower = real["memcpy_us_per_byte"] / measured.memcpy_us_per_byte
    result: dict[str, Any] = {"slower": round(slower, 2)}
    for mode, tokens in (("ht", real["tokens"]), ("ll", real["ll_tokens"])):
        rows = traffic.draw(
            real["ranks"], real["node_size"], tokens, real["top_k"], real["experts"]
        )
        simulated = model.cpu(rows, measured, 4 * real["hidden"], real["top_k"], cores)
        channels = real["per_call"][mode]
        sums = [
            sum(value[i] for name, value in channels.items() if name in CHANNELS[mode])
            for i in (0, 1)
        ]
        us = real["us"][mode]
        result[mode] = {
            "us": [round(us, 1), round(simulated[f"{mode}_us"], 1)],
            "us_ratio": round(us / simulated[f"{mode}_us"], 2),
            "us_ratio_scaled": round(us / simulated[f"{mode}_us"] / slower, 2),
            "messages": [round(sums[0], 1), round(simulated[f"{mode}_messages"], 1)],
            "bytes": [round(sums[1]), round(simulated[f"{mode}_bytes"])],
        }
    return result


CHANNELS = {
    "ht": {"dispatch", "dispatch-done", "combine", "combine-done"},
    "ll": {"ll-dispatch", "ll-dispatch-done", "ll-combine", "ll-combine-done"},
}


def check() -> list[dict[str, Any]]:
    """All cases, [real, simulated] of each number."""
    results = []
    for ranks, node_size in CASES:
        real = run(ranks, node_size)
        keys = ("ranks", "node_size", "transport", "tokens", "hidden", "top_k", "experts", "load")
        results.append({key: real[key] for key in keys} | compare(real))
        print(json.dumps(results[-1]), flush=True)
    return results
