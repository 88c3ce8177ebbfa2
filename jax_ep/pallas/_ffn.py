"""grouped_ffn: the gated FFN of every expert on its rows, with its VJP."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.pallas import _kernels, _matmul, _opaque

GATE_AND_UP = (_kernels.Term(lhs=0, rhs=0, out=0), _kernels.Term(lhs=0, rhs=1, out=1))


def grouped_ffn(
    x: jax.Array,
    group_sizes: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
) -> jax.Array:
    """silu(x @ w_gate) * (x @ w_up) @ w_down, each row with the weights of its group.

    Both first products and the activation are one Pallas kernel, which reads x once; the second is
    another. Platforms and precision as in `grouped_matmul`.

    Args:
        x: floats [R, H], as `recv.x` of expert_major.
        group_sizes: integers [E_l], as `recv.group_sizes`.
        w_gate: [E_l, H, F] in x's dtype.
        w_up: [E_l, H, F] in x's dtype.
        w_down: [E_l, F, H] in x's dtype.

    Returns:
        [R, H] in x's dtype. Rows beyond sum(group_sizes) are zero and get zero gradient.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        >>> y = jax_ep.pallas.grouped_ffn(recv.x, recv.group_sizes, w_gate, w_up, w_down)
        >>> out = jax_ep.combine(group, y, recv)
    """
    check_operands("grouped_ffn", x, group_sizes, w_gate, w_up, w_down)
    return _ffn(*_opaque.vary(x, group_sizes.astype(jnp.int32), w_gate, w_up, w_down))


def check_operands(
    name: str,
    x: jax.Array,
    group_sizes: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
) -> None:
    """Raises ValueError unless all fit x [R, H]."""
    _matmul.check_operands(name, x, (("w_gate", w_gate), ("w_up", w_up)), group_sizes)
    expected = (w_gate.shape[0], w_gate.shape[2], x.shape[1])
    if w_up.shape != w_gate.shape or w_down.shape != expected or w_down.dtype != x.dtype:
        raise ValueError(
            f"jax_ep.pallas.{name}: got w_up {list(w_up.shape)} and w_down "
            f"{w_down.dtype}{list(w_down.shape)} with w_gate {list(w_gate.shape)}, expected w_up "
            f"shaped as w_gate and w_down {x.dtype}{list(expected)}; cast or transpose them"
        )


@jax.custom_vjp
def _ffn(
    x: jax.Array, group_sizes: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    (hidden,) = _first_layer_kernel(x, group_sizes, w_gate, w_up, keep=False)
    return _matmul.product((hidden,), (w_down,), group_sizes, False)


def _ffn_forward(
    x: jax.Array, group_sizes: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> tuple[jax.Array, Any]:
    hidden, gate, up = first_layer(x, group_sizes, w_gate, w_up)
    y = _matmul.product((hidden,), (w_down,), group_sizes, False)
    # hidden is not kept: two elementwise operations give it back from gate and up.
    return y, (x, group_sizes, w_gate, w_up, w_down, gate, up)


def backward(residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    """Cotangents of (x, group_sizes, w_gate, w_up, w_down) from these, gate and up."""
    x, group_sizes, w_gate, w_up, w_down, gate, up = residuals
    d_hidden = _matmul.product((g,), (w_down,), group_sizes, True)
    hidden, gated_backward = jax.vjp(gated, gate, up)
    d_gate, d_up = gated_backward(d_hidden)
    d_x = _matmul.product((d_gate, d_up), (w_gate, w_up), group_sizes, True)
    # Rows first: the exchange that takes them back runs beside the gradients of the weights.
    d_x, (x, d_gate, d_up, hidden, g) = jax_ep.overlap(d_x, (x, d_gate, d_up, hidden, g))
    d_w_gate, d_w_up = (_matmul.weights(x, d, group_sizes) for d in (d_gate, d_up))
    d_w_down = _matmul.weights(hidden, g, group_sizes)
    return d_x, _matmul.no_gradient(group_sizes), d_w_gate, d_w_up, d_w_down


_ffn.defvjp(_ffn_forward, backward)


@jax.custom_vjp
def first_layer(
    x: jax.Array, group_sizes: jax.Array, w_gate: jax.Array, w_up: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(hidden, gate, up) for the backward. Its VJP is used by gradients of gradients only."""
    hidden, gate, up = _first_layer_kernel(x, group_sizes, w_gate, w_up, keep=True)
    return hidden, gate, up


def _first_layer_forward(
    x: jax.Array, group_sizes: jax.Array, w_gate: jax.Array, w_up: jax.Array
) -> tuple[Any, Any]:
    hidden, gate, up = first_layer(x, group_sizes, w_gate, w_up)
    return (hidden, gate, up), ((x, group_sizes, w_gate, w_up), gate, up)


def _first_layer_backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    operands, gate, up = residuals
    d_hidden, d_gate, d_up = cotangents
    _, gated_backward = jax.vjp(gated, gate, up)
    through_gate, through_up = gated_backward(d_hidden)
    d_gate, d_up = d_gate + through_gate, d_up + through_up
    x, group_sizes, w_gate, w_up = operands
    return (
        _matmul.product((d_gate, d_up), (w_gate, w_up), group_sizes, True),
        _matmul.no_gradient(group_sizes),
        _matmul.weights(x, d_gate, group_sizes),
        _matmul.weights(x, d_up, group_sizes),
    )


first_layer.defvjp(_first_layer_forward, _first_layer_backward)


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, computed in f32, in the arguments' dtype."""
    gate32 = gate.astype(jnp.float32)
    hidden = gate32 * jax.lax.logistic(gate32) * up.astype(jnp.float32)
    return hidden.astype(gate.dtype)


def _first_layer_kernel(
    x: jax.Array, group_sizes: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, keep: bool
) -> tuple[jax.Array, ...]:
    """(hidden,), or with `keep` (hidden, gate, up); hidden has the same bits in both."""

    def epilogue(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        hidden = gated(gate, up)
        return (hidden, gate, up) if keep else (hidden,)

    return _kernels.rows_product(
        (x,),
        (w_gate, w_up),
        group_sizes,
        terms=GATE_AND_UP,
        epilogue=epilogue,
        num_results=3 if keep else 1,
    )
