"""MoEConfigs shaped like published models; `dataclasses.replace` makes small ones of them."""

from __future__ import annotations

from jax_ep.flax._config import MoEConfig

__all__ = [
    "DEEPSEEK_V3",
    "MIXTRAL_8X7B",
    "MIXTRAL_8X22B",
    "QWEN3_30B_A3B",
    "QWEN3_235B_A22B",
]

MIXTRAL_8X7B = MoEConfig(num_experts=8, top_k=2, hidden=4096, expert_width=14336)
"""Mixtral 8x7B (2401.04088): softmax over the two chosen experts."""

MIXTRAL_8X22B = MoEConfig(num_experts=8, top_k=2, hidden=6144, expert_width=16384)
"""Mixtral 8x22B."""

QWEN3_30B_A3B = MoEConfig(num_experts=128, top_k=8, hidden=2048, expert_width=768)
"""Qwen3-30B-A3B (2505.09388): many small experts, normalised softmax, none shared."""

QWEN3_235B_A22B = MoEConfig(num_experts=128, top_k=8, hidden=4096, expert_width=1536)
"""Qwen3-235B-A22B (2505.09388)."""

DEEPSEEK_V3 = MoEConfig(
    num_experts=256,
    top_k=8,
    hidden=7168,
    expert_width=2048,
    router="group_limited",
    num_groups=8,
    top_groups=4,
    scale=2.5,
    shared_width=2048,
)
"""DeepSeek-V3 (2412.19437): sigmoid with balancing bias, 4 of 8 groups, one shared expert."""
