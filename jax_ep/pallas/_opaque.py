"""A call whose insides shard_map's types do not see, so that kernels run under check_vma=True.

Pallas (jax 0.10) loses the varying axes of results, and its interpreter mixes operands that vary
with indices that do not, which the types refuse. A primitive hides both: outside, the results have
the types that the caller says; inside, which is traced at lowering, nothing varies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
from jax.interpreters import batching, mlir

from jax_ep import _jax_compat

_opaque_p: Any = jax.extend.core.Primitive("jax_ep_pallas_opaque")
_opaque_p.multiple_results = True


def call(
    function: Callable[..., Sequence[jax.Array]], results: Sequence[Any], operands: Sequence[Any]
) -> tuple[jax.Array, ...]:
    """`function(*operands)`, traced without varying axes; its results have the types `results`."""
    return tuple(_opaque_p.bind(*operands, function=function, results=tuple(results)))


def vary(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, all typed as varying over the axes that any of them varies over."""
    axes = frozenset().union(*(_jax_compat.varying_axes(array) for array in arrays))
    return [_jax_compat.to_varying(array, axes) for array in arrays]


def _impl(*operands: Any, function: Callable[..., Any], results: Any) -> Any:
    del results
    return jax.jit(function)(*operands)


def _abstract(*operands: Any, function: Callable[..., Any], results: Any) -> Any:
    del operands, function
    return results


def _lower(ctx: Any, *operands: Any, function: Callable[..., Any], results: Any) -> Any:
    del results

    def plain(aval: Any) -> Any:
        return jax.core.ShapedArray(aval.shape, aval.dtype)

    inner = ctx.replace(
        avals_in=[plain(aval) for aval in ctx.avals_in],
        avals_out=[plain(aval) for aval in ctx.avals_out],
    )
    return mlir.lower_fun(function, multiple_results=True)(inner, *operands)


def _batch(operands: Any, axes: Any, *, function: Callable[..., Any], results: Any) -> Any:
    size = next(
        operand.shape[axis]
        for operand, axis in zip(operands, axes, strict=True)
        if axis is not None
    )
    batched = jax.vmap(function, in_axes=tuple(axes), axis_size=size)
    types = [result.update(shape=(size, *result.shape)) for result in results]
    return call(batched, types, operands), (0,) * len(types)


_opaque_p.def_impl(_impl)
_opaque_p.def_abstract_eval(_abstract)
mlir.register_lowering(_opaque_p, _lower)
batching.primitive_batchers[_opaque_p] = _batch
