"""The decoder: one compiled step that prefills in mode ht and decodes in mode ll, with a KV cache.

The model is the one that was trained (moe_lm.model); here it runs on a few new bytes at a time.
Each slot has a ring of the W newest keys and values, so a request may be of any length and a byte
sees the W before it, as many as in training.  Nothing in the step waits for another process but
jax_ep's dispatch and combine: there is no collective of XLA's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from moe_lm.model import Block, ModelSize, Transformer, rotate

import jax_ep
from jax_ep.flax import ExpertParam
from moe_serve.work import NUM_RECENT, Shape, Work

AXIS = "ep"
MASKED = -1e30  # a score that no byte gets


class State(NamedTuple):
    """What outlives a step; global arrays whose first axis is the rank."""

    keys: jax.Array  # f32[N, layers, S, W, heads, D], ring: position p is in entry p % W
    values: jax.Array
    load: jax.Array  # i32[N, layers, E], pairs of this rank's bytes that chose each expert


def group_config(size: ModelSize, shape: Shape, **options: Any) -> jax_ep.Config:
    """The group's: room for every pair, since what is dropped would depend on the batch."""
    return jax_ep.Config(
        num_experts=size.num_experts,
        top_k=size.top_k,
        hidden=size.width,
        max_tokens=max(shape.chunk, shape.slots),
        align=8,
        dtype=np.float32,
        **options,
    )


class Decoder:
    """The compiled step for one mesh, group and model.

    Args:
        mesh: ranks along the axis "ep".
        group: over the mesh, as `group_config` says.
        size: of the model.
        shape: slots and chunks of the step.
        window: W, bytes that a byte sees, itself included; at least shape.chunk.
    """

    def __init__(
        self, mesh: Mesh, group: jax_ep.Group, size: ModelSize, shape: Shape, window: int
    ) -> None:
        if shape.chunk > window:
            raise ValueError(f"got chunks of {shape.chunk} bytes, expected at most {window}")
        self._mesh, self._size, self._shape, self._window = mesh, size, shape, window
        with nnx.use_eager_sharding(False):
            model = Transformer(size, group, np.random.default_rng(0))
        self._graph, self.experts, self.dense = nnx.split(model, ExpertParam, nnx.Param)
        self._by_rank = NamedSharding(mesh, P(AXIS))
        # Typed as the state that goes in, or the second step would compile again.
        self.step = jax.jit(self._step, donate_argnums=2, out_shardings=self._by_rank)

    def first_state(self) -> State:
        """Empty caches."""
        size, ranks = self._size, self._shape.ranks
        head = size.width // size.heads
        ring = (ranks, size.layers, self._shape.slots, self._window, size.heads, head)
        shapes = State(
            jax.ShapeDtypeStruct(ring, np.float32),
            jax.ShapeDtypeStruct(ring, np.float32),
            jax.ShapeDtypeStruct((ranks, size.layers, size.num_experts), np.int32),
        )

        def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
            of_rank = np.zeros((1, *like.shape[1:]), like.dtype)
            return jax.make_array_from_callback(like.shape, self._by_rank, lambda index: of_rank)

        return jax.tree.map(zeros, shapes)

    def shard(self, rows: np.ndarray) -> jax.Array:
        """i32[N, words], equal on all processes, as the step's input."""
        return jax.make_array_from_callback(rows.shape, self._by_rank, lambda index: rows[index])

    def _step(
        self, dense: nnx.State, experts: nnx.State, state: State, rows: jax.Array
    ) -> tuple[State, jax.Array]:
        """(state, i32[N, S + 1]): each slot's next byte, and the byte behind the chunk."""

        def of_this_rank(
            dense: nnx.State, experts: nnx.State, state: State, rows: jax.Array
        ) -> tuple[State, jax.Array]:
            model = nnx.merge(self._graph, experts, dense)
            work = self._shape.split(rows[0])
            work = work._replace(temperature=work.temperature.view(jnp.float32))
            state = jax.tree.map(lambda leaf: leaf[0], state)

            def prefill(state: State) -> tuple[State, jax.Array]:
                return self._prefill(model, state, work)

            def no_prefill(state: State) -> tuple[State, jax.Array]:
                return state, jnp.zeros((), jnp.int32) * work.chunk_slot

            # The same on all ranks, as a dispatch must be.
            state, first = lax.cond(work.any_chunk > 0, prefill, no_prefill, state)
            state, tokens = self._decode(model, state, work)
            tokens = jnp.concatenate([tokens, first[None]])
            return jax.tree.map(lambda leaf: leaf[None], (state, tokens))

        return jax.shard_map(
            of_this_rank,
            mesh=self._mesh,
            in_specs=(P(), P(AXIS), P(AXIS), P(AXIS)),
            out_specs=P(AXIS),
            check_vma=False,
        )(dense, experts, state, rows)

    def _decode(self, model: Transformer, state: State, work: Work) -> tuple[State, jax.Array]:
        """One byte of every slot that has a request."""
        is_active = work.position >= 0
        position = jnp.maximum(work.position, 0)
        slots = jnp.arange(self._shape.slots)
        # Entry w holds the newest position that is w modulo W: those behind `position` are old.
        held = position[:, None] - (position[:, None] - jnp.arange(self._window)) % self._window
        is_seen = held >= 0
        entry = jnp.where(is_active, position % self._window, self._window)  # beyond: not written

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
        state, logits = self._forward(model, state, recent, is_active, "ll", attend)
        return state, _sample(logits, work.seed, position + 1, work.temperature)

    def _prefill(self, model: Transformer, state: State, work: Work) -> tuple[State, jax.Array]:
        """A chunk of the prompt of one slot, which sees the ring as it was and itself."""
        window, size = self._window, self._shape.chunk
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
        state, logits = self._forward(model, state, recent, is_real, "ht", attend)
        last = jnp.maximum(length - 1, 0)
        drawn = _sample(
            logits[last][None],
            work.seed[slot][None],
            (start + length)[None],
            work.temperature[slot][None],
        )
        return state, drawn[0]

    def _forward(
        self,
        model: Transformer,
        state: State,
        recent: list[jax.Array],
        mask: jax.Array,
        mode: str,
        attend: Any,
    ) -> tuple[State, jax.Array]:
        """Logits [T, 256] of T bytes; `attend(layer, state, qkv)` reads and fills the cache."""
        heads = self._size.heads
        x = sum(table[...][ids] for table, ids in zip(model.embeddings, recent, strict=True))
        loads = []
        for layer, block in enumerate(model.blocks):
            state, out = _attend(block, layer, state, x, heads, attend)
            x = x + out
            out, stats = block.moe(block.moe_norm(x), mask=mask, mode=mode)
            x = x + out
            loads.append(stats.load)
        state = state._replace(load=state.load + jnp.stack(loads))
        return state, model.norm(x) @ model.head[...]


def _attend(
    block: Block, layer: int, state: State, x: jax.Array, heads: int, attend: Any
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
