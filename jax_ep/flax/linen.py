"""MoE for Flax Linen: holds the weights of a `_layer.Layer` as partitioned params."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType, PartitionSpec

import jax_ep
from jax_ep import _jax_compat
from jax_ep._config import Mode
from jax_ep.flax._config import MoEConfig
from jax_ep.flax._init import Inits
from jax_ep.flax._layer import ExpertFn, Layer, MoEStats, Precision
from jax_ep.flax._placement import Placement

__all__ = ["STATE", "MoE"]

STATE = "router_state"
"""Collection of the balancing bias: `variables[STATE]["router_bias"]`, f32[E]."""


def _placed(init: Any, spec: PartitionSpec) -> Any:
    """`init` with its result where `spec` says: on Explicit axes Linen checks that and no more."""

    def make(*arguments: Any) -> jax.Array:
        value: jax.Array = init(*arguments)
        kinds = _jax_compat.context_mesh().axis_types
        if kinds and all(kind == AxisType.Explicit for kind in kinds):
            value = jax.sharding.reshard(jnp.asarray(value), spec)
        return value

    return make


class MoE(nn.Module):
    """Mixture of experts, as `jax_ep.flax.MoE` with the same math, weights and names.

    The weights are `params`, boxed in `nn.Partitioned` (`nn.get_partition_spec`); the bias of
    sigmoid routers is in the collection `STATE`, to be replaced by `jax_ep.flax.updated_bias` after
    a step. Inside a shard_map of your own pass unboxed variables (`nn.unbox`).

    Args:
        config: as in `jax_ep.flax.MoE`.
        group: as in `jax_ep.flax.MoE`.
        placement: as in `jax_ep.flax.MoE`.
        expert_fn: as in `jax_ep.flax.MoE`.
        param_dtype: as in `jax_ep.flax.MoE`.
        kernel_init: as in `jax_ep.flax.MoE`.
        precision: as in `jax_ep.flax.MoE`.

    Example:
        >>> moe = jax_ep.flax.linen.MoE(config, group)
        >>> variables = moe.init(jax.random.key(0), x)
        >>> out, stats = jax.jit(moe.apply)(variables, x)
    """

    config: MoEConfig
    group: jax_ep.Group
    placement: Placement = Placement()
    expert_fn: ExpertFn | None = None
    param_dtype: Any = jnp.float32
    kernel_init: Inits = None
    precision: Precision | None = None  # behind the others: fields may be given by position

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        mode: Mode | None = None,
        placement: jax_ep.Placement | None = None,
        active: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats]:
        """Sends the tokens through their experts.

        Args:
            x: [..., T, H], split as `placement.tokens` says (global), or this rank's part of it.
            mask: bool[..., T], split as x: True where the token is real, or None if all are. What
                x holds elsewhere is not looked at, goes nowhere and is not counted; out is 0 there.
            mode: "ht" or "ll"; None: the group's.
            placement: in which slots the experts' weights are (docs/placement.md), an array
                argument. None: expert e is in slot e.
            active: i32[N] of an elastic group, which ranks take part: what `Group.agree` returned.
                Where a pair's expert is on none of them, the token's other experts stand for it
                (`renormalize` of `jax_ep.dispatch`). None: all ranks take part.

        Returns:
            ([..., T, H] in the group's dtype, stats of the real tokens in x).

        Raises:
            ValueError: as `jax_ep.dispatch`, or x does not fit.

        Example:
            >>> out, stats = moe.apply(variables, x)
        """
        layer = Layer(self.config, self.group, self.placement, self.expert_fn, self.precision)
        values: dict[str, jax.Array] = {}
        for name, weight in layer.weights().items():
            shape = layer.shape_here(weight)  # which Linen compares with what it is given
            if name == "router_bias":
                values[name] = self.variable(STATE, name, jnp.zeros, shape, jnp.float32).value
                continue
            made = _placed(layer.initializer(self.kernel_init, name), weight.spec)
            init: Any = nn.with_partitioning(made, tuple(weight.spec))
            values[name] = self.param(name, init, shape, self.param_dtype)
        return layer(values, x, mask, mode, placement, active)
