"""Exchanges of two GPUs as two nodes over `cuda`, measured: `experiments_2xh200`.

The shape is DeepSeek-V3's layer, 8 of 256 experts, 7,168 elements of bf16.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from simulator.networks import Network
from simulator.results import read

HT_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Run:
    """A call of `tokens` tokens of each rank.

    Attributes:
        round_tokens: of a round at most; 0: the call is not cut.
        us: of dispatch and combine, medians of what was measured.
    """

    tokens: int
    round_tokens: int
    us: tuple[float, float]

    @property
    def rounds(self) -> int:
        return -(-self.tokens // self.round_tokens) if self.round_tokens else 1


def _medians(runs: Iterable[tuple[tuple[int, int], dict[str, Any]]]) -> list[Run]:
    """Of runs with the same (tokens, round_tokens)."""
    by_cut: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for cut, run in runs:
        by_cut.setdefault(cut, []).append(run)
    return [
        Run(*cut, us=(_median(same, "dispatch_us"), _median(same, "combine_us")))
        for cut, same in by_cut.items()
    ]


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def ht() -> list[Run]:
    """Mode ht in rounds, received rows by rank: four slices, or 4 to 128 rounds."""
    name = "ht between nodes in rounds and slices, 2026-11-27"
    runs = []
    for run in read("experiments_2xh200")[name]["two rounds ahead, each a slice"]:
        options = dict(word.split("=") for word in run["options"].split())
        if options.get("cuda") == "1" and options.get("layout") == "2":
            runs.append(((HT_TOKENS, int(options.get("round", 0))), run))
    return _medians(runs)


def ll() -> list[Run]:
    """Mode ll, 1 to 128 tokens."""
    name = "fewer commands, looks and copies, 2026-11-28"
    last = "and one block looks, pairs are indexed once, all warps tag"
    runs = read("experiments_2xh200")[name]["ll over cuda"][last]
    return _medians(((run["tokens"], 0), run) for run in runs)


def ll_in_rounds() -> list[Run]:
    """Mode ll of 128 tokens, received rows by rank, by kernels before those of `ll`."""
    runs = read("experiments_2xh200")["ll between nodes, 2026-11-28"]
    return _medians(
        ((run["tokens"], run["round_tokens"]), run)
        for run in runs["calls of 128 tokens in rounds"]
        if run["layout"] == "rank_major"
    )


def copy_engines() -> Network:
    """What `cuda` has for a network: a copy of four rows, alone, and the rate of long ones."""
    copies = read("experiments_2xh200")["fewer commands, looks and copies, 2026-11-28"]
    (copy,) = [
        copy
        for copy in copies["copies from GPU to GPU"]
        if (copy["call"], copy["gpus"], copy["copies"], copy["bytes"])
        == ("cudaMemcpyAsync", 2, 1, 57536)
    ]
    return Network(
        "copy engines",
        read("kernels_nodes_2xh200")["copy_engine_gb_per_s"],
        rails=1,
        latency_us=copy["done_us"],
        post_us=copy["thread_us"],
        source="benchmarks/results/experiments_2xh200.json",
        efficiency=1.0,
    )
