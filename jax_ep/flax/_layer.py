"""The layer as a function of a dict of weights: no Flax here; _nnx and linen hold the weights.

Every product of a weight with `width` columns is split over tp, every weight with a `hidden`
dimension is gathered over fsdp first; the routed experts' rows travel through jax_ep.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _config, _jax_compat
from jax_ep._config import Mode
from jax_ep.flax._config import MoEConfig
from jax_ep.flax._init import Initializer, Inits, initializer
from jax_ep.flax._placement import Placement, axes_of

ExpertFn = Callable[
    [jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array], jax.Array
]  # (x[R, H], group_sizes i32[E_l], w_gate, w_up [E_l, H, F], w_down [E_l, F, H]) -> [R, H]

Precision = Literal["fp8"]

# What each dimension of a weight is; Placement says which mesh axis splits it.
DIMS: dict[str, tuple[str | None, ...]] = {
    "router": ("hidden", None),
    "router_bias": (None,),
    "w_gate": ("experts", "hidden", "width"),
    "w_up": ("experts", "hidden", "width"),
    "w_down": ("experts", "width", "hidden"),
    "shared_gate": ("hidden", "width"),
    "shared_up": ("hidden", "width"),
    "shared_down": ("width", "hidden"),
}


class MoEStats(NamedTuple):
    """Statistics of the real tokens in a layer's x (of all ranks, if x is global).

    Args:
        balance_loss: f32[], `routing.load_balancing_loss`: 1 when the router is balanced.
        load: i32[E], (token, slot) pairs that chose each expert, dropped or not.
        num_dropped: i32[], pairs that did not fit the receive rows.
    """

    balance_loss: jax.Array
    load: jax.Array
    num_dropped: jax.Array


class Weight(NamedTuple):
    """One parameter of a layer: its global shape and PartitionSpec, of as many entries."""

    shape: tuple[int, ...]
    spec: P


@dataclasses.dataclass(frozen=True)
class Layer:
    """The static part of a layer; hashable, so modules may rebuild it at every call."""

    config: MoEConfig
    group: jax_ep.Group
    placement: Placement
    expert_fn: ExpertFn | None
    precision: Precision | None

    def weights(self) -> dict[str, Weight]:
        """Every parameter that this layer has, with its global shape."""
        config = self.config
        self.check_types()
        self.placement.check(config, self.group)
        self._check_precision()
        present = ["router", "w_up", "w_down"]
        present += ["router_bias"] * config.has_bias + ["w_gate"] * config.gated
        if config.shared_width:
            present += ["shared_up", "shared_down"] + ["shared_gate"] * config.gated
        return {name: Weight(self._shape(name), self._spec(name)) for name in present}

    def check_types(self) -> None:
        """Raises ValueError if config, group or placement is something else."""
        kinds = {
            "config": ("a jax_ep.flax.MoEConfig", MoEConfig),
            "group": ("what jax_ep.create_group returns", jax_ep.Group),
            "placement": ("a jax_ep.flax.Placement", Placement),
        }
        for name, (expected, kind) in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(
                    f"jax_ep.flax.MoE: got {name} of type {type(value).__name__}, expected "
                    f"{expected}; pass that (docs/flax.md)"
                )

    def _check_precision(self) -> None:
        if self.precision is None:
            return
        config, known = self.config, get_args(Precision)
        group = self.group.config
        wire = group.wire or jax_ep.FP8()
        wrong = ""
        if self.precision not in known:
            wrong = f", expected None or one of {known}"
        elif self.expert_fn is not None:
            wrong = " with an expert_fn, expected one of both; leave one out"
        elif not config.gated or config.activation is not jax.nn.silu:
            activation = getattr(config.activation, "__name__", config.activation)
            wrong = (
                f" with gated={config.gated}, activation={activation}, expected gated experts with "
                "jax.nn.silu; use precision=None for others"
            )
        elif misfit := (
            wire.product_misfit(group.hidden) or wire.misfit(group.hidden, group.dtype)
        ):
            wrong = f" with rows in {wire}, expected {misfit}; set Config.wire"
        if wrong:
            raise ValueError(f"jax_ep.flax.MoE: got precision={self.precision!r}{wrong}")

    def shape_here(self, weight: Weight) -> tuple[int, ...]:
        """The shape that a weight has where this is called: one rank's part inside shard_map."""
        if not _manual_axes() & set(self.group.axes):
            return weight.shape
        parts = (
            math.prod(self.group.mesh.shape[n] for n in axes_of(entry)) for entry in weight.spec
        )
        return tuple(size // part for size, part in zip(weight.shape, parts, strict=True))

    def initializer(self, inits: Inits, name: str) -> Initializer:
        """The initializer of weight `name`: replicas, as Placement.identity has them, are equal."""
        init, num_experts = initializer(inits, name), self.config.num_experts

        def with_replicas(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
            if DIMS[name][0] != "experts" or shape[0] <= num_experts:
                return init(key, shape, dtype)
            experts = init(key, (num_experts, *shape[1:]), dtype)
            return experts[np.arange(shape[0]) % num_experts]

        return with_replicas

    def _shape(self, name: str) -> tuple[int, ...]:
        config = self.config
        if name in ("router", "router_bias"):
            return (config.hidden, config.num_experts)[-len(DIMS[name]) :]
        width = config.shared_width if name.startswith("shared") else config.expert_width
        slots = _config.physical_experts(self.group.config)
        sizes = {"experts": slots, "hidden": config.hidden, "width": width}
        return tuple(sizes[str(dim)] for dim in DIMS[name])

    def _spec(self, name: str) -> P:
        return self.placement.weight_spec(self.group, DIMS[name])

    def __call__(
        self,
        weights: Mapping[str, jax.Array],
        x: jax.Array,
        mask: jax.Array | None = None,
        mode: Mode | None = None,
        experts_at: jax_ep.Placement | None = None,
        active: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats]:
        """The layer's output, shaped as x in the group's dtype, and its stats.

        Inside a shard_map over the group's axes x, mask and weights are local; elsewhere they are
        global and the layer makes the shard_map.
        """
        if isinstance(experts_at, Placement):
            raise ValueError(
                "jax_ep.flax.MoE: got a jax_ep.flax.Placement in a call, expected a "
                "jax_ep.Placement, which says where the experts are; give the former, which says "
                "how the layer is sharded, to the constructor"
            )
        if x.ndim < 2 or x.shape[-1] != self.config.hidden:
            raise ValueError(
                f"jax_ep.flax.MoE: got x of shape {list(x.shape)}, expected [..., T, "
                f"hidden={self.config.hidden}]; reshape it"
            )
        if mask is not None:
            _check_mask(mask, x)
        manual = _manual_axes()
        if manual & set(self.group.axes):
            return self._local(weights, x, mask, experts_at, active, mode=mode, stat_axes=())
        mesh = _jax_compat.context_mesh() if manual else self.group.mesh
        token_axes = self.placement.token_axes(self.group)
        spec = self.placement.token_spec(self.group)
        _check_split(x, spec, mesh.shape)
        x_spec = P(*spec, *(None,) * (x.ndim - len(spec)))
        specs = {name: self._spec(name) for name in weights}
        given = (dict(weights), x, mask, experts_at, active)
        in_specs = (
            specs,
            x_spec,
            None if mask is None else P(*x_spec[:-1]),
            *jax.tree.map(lambda _: P(), (experts_at, active)),
        )
        if any(kind == AxisType.Explicit for kind in mesh.axis_types):
            given = jax.sharding.reshard(
                given, jax.tree.map(lambda s: NamedSharding(mesh, s), in_specs)
            )
        mapped = jax.shard_map(
            functools.partial(self._local, mode=mode, stat_axes=token_axes),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=(x_spec, P()),
            axis_names=frozenset(mesh.axis_names) - manual,
        )
        result: tuple[jax.Array, MoEStats] = mapped(*given)
        return result

    def _local(
        self,
        weights: Mapping[str, jax.Array],
        x: jax.Array,
        mask: jax.Array | None,
        experts_at: jax_ep.Placement | None,
        active: jax.Array | None,
        *,
        mode: Mode | None,
        stat_axes: tuple[str, ...],
    ) -> tuple[jax.Array, MoEStats]:
        config, dtype = self.config, self.group.config.dtype
        tokens = x.reshape(math.prod(x.shape[:-1]), config.hidden)
        if mask is not None:
            # Before anything is computed of them: 0 * NaN would reach the weights' gradients.
            mask = mask.reshape(-1)
            tokens = jnp.where(mask[:, None], tokens, jnp.zeros((), tokens.dtype))
        router = self._ready("router", weights["router"], jnp.float32)
        ids, probabilities, topk_weights = self._route(
            router, weights.get("router_bias"), tokens, mask
        )

        # Typed as differing over tp before they are sent, so that the cotangents are summed over tp
        # per token and not per received row.
        tp = () if self.placement.tp is None else (self.placement.tp,)
        tokens = _jax_compat.to_varying(tokens.astype(dtype), tp)
        experts = [
            self._ready(name, weights[name], dtype) if name in weights else None
            for name in ("w_gate", "w_up", "w_down")
        ]
        tokens, experts = jax_ep.overlap_gradients(tokens, experts)
        topk_weights = _jax_compat.to_varying(topk_weights, tp)
        recv = self._dispatch(tokens, ids, topk_weights, mode, experts_at, active)
        if config.shared_width:
            # Beside the dispatch the shared expert's first products, beside the combine the last.
            recv, hidden = jax_ep.overlap(recv, self._shared_hidden(weights, tokens))
            y, hidden = jax_ep.overlap(self._experts(recv, experts), hidden)
            down = self._ready("shared_down", weights["shared_down"], dtype)
            out, shared = jax_ep.overlap(jax_ep.combine(self.group, y, recv), hidden @ down)
            out = out + shared
        else:
            out = jax_ep.combine(self.group, self._experts(recv, experts), recv)
        if mask is not None:
            out = jnp.where(mask[:, None], out, jnp.zeros((), out.dtype))
        if tp:
            out = lax.psum(out, tp)
        return out.reshape(x.shape), self._stats(
            ids, probabilities, mask, recv.plan.num_dropped, stat_axes
        )

    def _dispatch(
        self,
        tokens: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        mode: Mode | None,
        experts_at: jax_ep.Placement | None,
        active: jax.Array | None,
    ) -> jax_ep.Received | jax_ep.ReceivedQuantized:
        if self.precision is None:
            return jax_ep.dispatch(
                self.group,
                tokens,
                ids,
                weights,
                mode=mode,
                placement=experts_at,
                active=active,
                renormalize=active is not None,
            )
        if active is not None:
            raise ValueError(
                f"jax_ep.flax.MoE: got active with precision={self.precision!r}, expected "
                "precision=None in a group whose ranks may be lost; leave one of them out"
            )
        return jax_ep.dispatch_quantized(
            self.group, tokens, ids, weights, mode=mode, placement=experts_at
        )

    def _experts(
        self, recv: jax_ep.Received | jax_ep.ReceivedQuantized, weights: list[Any]
    ) -> jax.Array:
        """What this rank's experts make of the rows that it received."""
        if isinstance(recv, jax_ep.ReceivedQuantized):
            from jax_ep.pallas import grouped_ffn_fp8

            return grouped_ffn_fp8(recv.x, recv.group_sizes, *weights)
        activation = self.config.activation
        expert_fn = self.expert_fn or functools.partial(ragged_ffn, activation=activation)
        return expert_fn(recv.x, recv.group_sizes, *weights)

    def _ready(self, name: str, weight: jax.Array, dtype: Any) -> jax.Array:
        """A weight as the products want it: in `dtype`, whole along hidden.

        Cast after the weight is typed as differing over the token axes, so that gradients are
        summed over replicas in the weight's own dtype.
        """
        axes = set(self.placement.token_axes(self.group))
        if "width" in DIMS[name] and self.placement.tp is not None:
            axes.add(self.placement.tp)
        fsdp = self.placement.fsdp
        weight = _jax_compat.to_varying(weight, axes).astype(dtype)
        if fsdp is None or "hidden" not in DIMS[name]:
            return weight
        dim = DIMS[name].index("hidden")
        gathered: jax.Array = lax.all_gather(weight, fsdp, axis=dim, tiled=True)
        return gathered

    def _route(
        self,
        router: jax.Array,
        bias: jax.Array | None,
        tokens: jax.Array,
        mask: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(ids [T, K], probabilities [T, E] for the balancing loss, weights f32[T, K])."""
        config = self.config
        # Routing in less than f32 makes nearly equal experts change places between machines.
        logits = jnp.dot(tokens.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)
        if config.router == "softmax":
            ids, chosen = jax_ep.routing.topk_softmax(
                logits, config.top_k, normalize=config.normalize, mask=mask
            )
            return ids, jax.nn.softmax(logits), chosen * config.scale
        assert bias is not None
        if config.router == "sigmoid_bias":
            ids, chosen = jax_ep.routing.topk_sigmoid_bias(
                logits, bias, config.top_k, scale=config.scale, mask=mask
            )
        else:
            ids, chosen = jax_ep.routing.group_limited_topk(
                logits,
                config.top_k,
                num_groups=config.num_groups,
                top_groups=config.top_groups,
                bias=bias,
                scale=config.scale,
                mask=mask,
            )
        affinity = jax.nn.sigmoid(logits)
        return ids, affinity / jnp.sum(affinity, axis=-1, keepdims=True), chosen

    def _shared_hidden(self, weights: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
        """What the last product of the shared expert reads."""
        dtype = tokens.dtype
        up = tokens @ self._ready("shared_up", weights["shared_up"], dtype)
        if "shared_gate" in weights:
            gate = tokens @ self._ready("shared_gate", weights["shared_gate"], dtype)
            return self.config.activation(gate) * up
        return self.config.activation(up)

    def _stats(
        self,
        ids: jax.Array,
        probabilities: jax.Array,
        mask: jax.Array | None,
        num_dropped: jax.Array,
        axes: tuple[str, ...],
    ) -> MoEStats:
        """Stats of this rank's real tokens, or of all along `axes`."""
        axis = axes or None
        balance = jax_ep.routing.load_balancing_loss(probabilities, ids, mask=mask, axis=axis)
        load = jax_ep.routing.expert_load(ids, self.config.num_experts, axis=axis)
        if self.placement.tp is not None:  # equal there, but typed as differing
            num_dropped = _jax_compat.uniform_max(num_dropped, (self.placement.tp,))
        if axes:
            num_dropped = lax.psum(num_dropped, axes)
        return MoEStats(balance, load, num_dropped)


def _check_split(x: jax.Array, spec: P, sizes: Mapping[str, int]) -> None:
    for axis, entry in enumerate(spec):
        parts = math.prod(sizes[name] for name in axes_of(entry))
        if axis < x.ndim and x.shape[axis] % parts:
            raise ValueError(
                f"jax_ep.flax.MoE: got x of shape {list(x.shape)}, expected a multiple of {parts} "
                f"in axis {axis}, as it is split over {axes_of(entry)}; pad the tokens, and pass a "
                "mask that is False there"
            )


def _check_mask(mask: Any, x: jax.Array) -> None:
    is_array = hasattr(mask, "dtype")
    if not is_array or mask.dtype != jnp.bool_ or mask.shape != x.shape[:-1]:
        got = f"{mask.dtype}{list(mask.shape)}" if is_array else f"of type {type(mask).__name__}"
        raise ValueError(
            f"jax_ep.flax.MoE: got mask {got}, expected bool{list(x.shape[:-1])}, x without "
            "hidden; pass an array, True where the token is real"
        )


def _manual_axes() -> frozenset[str]:
    """Axes of the shard_maps around the caller."""
    context = _jax_compat.context_mesh()
    return frozenset() if context.empty else _jax_compat.manual_axes(context)


def ragged_ffn(
    x: jax.Array,
    group_sizes: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> jax.Array:
    """The experts of one rank by `jax.lax.ragged_dot`, on any platform.

    Args:
        x: [R, H], rows grouped by expert.
        group_sizes: i32[E_l], rows of each expert; rows beyond them give zeros.
        w_gate: [E_l, H, F], or None for experts without a gate.
        w_up: [E_l, H, F].
        w_down: [E_l, F, H].
        activation: elementwise, on the gate (or on up without one).

    Returns:
        [R, H] in x's dtype.

    Example:
        >>> y = jax_ep.flax.ragged_ffn(recv.x, recv.group_sizes, w_gate, w_up, w_down)
    """
    up = lax.ragged_dot(x, w_up, group_sizes)
    if w_gate is None:
        hidden = activation(up)
    else:
        hidden = activation(lax.ragged_dot(x, w_gate, group_sizes)) * up
    return lax.ragged_dot(hidden, w_down, group_sizes)


def updated_bias(bias: jax.Array, load: jax.Array, rate: float = 1e-3) -> jax.Array:
    """The router bias after one step of loss-free balancing (2408.15664).

    Args:
        bias: f32[..., E], one per layer.
        load: i32[..., E], `MoEStats.load` of the step's global batch.
        rate: how far the bias of an expert moves: up if it had less than the mean, down if more.

    Returns:
        f32[..., E].

    Example:
        >>> bias = jax_ep.flax.updated_bias(bias, stats.load)
    """
    load = load.astype(jnp.float32)
    mean = jnp.mean(load, axis=-1, keepdims=True)
    return bias + jnp.asarray(rate, bias.dtype) * jnp.sign(mean - load).astype(bias.dtype)
