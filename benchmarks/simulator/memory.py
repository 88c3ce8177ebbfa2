"""The memory tables of docs/scale.md and docs/tuning.md: what Config.memory says, between marks."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import jax.numpy as jnp

import jax_ep

RANKS = (8, 64, 256, 1024)
NODE_SIZE = 8
BEGIN, END = "<!-- memory: benchmarks/simulate.py memory -->", "<!-- end of memory -->"


def config(mode: str, ranks: int) -> jax_ep.Config:
    """DeepSeek-V3's layer, with as many experts as ranks if that is more."""
    return jax_ep.Config(
        num_experts=max(256, ranks),
        top_k=8,
        hidden=7168,
        max_tokens=4096 if mode == "ht" else 128,
        dtype=jnp.bfloat16,
        mode="ht" if mode == "ht" else "ll",
        capacity_factor=1.25 if mode == "ht" else None,
    )


def rows() -> list[dict[str, Any]]:
    """GiB per rank; None where the GPU library is not installed."""
    found = []
    for mode in ("ht", "ll"):
        for ranks in RANKS:
            cpu, gpu = (
                config(mode, ranks).memory(ranks, node_size=NODE_SIZE, platform=platform)
                for platform in ("cpu", "gpu")
            )
            delivered = gpu.expert_major if mode == "ht" else gpu.expert_batched
            counts = {
                "cpu_heap": cpu.heap_bytes,
                "gpu_heap": gpu.heap_bytes,
                "pinned_stage": gpu.network_stage_bytes,
                "received_rows": delivered.recv_bytes,
            }
            in_gib = {
                name: None if count is None else _gib(count) for name, count in counts.items()
            }
            found.append({"mode": mode, "ranks": ranks} | in_gib)
    return found


def cpu_heaps() -> list[dict[str, Any]]:
    """GiB per rank of CPU heaps, by what a group is made for."""
    found = []
    for ranks in RANKS:
        ht, ll = config("ht", ranks), config("ll", ranks)
        settings = {
            "ht": ht,
            'ht, `partials="dtype"`': dataclasses.replace(ht, partials="dtype"),
            "auto": dataclasses.replace(ht, mode="auto"),
            "ll of 128 tokens": ll,
        }
        heaps = {
            name: _gib(each.memory(ranks, node_size=NODE_SIZE, platform="cpu").heap_bytes)
            for name, each in settings.items()
        }
        found.append({"ranks": ranks} | heaps)
    return found


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 2)


def report() -> dict[str, Any]:
    """What results/memory_cpu.json holds."""
    return {"gib_per_rank": rows(), "gib_per_rank of CPU heaps": cpu_heaps()}


def write(docs: pathlib.Path, found: dict[str, Any]) -> None:
    """Puts the tables between the marks of the pages in `docs`."""
    of_modes, of_cpus = found.values()
    head = ("mode", "ranks", "CPU heap", "GPU heap", "pinned stage (GPU)", "received rows")
    _put(docs / "scale.md", head, of_modes)
    _put(docs / "tuning.md", tuple(of_cpus[0]), of_cpus)


def _put(page: pathlib.Path, head: tuple[str, ...], found: list[dict[str, Any]]) -> None:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(map(_cell, row.values()))} |" for row in found]
    block = "\n".join([BEGIN, *lines, END])
    text = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL),
        encoding="utf-8",
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "?" if value is None else str(value)
