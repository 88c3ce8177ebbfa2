"""One raw operation: the implementation of the lowering platform, unrolled under vmap.

Not differentiable; vjp wraps these in custom VJPs. Every array is typed as varying over the union
of the operands' axes and the group's, except a plan's `overflow`, which is uniform over the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _jax_compat
from jax_ep._ops import ffi, reference
from jax_ep._ops.call import Call
from jax_ep._types import PlanArrays, Route

MAX_UNROLLED_BATCH = 64  # above it, vmap becomes lax.map: program size against speed


def plan(call: Call, topk_idx: jax.Array) -> PlanArrays:
    """See ffi.plan."""
    result: PlanArrays = _bind("plan", call, topk_idx)
    return result


def dispatch(
    call: Call,
    x: jax.Array | None,
    weights: jax.Array | None,
    route: Route,
    y: jax.Array | None = None,
    row_weights: jax.Array | None = None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """See ffi.dispatch."""
    result: tuple[jax.Array | None, jax.Array | None, jax.Array | None] = _bind(
        "dispatch", call, x, weights, route, y, row_weights
    )
    return result


def ll_dispatch(
    call: Call, x: jax.Array, weights: jax.Array | None, topk_idx: jax.Array
) -> tuple[PlanArrays, jax.Array, jax.Array | None]:
    """See ffi.ll_dispatch."""
    result: tuple[PlanArrays, jax.Array, jax.Array | None] = _bind(
        "ll_dispatch", call, x, weights, topk_idx
    )
    return result


def combine(
    call: Call,
    y: jax.Array | None,
    row_weights: jax.Array | None,
    ride: jax.Array | None,
    route: Route,
) -> tuple[jax.Array | None, jax.Array | None]:
    """See ffi.combine."""
    result: tuple[jax.Array | None, jax.Array | None] = _bind(
        "combine", call, y, row_weights, ride, route
    )
    return result


def dispatch_start(call: Call, x: jax.Array, weights: jax.Array | None, route: Route) -> jax.Array:
    """See ffi.dispatch_start."""
    result: jax.Array = _bind("dispatch_start", call, x, weights, route)
    return result


def dispatch_done(
    call: Call, x: jax.Array, weights: jax.Array | None, route: Route, epoch: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """See ffi.dispatch_done."""
    result: tuple[jax.Array, jax.Array | None] = _bind(
        "dispatch_done", call, x, weights, route, epoch
    )
    return result


def ll_dispatch_start(
    call: Call, x: jax.Array, weights: jax.Array | None, topk_idx: jax.Array
) -> jax.Array:
    """See ffi.ll_dispatch_start."""
    result: jax.Array = _bind("ll_dispatch_start", call, x, weights, topk_idx)
    return result


def ll_dispatch_done(
    call: Call, x: jax.Array, weights: jax.Array | None, topk_idx: jax.Array, epoch: jax.Array
) -> tuple[PlanArrays, jax.Array, jax.Array | None]:
    """See ffi.ll_dispatch_done."""
    result: tuple[PlanArrays, jax.Array, jax.Array | None] = _bind(
        "ll_dispatch_done", call, x, weights, topk_idx, epoch
    )
    return result


def combine_start(
    call: Call, y: jax.Array, row_weights: jax.Array | None, route: Route
) -> jax.Array:
    """See ffi.combine_start."""
    result: jax.Array = _bind("combine_start", call, y, row_weights, route)
    return result


def combine_done(
    call: Call, y: jax.Array, row_weights: jax.Array | None, route: Route, epoch: jax.Array
) -> jax.Array:
    """See ffi.combine_done."""
    result: jax.Array = _bind("combine_done", call, y, row_weights, route, epoch)
    return result


def operand_axes(call: Call, operands: Any) -> frozenset[str]:
    """Axes over which an operation on `operands` varies."""
    axes = frozenset(call.group.axes)
    for leaf in jax.tree.leaves(operands):
        axes |= _jax_compat.varying_axes(leaf)
    return axes


def to_varying(operands: Any, axes: frozenset[str]) -> Any:
    """`operands` with every leaf varying over `axes`."""
    return jax.tree.map(lambda leaf: _jax_compat.to_varying(leaf, axes), operands)


def _bind(name: str, call: Call, *operands: Any) -> Any:
    """Runs the raw operation `name`, unrolled over batch elements under vmap."""

    def run(*operands: Any) -> Any:
        return _choose(name, call, *operands)

    unbatched = jax.custom_batching.custom_vmap(run)

    @unbatched.def_vmap
    def unroll(axis_size: int, in_batched: Any, *operands: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(operands)
        batched = jax.tree.leaves(tuple(in_batched))

        def element(picked: list[jax.Array]) -> Any:
            rest = iter(picked)
            mixed = [
                next(rest) if is_batched else leaf
                for leaf, is_batched in zip(leaves, batched, strict=True)
            ]
            return unbatched(*jax.tree.unflatten(tree, mixed))

        moving = [leaf for leaf, is_batched in zip(leaves, batched, strict=True) if is_batched]
        if axis_size > MAX_UNROLLED_BATCH:
            outs = lax.map(element, moving)
        else:
            elements = [
                element([lax.index_in_dim(leaf, i, keepdims=False) for leaf in moving])
                for i in range(axis_size)
            ]
            outs = jax.tree.map(lambda *values: jnp.stack(values), *elements)
        return outs, jax.tree.map(lambda _: True, outs)

    return unbatched(*operands)


def _choose(name: str, call: Call, *operands: Any) -> Any:
    axes = operand_axes(call, operands)
    operands = to_varying(operands, axes)
    native: Callable[..., Any] = getattr(ffi, name)
    fallback: Callable[..., Any] = getattr(reference, name)

    def run_native(*operands: Any) -> Any:
        return native(call, *operands)

    def run_reference(*operands: Any) -> Any:
        return _typed_alike(call, fallback(call, *operands), axes)

    platforms = call.group.native_platforms
    # Without tokens there is nothing to move and every result is a constant; XLA's compilers do not
    # take custom calls whose operands are all empty (Shardy refuses them, XLA:GPU 0.11 crashes).
    if not platforms or call.num_tokens == 0:
        return run_reference(*operands)
    branches: dict[str, Callable[..., Any]] = dict.fromkeys(platforms, run_native)
    if call.group.implementation == "native":
        # This branch is never taken; with it, and no default, JAX refuses to lower for other
        # platforms (NotImplementedError) instead of leaving an unknown custom call to the compiler.
        return lax.platform_dependent(*operands, **branches, unsupported=run_reference)
    return lax.platform_dependent(*operands, **branches, default=run_reference)


def _typed_alike(call: Call, results: Any, axes: frozenset[str]) -> Any:
    """Types the reference's results as the FFI ones: varying, but a plan's overflow uniform."""

    def visit(node: Any) -> Any:
        if isinstance(node, PlanArrays):
            typed: PlanArrays = to_varying(node, axes)
            uniform = _jax_compat.to_varying(node.overflow, axes - frozenset(call.group.axes))
            return typed._replace(overflow=uniform)
        return to_varying(node, axes)

    return jax.tree.map(visit, results, is_leaf=lambda node: isinstance(node, PlanArrays))
