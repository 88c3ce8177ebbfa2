"""MoE for Flax NNX: holds the weights of a `_layer.Layer` as annotated Variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

import jax_ep
from jax_ep._config import Mode
from jax_ep.flax._config import MoEConfig
from jax_ep.flax._init import Inits
from jax_ep.flax._layer import ExpertFn, Layer, MoEStats, Precision, updated_bias
from jax_ep.flax._placement import Placement


class ExpertParam(nnx.Param[Any]):
    """A parameter whose leading axis is the expert: split over the ranks of the group."""


class RouterBias(nnx.Variable[Any]):
    """The balancing bias of a router, f32[E]; no `nnx.Param`, so it gets no gradient."""


class MoE(nnx.Module):
    """Mixture of experts: router, dispatch, experts, combine, and a shared expert if wanted.

    Under `jit` it takes and returns global arrays and makes its own `jax.shard_map`; called inside
    a shard_map over the group's axes it takes and returns this rank's. Either way its Variables
    carry their PartitionSpec (`nnx.get_partition_spec`), and are placed at once where the group has
    a real mesh.

    Args:
        config: shapes and router.
        group: made with `config.group_config(...)`; its dtype is the compute dtype.
        placement: which mesh axes split tokens and weights.
        expert_fn: `(x[R, H], group_sizes i32[E_l], w_gate, w_up [E_l, H, F], w_down [E_l, F, H])
            -> [R, H]`, rows in expert_major order, everything in the compute dtype, w_gate None
            without a gate; None: `ragged_ffn`. With `placement.tp` F is one rank's share and the
            results of its ranks are added up.
        precision: None, or "fp8": the routed experts' rows travel in FP8 (the group's wire, or
            `FP8()`) and are multiplied in FP8 by `pallas.grouped_ffn_fp8`, in place of expert_fn.
            For gated experts with silu. Weights, gradients and the rest stay as they are.
        param_dtype: dtype of the weights.
        kernel_init: an initializer of all weights, or a dict of them by weight name; None:
            truncated normal of variance 1 / fan_in.
        rngs: for the weights.

    Attributes: `router` [H, E], `router_bias` f32[E] (sigmoid routers), `w_gate` [E, H, F] (gated),
    `w_up` [E, H, F], `w_down` [E, F, H], `shared_gate`, `shared_up` [H, S], `shared_down` [S, H].
    In a group of P = `Config.physical_experts` the first axis of the `w_` has P slots, at first as
    `jax_ep.Placement.identity(E, P)` places the experts, and each call needs its placement.

    Raises:
        ValueError: config, group and placement do not fit.

    Example:
        >>> moe = jax_ep.flax.MoE(config, group, rngs=nnx.Rngs(0))
        >>> out, stats = nnx.jit(lambda moe, x: moe(x))(moe, x)
    """

    def __init__(
        self,
        config: MoEConfig,
        group: jax_ep.Group,
        *,
        placement: Placement = Placement(),  # noqa: B008 (frozen)
        expert_fn: ExpertFn | None = None,
        precision: Precision | None = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Inits = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Creates the weights."""
        # NNX refuses an attribute of a wrong type in words of its own.
        Layer(config, group, placement, expert_fn, precision).check_types()
        self.config = config
        self.group = group
        self.placement = placement
        self.expert_fn = expert_fn
        self.precision = precision
        layer = self._layer()
        weights = layer.weights()
        mesh = {"mesh": group.mesh} if isinstance(group.mesh, Mesh) else {}
        for name, weight in weights.items():
            metadata: dict[str, Any] = {"out_sharding": tuple(weight.spec), **mesh}
            if name == "router_bias":
                bias = jnp.zeros(weight.shape, jnp.float32)
                self.router_bias = RouterBias(bias, **metadata)
                continue
            kind = ExpertParam if name.startswith("w_") else nnx.Param
            value = layer.initializer(kernel_init, name)(rngs.params(), weight.shape, param_dtype)
            setattr(self, name, kind(value, **metadata))

    def _layer(self) -> Layer:
        return Layer(self.config, self.group, self.placement, self.expert_fn, self.precision)

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
            >>> out, stats = moe(x)
        """
        layer = self._layer()
        weights = {name: getattr(self, name)[...] for name in layer.weights()}
        return layer(weights, x, mask, mode, placement, active)

    def update_bias(self, load: jax.Array, rate: float = 1e-3) -> None:
        """Moves `router_bias` against `load`, once per training step (see `updated_bias`).

        Args:
            load: i32[E], `MoEStats.load` of the step's global batch (stacked layers: [L, E]).
            rate: how far.

        Raises:
            ValueError: the router has no bias.

        Example:
            >>> moe.update_bias(stats.load)
        """
        if not self.config.has_bias:
            raise ValueError(
                f"jax_ep.flax.MoE.update_bias: got router={self.config.router!r}, expected one "
                "with a bias; add MoEStats.balance_loss to the loss instead"
            )
        self.router_bias[...] = updated_bias(self.router_bias[...], load, rate)
