"""grouped_matmul: rows times the matrix of their group, with its VJP."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.pallas import _kernels, _opaque

_DTYPES = ("bfloat16", "float16", "float32")


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Rows times the matrix of their group, as a Pallas kernel: `jax.lax.ragged_dot` for experts.

    Interpreted where the program is lowered for CPU, compiled by Triton for CUDA and ROCm; lowering
    for another platform raises. Sums are in f32 and rounded once.

    Args:
        x: floats [R, H], the rows of group 0 first, as `recv.x` of expert_major.
        w: [E_l, H, F] in x's dtype.
        group_sizes: integers [E_l]: rows of each group, as `recv.group_sizes`; any values >= 0.

    Returns:
        [R, F] in x's dtype. Rows beyond sum(group_sizes) are zero and get zero gradient, whatever
        they hold, NaN included.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        >>> y = jax_ep.pallas.grouped_matmul(recv.x, kernels, recv.group_sizes)
    """
    check_operands("grouped_matmul", x, (("w", w),), group_sizes)
    # Typed alike before custom_vjp, so that JAX sums the cotangents of what was equal on all ranks.
    x, w, sizes = _opaque.vary(x, w, group_sizes.astype(jnp.int32))
    return product((x,), (w,), sizes, False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(
    lhs: tuple[jax.Array, ...], rhs: tuple[jax.Array, ...], group_sizes: jax.Array, transpose: bool
) -> jax.Array:
    """Sum over i of lhs[i] [R, K] times the row's rhs[i] [G, K, N], rounded once.

    With `transpose`, rhs[i] is [G, N, K]. All of its derivatives are `product` and `weights` again.
    """
    (out,) = _kernels.rows_product(
        lhs,
        rhs,
        group_sizes,
        terms=tuple(_kernels.Term(lhs=i, rhs=i, out=0) for i in range(len(lhs))),
        epilogue=lambda total: (total,),
        num_results=1,
        transpose_rhs=transpose,
    )
    return out


def _product_forward(
    lhs: tuple[jax.Array, ...], rhs: tuple[jax.Array, ...], group_sizes: jax.Array, transpose: bool
) -> tuple[jax.Array, Any]:
    return product(lhs, rhs, group_sizes, transpose), (lhs, rhs, group_sizes)


def _product_backward(transpose: bool, residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes = residuals
    d_lhs = tuple(product((g,), (weight,), group_sizes, not transpose) for weight in rhs)
    if transpose:
        d_rhs = tuple(weights(g, rows, group_sizes) for rows in lhs)
    else:
        d_rhs = tuple(weights(rows, g, group_sizes) for rows in lhs)
    return d_lhs, d_rhs, no_gradient(group_sizes)


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def weights(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[G, K, N]: per group, the transpose of its rows of lhs [R, K] times those of rhs [R, N]."""
    return _kernels.weight_product(lhs, rhs, group_sizes)


def _weights_forward(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, Any]:
    return weights(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _weights_backward(residuals: Any, g: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes = residuals
    d_lhs = product((rhs,), (g,), group_sizes, True)
    return d_lhs, product((lhs,), (g,), group_sizes, False), no_gradient(group_sizes)


weights.defvjp(_weights_forward, _weights_backward)


def no_gradient(integers: jax.Array) -> Any:
    """The cotangent of an integer array."""
    return np.zeros(integers.shape, jax.dtypes.float0)


def check_operands(
    name: str, x: jax.Array, weights: tuple[tuple[str, jax.Array], ...], group_sizes: jax.Array
) -> None:
    """Raises ValueError unless x is [R, H], every weight [E_l, H, F] and group_sizes [E_l]."""
    if x.ndim != 2 or x.dtype.name not in _DTYPES:
        raise ValueError(
            f"jax_ep.pallas.{name}: got x {x.dtype}{list(x.shape)}, expected [R, H] in one of "
            f"{', '.join(_DTYPES)}; reshape or cast it"
        )
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"jax_ep.pallas.{name}: got group_sizes {group_sizes.dtype}{list(group_sizes.shape)}, "
            "expected integers [E_l]; pass recv.group_sizes"
        )
    for what, weight in weights:
        expected = (group_sizes.shape[0], x.shape[1])
        if weight.ndim != 3 or weight.shape[:2] != expected or weight.dtype != x.dtype:
            raise ValueError(
                f"jax_ep.pallas.{name}: got {what} {weight.dtype}{list(weight.shape)}, expected "
                f"{x.dtype}[{expected[0]}, {expected[1]}, F] (groups, columns of x, any); cast or "
                "transpose it"
            )
