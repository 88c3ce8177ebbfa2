"""The memory table of docs/scale.md: what Config.memory says, written between two marks."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax.numpy as jnp

import jax_ep

RANKS = (8, 64, 256, 1024)
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
                config(mode, ranks).memory(ranks, node_size=8, platform=platform)
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
                name: None if count is None else round(count / 2**30, 2)
                for name, count in counts.items()
            }
            found.append({"mode": mode, "ranks": ranks} | in_gib)
    return found


def write(page: pathlib.Path, found: list[dict[str, Any]]) -> None:
    """Puts the table between the marks of `page`."""
    lines = [
        "| mode | ranks | CPU heap | GPU heap | pinned stage (GPU) | received rows |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        cells = ["?" if row[name] is None else f"{row[name]:.2f}" for name in list(row)[2:]]
        lines.append(f"| {row['mode']} | {row['ranks']:,} | {' | '.join(cells)} |")
    block = "\n".join([BEGIN, *lines, END])
    text = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL),
        encoding="utf-8",
    )
