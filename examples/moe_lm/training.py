"""The training step and its state: data parallel outside the experts, expert parallel inside.

Batches are split over the ranks of the mesh axis ``ep``.  Replicated parameters enter
``jax.shard_map`` as ``P()``, so JAX itself sums their gradients over the ranks; experts enter as
``P("ep")``, so each rank owns its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.flax import ExpertParam
from moe_lm.model import ModelSize, Transformer

AXIS = "ep"
BALANCE_LOSS_WEIGHT = 0.03
WARMUP_STEPS = 50
DECAY_FRACTION = 0.4  # of the steps, at the end, down to a tenth of the peak
ADAM_B2 = 0.98
WEIGHT_DECAY = 0.05
TEMPERATURE = 0.3  # of the text that it writes


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What a run depends on, besides the model's size."""

    steps: int
    learning_rate: float
    seed: int


class TrainState(NamedTuple):
    """Parameters are global arrays: ``dense`` replicated, ``experts`` split over the ranks."""

    dense: Any
    experts: Any
    optimizer: Any


class Measured(NamedTuple):
    """What one batch says; every process gets the whole of it."""

    loss: jax.Array  # f32[], nats per byte, mean over the global batch
    load: jax.Array  # i32[layers, E], pairs that chose each expert
    dropped: jax.Array  # i32[], pairs dropped in all layers and ranks


class Trainer:
    """Compiled ``step`` and ``evaluate`` for one mesh, group and model."""

    def __init__(
        self, mesh: Mesh, group: jax_ep.Group, size: ModelSize, options: TrainOptions
    ) -> None:
        self._mesh, self._group, self._size, self._options = mesh, group, size, options
        with nnx.use_eager_sharding(False):  # weights stay on the host until _place
            model = Transformer(size, group, np.random.default_rng(options.seed))
        self._graph, self._first_experts, self._first_dense = nnx.split(
            model, ExpertParam, nnx.Param
        )
        decay_steps = max(1, int(options.steps * DECAY_FRACTION))
        peak = options.learning_rate
        schedule = optax.join_schedules(
            [
                optax.linear_schedule(peak / WARMUP_STEPS, peak, WARMUP_STEPS),
                optax.linear_schedule(peak, peak / 10, decay_steps),
            ],
            [max(WARMUP_STEPS, options.steps - decay_steps)],
        )
        self._optimizer = optax.adamw(schedule, b2=ADAM_B2, weight_decay=WEIGHT_DECAY)
        self.step = jax.jit(self._step, donate_argnums=0)
        self.write_on = jax.jit(self._write_on)
        self.evaluate = jax.jit(lambda state, tokens: self._loss(*state[:2], tokens)[1].loss)

    def init(self) -> TrainState:
        """The state before the first step: a function of the seed alone."""

        dense = self._place(self._first_dense, P())
        experts = self._place(self._first_experts, P(AXIS))
        parameters = (dense, experts)
        shardings = self._optimizer_shardings(jax.eval_shape(self._optimizer.init, parameters))
        create = jax.jit(self._optimizer.init, out_shardings=shardings)
        return TrainState(dense, experts, create(parameters))

    def shard_batch(self, tokens: np.ndarray) -> jax.Array:
        """Gives every device its rows of the global batch."""
        placed: jax.Array = self._place(tokens, P(AXIS))
        return placed

    def _place(self, tree: Any, spec: P) -> Any:
        """Host arrays, equal on all processes, as global arrays."""
        sharding = NamedSharding(self._mesh, spec)

        def place(leaf: Any) -> jax.Array:
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(place, tree)

    def _optimizer_shardings(self, optimizer: Any) -> Any:
        """Adam's moments live where their parameters do; only experts have three dimensions."""
        experts, replicated = (NamedSharding(self._mesh, spec) for spec in (P(AXIS), P()))
        return jax.tree.map(lambda leaf: experts if leaf.ndim == 3 else replicated, optimizer)

    def _loss(
        self, dense: nnx.State, experts: nnx.State, tokens: jax.Array
    ) -> tuple[jax.Array, Measured]:
        def of_this_rank(
            dense: nnx.State, experts: nnx.State, tokens: jax.Array
        ) -> tuple[jax.Array, Measured]:
            model = nnx.merge(self._graph, experts, dense)
            logits, stats = model(tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            loss = lax.pmean(losses.mean(), AXIS)
            balance = lax.pmean(stats.balance_loss.mean(), AXIS)
            measured = Measured(
                loss,
                lax.psum(stats.load, AXIS),
                lax.psum(stats.num_dropped.sum(), AXIS),
            )
            return loss + BALANCE_LOSS_WEIGHT * balance, measured

        return jax.shard_map(
            of_this_rank, mesh=self._mesh, in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P()
        )(dense, experts, tokens)

    def _write_on(self, state: TrainState, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Goes on where each text ends, byte by byte: experts stay where they are, tokens travel.

        tokens is i32[texts, S], of which the first lengths[text] are given; returns all S bytes.
        """

        def of_this_rank(
            dense: nnx.State, experts: nnx.State, tokens: jax.Array, lengths: jax.Array
        ) -> jax.Array:
            model = nnx.merge(self._graph, experts, dense)
            key = jax.random.fold_in(jax.random.key(self._options.seed), lax.axis_index(AXIS))

            def write_one(position: jax.Array, tokens: jax.Array) -> jax.Array:
                logits, _ = model(tokens)
                drawn = jax.random.categorical(
                    jax.random.fold_in(key, position), logits[:, position - 1] / TEMPERATURE
                )
                is_free = position >= lengths
                kept = jnp.where(is_free, drawn, tokens[:, position])
                return tokens.at[:, position].set(kept)

            return lax.fori_loop(1, tokens.shape[1], write_one, tokens)

        return jax.shard_map(
            of_this_rank,
            mesh=self._mesh,
            in_specs=(P(), P(AXIS), P(AXIS), P(AXIS)),
            out_specs=P(AXIS),
        )(state.dense, state.experts, tokens, lengths)

    def _step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, Measured]:
        gradient = jax.grad(self._loss, argnums=(0, 1), has_aux=True)
        gradients, measured = gradient(state.dense, state.experts, tokens)
        parameters = (state.dense, state.experts)
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, parameters)
        dense, experts = optax.apply_updates(parameters, updates)
        return TrainState(dense, experts, optimizer), measured
