"""One raw operation: the implementation of the lowering platform, unrolled under vmap.

Not differentiable; vjp wraps these in custom VJPs. Every array is typed as varying over the union
of the operands' axes and the group's, except a plan's `overflow`, which is uniform over the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _jax_compat
from jax_ep._ops import beside, ffi, halves, reference
from jax_ep._ops.call import Call
from jax_ep._ops.operations import OPERATIONS

_GPUS = {"cuda", "rocm"}
MAX_UNROLLED_BATCH = 64  # above it, vmap becomes lax.map: program size against speed


def run(operation: str, call: Call, **arrays: jax.Array | None) -> dict[str, Any]:
    """Runs a raw operation, unrolled over batch elements under vmap, under its name in profiles.

    Args:
        operation: its name in `operations.OPERATIONS`.
        call: what is static in it.
        **arrays: its operands by the names of that table; what is left out is absent.

    Returns:
        Its results by their names, None where absent.
    """
    entry = OPERATIONS[operation]
    known = {*entry.operands, *entry.carried}
    assert arrays.keys() <= known, f"{operation} knows no {arrays.keys() - known}"
    with jax.named_scope(f"jax_ep.{operation} ({call.mode})"):
        return _unrolled(
            lambda arrays: _choose(operation, call, arrays),
            arrays,
            functools.partial(halves.check_batch, operation, call),
        )


def run_call(target: str, call: Call, **arrays: jax.Array | None) -> dict[str, Any]:
    """Runs one custom call, as `run` does, where the caller has chosen the platform.

    Args:
        target: its name in `operations.CALLS`.
        call: what is static in it.
        **arrays: its operands by the names of that table; what is left out is absent.
    """

    def run_native(arrays: dict[str, Any]) -> dict[str, Any]:
        return ffi.run(target, call, to_varying(arrays, operand_axes(call, arrays)))

    with jax.named_scope(f"jax_ep.{target} ({call.mode})"):
        return _unrolled(run_native, arrays, functools.partial(halves.check_batch, target, call))


def _unrolled(
    function: Callable[[Any], Any], arrays: Any, check: Callable[[int], None], size: int = 1
) -> dict[str, Any]:
    """function(arrays), under vmap for each batch element.

    `check` raises if they are too many, all vmaps together; `size` are those of the inner ones.
    """
    unbatched = jax.custom_batching.custom_vmap(function)

    @unbatched.def_vmap
    def unroll(axis_size: int, in_batched: Any, arrays: Any) -> tuple[Any, Any]:
        check(size * axis_size)
        leaves, tree = jax.tree.flatten(arrays)
        batched = jax.tree.leaves(in_batched)

        def element(picked: list[jax.Array]) -> Any:
            rest = iter(picked)
            mixed = [
                next(rest) if is_batched else leaf
                for leaf, is_batched in zip(leaves, batched, strict=True)
            ]
            return _unrolled(function, jax.tree.unflatten(tree, mixed), check, size * axis_size)

        moving = [leaf for leaf, is_batched in zip(leaves, batched, strict=True) if is_batched]
        if not 0 < axis_size <= MAX_UNROLLED_BATCH:  # of none, lax.map knows shapes and types
            outs = lax.map(element, moving)
        else:
            elements = [
                element([lax.index_in_dim(leaf, i, keepdims=False) for leaf in moving])
                for i in range(axis_size)
            ]
            outs = jax.tree.map(lambda *values: jnp.stack(values), *elements)
        return outs, jax.tree.map(lambda _: True, outs)

    results: dict[str, Any] = unbatched(arrays)
    return results


def operand_axes(call: Call, operands: Any) -> frozenset[str]:
    """Axes over which an operation on `operands` varies."""
    axes = frozenset(call.group.axes)
    for leaf in jax.tree.leaves(operands):
        axes |= _jax_compat.varying_axes(leaf)
    return axes


def to_varying(operands: Any, axes: frozenset[str]) -> Any:
    """`operands` with every leaf varying over `axes`."""
    return jax.tree.map(lambda leaf: _jax_compat.to_varying(leaf, axes), operands)


def _choose(operation: str, call: Call, arrays: dict[str, Any]) -> Any:
    axes = operand_axes(call, arrays)
    arrays = to_varying(arrays, axes)

    def branch(run: halves.Run) -> Callable[..., Any]:
        def run_branch(arrays: dict[str, Any]) -> dict[str, Any]:
            uniform = {"overflow": axes - frozenset(call.group.axes)}
            results = run(operation, call, arrays)
            return {name: to_varying(a, uniform.get(name, axes)) for name, a in results.items()}

        return run_branch

    run_reference = branch(halves.all_in_done(reference.run))
    platforms = call.group._native_platforms
    # Without tokens there is nothing to move and every result is a constant; XLA's compilers do not
    # take custom calls whose operands are all empty (Shardy refuses them, XLA:GPU 0.11 crashes).
    if not platforms or call.num_tokens == 0:
        return run_reference(arrays)
    branches: dict[str, Callable[..., Any]] = dict.fromkeys(platforms, branch(ffi.run))
    gpus = _GPUS & branches.keys()
    if gpus and not halves.has_gpu_starts(call):
        branches |= dict.fromkeys(gpus, branch(halves.all_in_done(ffi.run)))
    if beside.applies(call):
        branches["cuda"] = branch(halves.all_in_done(beside.run))
    if call.group.implementation == "native":
        # This branch is never taken; with it, and no default, JAX refuses to lower for other
        # platforms (NotImplementedError) instead of leaving an unknown custom call to the compiler.
        branches["unsupported"] = run_reference
        return lax.platform_dependent(arrays, **branches)
    return lax.platform_dependent(arrays, **branches, default=run_reference)
