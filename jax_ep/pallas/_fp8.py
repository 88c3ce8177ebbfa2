"""grouped_ffn_fp8: the gated FFN of every expert on rows that arrived in FP8, with its VJP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.pallas import _ffn, _kernels, _opaque

_OLDEST_CAPABILITY = (8, 9)  # of NVIDIA's GPUs with FP8


def grouped_ffn_fp8(
    x: jax_ep.Quantized,
    group_sizes: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
) -> jax.Array:
    """silu(x @ w_gate) * (x @ w_up) @ w_down in FP8, each row with the weights of its group.

    As DeepSeek-V3 trains (arXiv 2412.19437, section 3.3): weights are quantised in square blocks,
    the activation between both layers in blocks of a row, each with blocks and scales as x has
    them; the sums of a block are in f32. The gradients are computed in the carrier's dtype, from
    dequantised rows and the weights as they were given: the first layer is computed again so,
    which keeps [R, F] arrays out of memory, and gradients close to those of `grouped_ffn`.
    Platforms as in `grouped_matmul`; of NVIDIA's GPUs those from compute capability 8.9.

    Args:
        x: `recv.x` of `dispatch_quantized` in expert_major, [R, H]; its blocks are a power of two
            of at least 32.
        group_sizes: integers [E_l], as `recv.group_sizes`.
        w_gate: [E_l, H, F] in the carrier's dtype.
        w_up: [E_l, H, F] in the carrier's dtype.
        w_down: [E_l, F, H] in the carrier's dtype.

    Returns:
        [R, H] in the carrier's dtype. Rows beyond sum(group_sizes) are zero and get zero gradient.

    Raises:
        ValueError: shapes or dtypes do not fit.
        NotImplementedError: this process has NVIDIA GPUs without FP8.

    Example:
        >>> recv = jax_ep.dispatch_quantized(group, x, topk_idx, topk_weights)
        >>> y = jax_ep.pallas.grouped_ffn_fp8(recv.x, recv.group_sizes, w_gate, w_up, w_down)
        >>> out = jax_ep.combine(group, y, recv)
    """
    name = "grouped_ffn_fp8"
    if not isinstance(x, jax_ep.Quantized):
        raise ValueError(
            f"jax_ep.pallas.{name}: got x of type {type(x).__name__}, expected a jax_ep.Quantized; "
            "pass recv.x of dispatch_quantized"
        )
    _check_devices(name)
    _ffn.check_operands(name, x.carrier, group_sizes, w_gate, w_up, w_down)
    _check_rows(name, x)
    leaves, tree = jax.tree.flatten(x)
    *leaves, sizes, w_gate, w_up, w_down = _opaque.vary(
        *leaves, group_sizes.astype(jnp.int32), w_gate, w_up, w_down
    )
    return _ffn_fp8(jax.tree.unflatten(tree, leaves), sizes, w_gate, w_up, w_down)


def _check_rows(name: str, x: jax_ep.Quantized) -> None:
    """Raises ValueError unless values and scales are those of the carrier's rows."""
    rows, hidden = x.carrier.shape
    in_rows = _in_rows(x)
    fits = x.values.shape == (rows, hidden) and x.values.dtype == jnp.float8_e4m3fn
    if not fits or in_rows.ndim != 2 or in_rows.shape[0] != rows or hidden % in_rows.shape[1]:
        raise ValueError(
            f"jax_ep.pallas.{name}: got values {x.values.dtype}{list(x.values.shape)} and scales "
            f"{list(x.scales.shape)} in {x.scales_layout}, expected float8_e4m3fn"
            f"[{rows}, {hidden}] and a scale per row and block; pass recv.x of dispatch_quantized "
            "in expert_major"
        )
    block = hidden // in_rows.shape[1]
    if misfit := jax_ep.FP8(block=block).product_misfit(hidden):
        raise ValueError(
            f"jax_ep.pallas.{name}: got blocks of {block}, expected {misfit}; set FP8(block=) so"
        )


def _check_devices(name: str) -> None:
    """Triton's compiler ends the process where a GPU has no FP8."""
    if jax.default_backend() != "gpu":
        return
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", "")  # AMD's is a name
        parts = capability.split(".")
        if all(map(str.isdigit, parts)) and tuple(map(int, parts)) < _OLDEST_CAPABILITY:
            raise NotImplementedError(
                f"jax_ep.pallas.{name}: got a GPU of compute capability {capability}, expected at "
                "least 8.9; use grouped_ffn with jax_ep.fp8.rows(x)"
            )


@jax.custom_vjp
def _ffn_fp8(
    x: jax_ep.Quantized,
    group_sizes: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
) -> jax.Array:
    fmt, rows = _format(x), (x.values, _in_rows(x))

    def gated(gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
        return (_ffn.gated(gate, up),)

    hidden = _product(x, rows, (w_gate, w_up), group_sizes, _ffn.GATE_AND_UP, gated)
    padded = jnp.pad(hidden, ((0, 0), (0, -hidden.shape[1] % fmt.block)))
    values, scales = jax_ep.fp8.quantize(padded, fmt)
    rows = (values[:, : hidden.shape[1]], scales)
    once = (_kernels.Term(lhs=0, rhs=0, out=0),)
    return _product(x, rows, (w_down,), group_sizes, once, lambda total: (total,))


def _forward(
    x: jax_ep.Quantized,
    group_sizes: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
) -> tuple[jax.Array, Any]:
    operands = (x, group_sizes, w_gate, w_up, w_down)
    return _ffn_fp8(*operands), operands


def _backward(residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    x, group_sizes, w_gate, w_up, w_down = residuals
    rows = jax_ep.fp8.dequantize(x.values, _in_rows(x), x.carrier.dtype)
    _, gate, up = _ffn.first_layer(rows, group_sizes, w_gate, w_up)
    d_rows, *others = _ffn.backward((rows, group_sizes, w_gate, w_up, w_down, gate, up), g)
    nothing = jax.tree.map(jnp.zeros_like, x)
    return dataclasses.replace(nothing, carrier=d_rows), *others


_ffn_fp8.defvjp(_forward, _backward)


def _product(
    x: jax_ep.Quantized,
    rows: tuple[jax.Array, jax.Array],
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    terms: tuple[_kernels.Term, ...],
    epilogue: Callable[..., tuple[jax.Array]],
) -> jax.Array:
    """Rows (values [R, K], scales [R, K / block]) times weights [G, K, N], in the format of x."""
    (values, scales), fmt = rows, _format(x)
    quantized = [jax_ep.fp8.quantize_weights(weight, fmt) for weight in weights]
    columns = weights[0].shape[2]
    of_columns = [
        jnp.repeat(of_blocks.astype(jnp.float32), fmt.block, axis=2)[..., :columns]
        for _, of_blocks in quantized
    ]
    (result,) = _kernels.rows_product(
        (values,),
        [weight for weight, _ in quantized],
        group_sizes,
        terms=terms,
        epilogue=epilogue,
        num_results=1,
        scales=_kernels.Scales((scales.astype(jnp.float32),), tuple(of_columns), fmt.block),
        out_dtype=x.carrier.dtype,
    )
    return result


def _in_rows(x: jax_ep.Quantized) -> jax.Array:
    """The scales [R, H / block]."""
    return x.scales if x.scales_layout == "rows" else x.scales.swapaxes(-1, -2)


def _block(x: jax_ep.Quantized) -> int:
    return int(x.values.shape[1] // max(_in_rows(x).shape[1], 1))


def _format(x: jax_ep.Quantized) -> jax_ep.FP8:
    is_float = x.scales.dtype == jnp.float32
    return jax_ep.FP8(block=_block(x), scale="float32" if is_float else "ue8m0")
