"""The simulator against what two GPUs took: it starts nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from simulator import costs, gpu_runs, model, traffic


def compare() -> dict[str, list[dict[str, Any]]]:
    """[real, simulated] microseconds of what two GPUs took over `cuda` (simulator/gpu_runs.py)."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, mode, runs in (
        ("ht", model.ht, gpu_runs.ht()),
        ("ll", model.ll, gpu_runs.ll()),
        ("ll in rounds", model.ll, gpu_runs.ll_in_rounds()),
    ):
        for run in runs:
            rows = traffic.draw(2, 1, run.tokens, 8, 256)
            if name == "ht":  # received rows by rank: one for each token that goes there
                rows = dataclasses.replace(rows, pairs=rows.to_rank)
            options = model.Options(
                row_bytes=2 * 7168,
                experts=256,
                pieces=4,  # of a fast wire: kernels/gpu/network/token_slices.h
                round_tokens=run.round_tokens,
                # It gathers neighbours, and one token in 2^8 has no expert in the other node.
                rows_per_message=256,
                ll_rows_per_message=256,
                pinned=False,
            )
            simulated = mode(rows, gpu_runs.copy_engines(), costs.gpu(), options)
            us = {
                key: [real, round(simulated[key], 1)]
                for key, real in zip(("dispatch_us", "combine_us"), run.us, strict=True)
            }
            found.setdefault(name, []).append({"tokens": run.tokens, "rounds": run.rounds} | us)
    return found
