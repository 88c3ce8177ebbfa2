"""A byte-level transformer whose feed-forward layers are Mixtures of Experts (Flax NNX).

The model runs inside ``jax.shard_map``: tokens and experts are this rank's.  Attention and
embeddings are replicated; the experts' weights are split over the ranks, and ``jax_ep.flax.MoE``
sends tokens to them and back.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_ep
from jax_ep import flax as ep_flax

INIT_STD = 0.02
ROPE_BASE = 10_000.0
NUM_INPUT_BYTES = 3  # a byte and the two before it: a small model starts above a bigram


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """What fixes the shapes of the parameters."""

    width: int
    layers: int
    heads: int
    expert_width: int
    num_experts: int
    top_k: int
    vocabulary: int = 256


def _weight(rng: np.random.Generator, *shape: int, scale: float = INIT_STD) -> np.ndarray:
    # On the host: compiling JAX's generator for every shape takes longer than drawing.
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def _moe(size: ModelSize, group: jax_ep.Group, rng: np.random.Generator) -> ep_flax.MoE:
    """Router, dispatch, experts (up, silu, down), combine."""
    config = ep_flax.MoEConfig(
        num_experts=size.num_experts,
        top_k=size.top_k,
        hidden=size.width,
        expert_width=size.expert_width,
        gated=False,
    )
    down_scale = size.expert_width**-0.5 / (2 * size.layers) ** 0.5
    scales = {"router": INIT_STD, "w_up": size.width**-0.5, "w_down": down_scale}
    return ep_flax.MoE(
        config,
        group,
        kernel_init={
            name: lambda key, shape, dtype, scale=scale: _weight(rng, *shape, scale=scale)
            for name, scale in scales.items()
        },
        rngs=nnx.Rngs(0),
    )


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, size: ModelSize, rng: np.random.Generator) -> None:
        self.heads = size.heads
        self.qkv = nnx.Param(_weight(rng, size.width, 3 * size.width, scale=size.width**-0.5))
        self.out = nnx.Param(
            _weight(rng, size.width, size.width, scale=(size.width * 2 * size.layers) ** -0.5)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, H] -> [B, S, H]."""
        batch, length, width = x.shape
        qkv = (x @ self.qkv[...]).reshape(batch, length, 3, self.heads, width // self.heads)
        positions = jnp.arange(length)
        query, key = rotate(qkv[:, :, 0], positions), rotate(qkv[:, :, 1], positions)
        mixed = jax.nn.dot_product_attention(query, key, qkv[:, :, 2], is_causal=True)
        return mixed.reshape(batch, length, width) @ self.out[...]


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of [..., S, heads, D] at i32[S]."""
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** (-jnp.arange(half) / half)
    angle = positions[:, None].astype(frequency.dtype) * frequency
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Block(nnx.Module):
    """Attention, then experts, each behind an RMS norm and around a residual."""

    def __init__(self, size: ModelSize, group: jax_ep.Group, rng: np.random.Generator) -> None:
        self.attention_norm = nnx.RMSNorm(size.width, rngs=nnx.Rngs(0))
        self.attention = Attention(size, rng)
        self.moe_norm = nnx.RMSNorm(size.width, rngs=nnx.Rngs(0))
        self.moe = _moe(size, group, rng)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ep_flax.MoEStats]:
        """[B, S, H] -> [B, S, H]."""
        x = x + self.attention(self.attention_norm(x))
        out, stats = self.moe(self.moe_norm(x))
        return x + out, stats


class Transformer(nnx.Module):
    """Bytes to logits of the next byte; a position's input also tells its two predecessors."""

    def __init__(self, size: ModelSize, group: jax_ep.Group, rng: np.random.Generator) -> None:
        tables = (NUM_INPUT_BYTES, size.vocabulary, size.width)
        self.embeddings = nnx.List(
            [
                nnx.Param(_weight(rng, *tables[1:], scale=tables[0] ** -0.5))
                for _ in range(tables[0])
            ]
        )
        self.blocks = nnx.List([Block(size, group, rng) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, rngs=nnx.Rngs(0))
        self.head = nnx.Param(np.zeros((size.width, size.vocabulary), np.float32))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, ep_flax.MoEStats]:
        """i32[B, S] -> logits f32[B, S, 256] and the stats of all layers, stacked."""
        length = tokens.shape[1]
        x = sum(
            table[...][jnp.pad(tokens, ((0, 0), (back, 0)))[:, :length]]
            for back, table in enumerate(self.embeddings)
        )
        collected = []
        for block in self.blocks:
            x, stats = block(x)
            collected.append(stats)
        logits = self.norm(x) @ self.head[...]
        return logits, jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected)
