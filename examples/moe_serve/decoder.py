"""The decoder: one compiled step that prefills in mode ht and decodes in mode ll, with a KV cache.

Nothing in the step waits for another process but jax_ep's dispatch and combine: there is no
collective of XLA's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from moe_lm.model import ModelSize, Transformer

import jax_ep
from jax_ep.flax import ExpertParam
from moe_serve.forward import Forward, State
from moe_serve.work import Shape

AXIS = "ep"


def group_config(
    size: ModelSize, shape: Shape, redundant: int = 0, **options: Any
) -> jax_ep.Config:
    """The group's: room for every pair, since what is dropped would depend on the batch.

    Expert slots are `redundant` more than experts, or a few more: the ranks must divide them.
    """
    slots = -(-(size.num_experts + redundant) // shape.ranks) * shape.ranks
    return jax_ep.Config(
        num_experts=size.num_experts,
        physical_experts=slots,
        top_k=size.top_k,
        hidden=size.width,
        max_tokens=max(shape.chunk, shape.slots),
        align=8,
        dtype=np.float32,
        **options,
    )


def parameters_like(size: ModelSize) -> tuple[nnx.State, nnx.State]:
    """(dense, experts) with the shapes of a checkpoint's, before there is a group."""
    alone = jax.sharding.AbstractMesh((1,), (AXIS,))
    config = group_config(size, Shape(1, 1, 1))
    group = jax_ep.create_group(alone, AXIS, config, implementation="xla")
    with nnx.use_eager_sharding(False):
        model = Transformer(size, group, np.random.default_rng(0))
    _, experts, dense = nnx.split(model, ExpertParam, nnx.Param)
    return dense, experts


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
        self._group, self._everywhere = group, NamedSharding(mesh, P())
        with nnx.use_eager_sharding(False):
            model = Transformer(size, group, np.random.default_rng(0))
        self._graph, in_slots, self.dense = nnx.split(model, ExpertParam, nnx.Param)
        # As a checkpoint has them: slot e of a new layer has expert e, replicas follow.
        self.experts = jax.tree.map(lambda leaf: leaf[: size.num_experts], in_slots)
        self._by_rank = NamedSharding(mesh, P(AXIS))
        # A step that fails because a rank is lost is repeated: from the state before it.
        donated = () if group.config.elastic else (4,)
        # Typed as the state that goes in, or the second step would compile again.
        self.step = jax.jit(self._step, donate_argnums=donated, out_shardings=self._by_rank)

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

    def replicate(self, tree: Any) -> Any:
        """Host arrays, equal on all processes, on every device."""
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback(
                leaf.shape, self._everywhere, lambda index: np.asarray(leaf)[index]
            ),
            tree,
        )

    def first_slots(self) -> np.ndarray:
        """i32[layers, P]: expert p % E in slot p of every layer."""
        of_layer = np.arange(self._group.config.physical_experts) % self._size.num_experts
        return np.tile(of_layer.astype(np.int32), (self._size.layers, 1))

    def place(self, experts: Any, slots: np.ndarray) -> tuple[Any, jax_ep.Placement]:
        """Experts where `slots` says, and the maps that say so to the step.

        Args:
            experts: the parameters, NumPy trees [E, ...].
            slots: i32[layers, P], the expert in each slot of each layer.

        Returns:
            (parameters [P, ...] by rank, `Placement` of all layers, stacked).
        """
        of_layer = [jax_ep.Placement.from_physical(row, self._size.num_experts) for row in slots]
        placements = self.replicate(jax.tree.map(lambda *leaves: np.stack(leaves), *of_layer))

        def place_leaf(path: Any, leaf: Any) -> jax.Array:
            (layer,) = (int(key.key) for key in path if str(getattr(key, "key", "")).isdigit())
            shape = (slots.shape[1], *leaf.shape[1:])
            return jax.make_array_from_callback(
                shape, self._by_rank, lambda index: leaf[slots[layer][index[0]]]
            )

        return jax.tree_util.tree_map_with_path(place_leaf, experts), placements

    def _step(
        self,
        dense: nnx.State,
        experts: nnx.State,
        placements: jax_ep.Placement,
        active: jax.Array | None,
        state: State,
        rows: jax.Array,
    ) -> tuple[State, jax.Array]:
        """(state, i32[N, S + 1]): each slot's next byte, and the byte behind the chunk.

        `active` is what an elastic group has agreed on, and None for another one.
        """

        def of_this_rank(
            dense: nnx.State,
            experts: nnx.State,
            placements: jax_ep.Placement,
            active: jax.Array | None,
            state: State,
            rows: jax.Array,
        ) -> tuple[State, jax.Array]:
            model = nnx.merge(self._graph, experts, dense)
            forward = Forward(model, placements, active, self._size, self._shape, self._window)
            work = self._shape.split(rows[0])
            work = work._replace(temperature=work.temperature.view(jnp.float32))
            state = jax.tree.map(lambda leaf: leaf[0], state)

            def prefill(state: State) -> tuple[State, jax.Array]:
                return forward.prefill(state, work)

            def no_prefill(state: State) -> tuple[State, jax.Array]:
                return state, jnp.zeros((), jnp.int32) * work.chunk_slot

            # The same on all ranks, as a dispatch must be.
            state, first = lax.cond(work.any_chunk > 0, prefill, no_prefill, state)
            state, tokens = forward.decode(state, work)
            tokens = jnp.concatenate([tokens, first[None]])
            return jax.tree.map(lambda leaf: leaf[None], (state, tokens))

        return jax.shard_map(
            of_this_rank,
            mesh=self._mesh,
            in_specs=(P(), P(AXIS), P(), P(), P(AXIS), P(AXIS)),
            out_specs=P(AXIS),
            check_vma=False,
        )(dense, experts, placements, active, state, rows)
