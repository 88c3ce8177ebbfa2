"""Named shapes for ``python -m jax_ep bench``: sizes only, nothing is measured here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Shape:
    """One MoE layer as a rank sees it."""

    tokens: int  # per rank
    hidden: int
    top_k: int
    num_experts: int
    dtype: str
    capacity_factor: float | None = 1.25
    zipf_exponent: float = 0.0  # 0 routes uniformly

    def payload_bytes(self, itemsize: int) -> int:
        """Bytes of one rank's (token, expert) rows: what a dispatch brings to the experts."""
        return self.tokens * self.top_k * self.hidden * itemsize


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "tiny": Shape(tokens=64, hidden=128, top_k=2, num_experts=8, dtype="float32"),
        "small": Shape(tokens=256, hidden=1024, top_k=2, num_experts=16, dtype="float32"),
        "cpu": Shape(tokens=1024, hidden=2048, top_k=4, num_experts=32, dtype="float32"),
        "cpu-zipf": Shape(
            tokens=1024, hidden=2048, top_k=4, num_experts=32, dtype="float32", zipf_exponent=1.0
        ),
        "decode": Shape(
            tokens=8, hidden=1024, top_k=4, num_experts=32, dtype="float32", capacity_factor=None
        ),
        "mixtral": Shape(tokens=1024, hidden=4096, top_k=2, num_experts=8, dtype="bfloat16"),
        "qwen3-235b": Shape(tokens=1024, hidden=4096, top_k=8, num_experts=128, dtype="bfloat16"),
        "deepseek-v3-decode": Shape(
            tokens=128,
            hidden=7168,
            top_k=8,
            num_experts=256,
            dtype="bfloat16",
            capacity_factor=None,
        ),
        "deepseek-v3": Shape(tokens=1024, hidden=7168, top_k=8, num_experts=256, dtype="bfloat16"),
    }
)
