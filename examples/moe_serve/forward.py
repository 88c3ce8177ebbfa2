"""The trained model on a few new bytes at a time, with its keys and values kept: one rank's part.

Each slot has a ring of the W newest keys and values, so a request may be of any length and a byte
sees the W before it, as many as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from moe_lm.model import Block, ModelSize, Transformer, rotate

import jax_ep
from moe_serve.work import NUM_RECENT, Shape, Work

MASKED = -1e30  # a score that no byte gets


class State(NamedTuple):
    """What outlives a step; outside of it the arrays are global, and the rank is a first axis."""

    keys: jax.Array  # f32[layers, S, W, heads, D], rings: position p is in entry p % W
    values: jax.Array
    load: jax.Array  # i32[layers, E], pairs of this rank's bytes that chose each expert


# (layer, state, qkv[T, 3, heads, D]) -> (state with the new keys and values, mixed[T, heads, D])
Attend = Callable[[int, State, jax.Array], tuple[State, jax.Array]]


class Forward(NamedTuple):
    """The model inside shard_map, with this rank's experts."""

    model: Transformer
    placements: jax_ep.Placement  # of all layers, stacked
    active: jax.Array | None  # i32[N], ranks that take part; None: all
    size: ModelSize
    shape: Shape
    window: int

    def decode(self, state: State, work: Work) -> tuple[State, jax.Array]:
        """One byte of every slot that has a request."""
        is_active = work.position >= 0
        position = jnp.maximum(work.position, 0)
        slots = jnp.arange(self.shape.slots)
        # Entry w holds the newest position that is w modulo W: those behind `position` are old.
        held = position[:, None] - (position[:, None] - jnp.arange(self.window)) % self.window
        is_seen = held >= 0
        entry = jnp.where(is_active, position % self.window, self.window)  # beyond: not written

        def attend(layer: int, state: State, qkv: jax.Array) -> tuple[State, jax.Array]:
            query, key = (rotate(qkv[:, i], position) for i in (0, 1))
            at = (layer, slots, entry)
            state = state._replace(
                keys=state.keys.at[at].set(key, mode="drop"),
                values=state.values.at[at].set(qkv[:, 2], mode="drop"),
            )
            mixed = _attention(
                query[:, None], state.keys[layer], state.values[layer], is_seen[:, None]
            )
            return state, mixed[:, 0]

        recent = [work.recent[:, -1 - back] for back in range(NUM_RECENT)]
        state, logits = self._logits(state, recent, is_active, "ll", attend)
        return state, _sample(logits, work.seed, position + 1, work.temperature)

    def prefill(self, state: State, work: Work) -> tuple[State, jax.Array]:
        """A chunk of the prompt of one slot, which sees the ring as it was and itself."""
        window, size = self.window, self.shape.chunk
        slot, start, length = work.chunk_slot, work.chunk_start, work.chunk_length
        inside = jnp.arange(size)
        is_real = inside < length
        position = start + inside
        newest = start - 1
        held = newest - (newest - jnp.arange(window)) % window
        key_position = jnp.concatenate([held, position])
        is_key = jnp.concatenate([held >= 0, is_real])
        behind = position[:, None] - key_position
        is_seen = is_key & (behind >= 0) & (behind < window)
        entry = jnp.where(is_real, position % window, window)  # beyond: not written

        def attend(layer: int, state: State, qkv: jax.Array) -> tuple[State, jax.Array]:
            query, key = (rotate(qkv[:, i], position) for i in (0, 1))
            keys = jnp.concatenate([state.keys[layer, slot], key])
            values = jnp.concatenate([state.values[layer, slot], qkv[:, 2]])
            mixed = _attention(query[None], keys[None], values[None], is_seen[None])[0]
            at = (layer, slot, entry)
            state = state._replace(
                keys=state.keys.at[at].set(key, mode="drop"),
                values=state.values.at[at].set(qkv[:, 2], mode="drop"),
            )
            return state, mixed

        tokens = work.chunk
        begins = range(NUM_RECENT - 1, -1, -1)  # the byte itself, the one before it, ...
        recent = [lax.slice_in_dim(tokens, begin, begin + size) for begin in begins]
        state, logits = self._logits(state, recent, is_real, "ht", attend)
        last = jnp.maximum(length - 1, 0)
        drawn = _sample(
            logits[last][None],
            work.seed[slot][None],
            (start + length)[None],
            work.temperature[slot][None],
        )
        return state, drawn[0]

    def _logits(
        self,
        state: State,
        recent: list[jax.Array],
        mask: jax.Array,
        mode: str,
        attend: Attend,
    ) -> tuple[State, jax.Array]:
        """Logits [T, 256] of T bytes; `attend(layer, state, qkv)` reads and fills the cache."""
        model, heads = self.model, self.size.heads
        x = sum(table[...][ids] for table, ids in zip(model.embeddings, recent, strict=True))
        loads = []
        for layer, block in enumerate(model.blocks):
            state, out = _attend(block, layer, state, x, heads, attend)
            x = x + out
            placement = jax.tree.map(lambda leaf, at=layer: leaf[at], self.placements)
            out, stats = block.moe(
                block.moe_norm(x), mask=mask, mode=mode, placement=placement, active=self.active
            )
            x = x + out
            loads.append(stats.load)
        state = state._replace(load=state.load + jnp.stack(loads))
        return state, model.norm(x) @ model.head[...]


def _attend(
    block: Block, layer: int, state: State, x: jax.Array, heads: int, attend: Attend
) -> tuple[State, jax.Array]:
    rows, width = x.shape
    qkv = block.attention_norm(x) @ block.attention.qkv[...]
    state, mixed = attend(layer, state, qkv.reshape(rows, 3, heads, width // heads))
    return state, mixed.reshape(rows, width) @ block.attention.out[...]


def _attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, is_seen: jax.Array
) -> jax.Array:
    """[B, Q, heads, D] on [B, K, heads, D] where bool[B, Q, K]; no NaN where it sees none."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, keys) * query.shape[-1] ** -0.5
    scores = jnp.where(is_seen[:, None], scores, MASKED)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)


def _sample(
    logits: jax.Array, seed: jax.Array, position: jax.Array, temperature: jax.Array
) -> jax.Array:
    """i32[T]: a byte each, drawn by (seed, position) alone; the likeliest at temperature 0."""

    def draw(
        logits: jax.Array, seed: jax.Array, position: jax.Array, temperature: jax.Array
    ) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        noise = jax.random.gumbel(key, logits.shape)
        return jnp.argmax(logits + noise * temperature).astype(jnp.int32)

    return jax.vmap(draw)(logits, seed, position, temperature)
