"""The only file that looks at JAX versions, moved names and private modules.

Everything else in jax_ep calls these functions and stays the same when JAX moves a name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import ad_checkpoint, lax
from jax.interpreters import mlir

_lax: Any = lax  # its collectives carry no types in jax 0.10
_ad_checkpoint: Any = ad_checkpoint


def varying_axes(array: Any) -> frozenset[str]:
    """Mesh axes over which shard_map's type system lets `array` differ (empty when unchecked)."""
    aval = jax.typeof(array)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:  # jax >= 0.10
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", frozenset()))


def to_varying(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`array` typed as varying over `axes` too; its transpose sums over the added ones."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def result_type(
    like: jax.Array, shape: tuple[int, ...], dtype: Any, invariant_over: Iterable[str] = ()
) -> Any:
    """Type of an FFI result: `like`'s varying axes less `invariant_over`, new shape and dtype."""
    aval: Any = jax.typeof(like)
    drop = frozenset(invariant_over)
    changes: dict[str, Any] = {}
    if drop & varying_axes(like):
        manual = getattr(aval, "manual_axis_type", None)
        if manual is not None:
            changes["manual_axis_type"] = manual.update(varying=manual.varying - drop)
        else:
            changes["vma"] = aval.vma - drop
    return aval.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, **changes)


def context_mesh() -> Any:
    """The mesh of the enclosing shard_map (empty outside of one)."""
    return jax.sharding.get_abstract_mesh()


def manual_axes(mesh: Any) -> frozenset[str]:
    """Axes of `mesh` that the enclosing shard_map made manual."""
    return frozenset(mesh.manual_axes)


def register_export_serialization(cls: type, name: str, to_static: Callable[[bytes], Any]) -> None:
    """Lets jax.export save the static part of the registered dataclass `cls`."""
    from jax import export

    export.register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=lambda static: repr(tuple(static)).encode(),
        deserialize_auxdata=to_static,
    )


def export_custom_call_check(target: str) -> Any:
    """The jax.export safety check to disable so that custom call `target` may be exported."""
    from jax import export

    return export.DisabledSafetyCheck.custom_call(target)


def register_ffi(
    types: Mapping[str, Mapping[str, Any]], targets: Mapping[str, Mapping[str, Any]], platform: str
) -> None:
    """Registers custom FFI types, then targets. The platform's client must exist (jaxlib 0.10)."""
    for name, registration in types.items():
        type_registration: Any = dict(registration)
        jax.ffi.register_ffi_type(name, type_registration, platform=platform)
    for name, registration in targets.items():
        jax.ffi.register_ffi_target(name, dict(registration), platform=platform)


_lowered = threading.local()  # .module: that this thread lowers, if it has calls, and their key


def _note_lowered(event: str, duration_secs: float, **_: Any) -> None:
    """When a module is complete, gives its calls their key (call_primitive)."""
    del duration_secs
    if "jaxpr_to_mlir_module" not in event:
        return
    found, _lowered.module = getattr(_lowered, "module", None), None
    if found is None:
        return
    module, targets, module_key = found
    key = module_key(str(module.operation.get_asm(large_elements_limit=16)))

    def visit(operation: Any) -> Any:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call":
            target = mlir.ir.StringAttr(attributes["call_target_name"]).value
            if target in targets:
                config = attributes["mhlo.backend_config"]
                entries = {config[i].name: config[i].attr for i in range(len(config))}
                entries["module"] = mlir.ir.IntegerAttr.get(entries["module"].type, key)
                attributes["mhlo.backend_config"] = mlir.ir.DictAttr.get(entries)
        return mlir.ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


jax.monitoring.register_event_duration_secs_listener(_note_lowered)


def call_primitive(
    name: str,
    check: Callable[[jax.sharding.Mesh | None, Any], bool],
    module_key: Callable[[str], int],
) -> Callable[..., Sequence[jax.Array]]:
    """jax.ffi.ffi_call that checks where it is lowered, and an attribute `module` that says where.

    Args:
        name: of the primitive.
        check: (mesh, owner), raises ValueError where the mesh of the enclosing shard_map will not
            do. None if the program does not say on which devices (abstract meshes, jax.export).
            Returns whether the call shall carry its position, the first operand; else that is
            replaced by one of no elements.
        module_key: from the text of a whole lowered module (long constants left out) to the i64
            that its calls carry.

    Returns:
        A function of operands and, by name, `owner` (hashable), `target`, `results` (a tuple made
        by `result_type`) and `attributes` (a dict).
    """

    def lower(
        ctx: Any, *operands: Any, owner: Any, target: str, attributes: Any, **_: Any
    ) -> Sequence[Any]:
        mesh = getattr(ctx.module_context.axis_context, "mesh", None)
        known = isinstance(mesh, jax.sharding.Mesh) and not _is_for_export(ctx)
        if not check(mesh if known else None, owner):
            nowhere = np.zeros(0, np.int32)
            operands = (mlir.ir_constant(nowhere), *operands[1:])
            ctx = ctx.replace(avals_in=[jax.typeof(nowhere), *ctx.avals_in[1:]])
        rule: Any = jax.ffi.ffi_lowering(target)
        found: Any = getattr(_lowered, "module", None)
        if found is None or found[0] is not ctx.module_context.module:
            found = (ctx.module_context.module, set(), module_key)
            _lowered.module = found
        found[1].add(target)
        results: Sequence[Any] = rule(ctx, *operands, **dict(attributes), module=np.int64(0))
        return results

    @functools.cache
    def primitive() -> Any:
        from jax.extend.core import Primitive  # at the first use: it imports Pallas

        made: Any = Primitive(name)
        made.multiple_results = True
        made.def_abstract_eval(lambda *_, results, **__: list(results))
        mlir.register_lowering(made, lower)
        return made

    def call(
        *operands: jax.Array,
        owner: Any,
        target: str,
        results: tuple[Any, ...],
        attributes: Mapping[str, Any],
    ) -> Sequence[jax.Array]:
        bound: Sequence[jax.Array] = primitive().bind(
            *operands,
            owner=owner,
            target=target,
            results=results,
            attributes=tuple(attributes.items()),
        )
        return bound

    return call


def stores_programs() -> bool:
    """Whether JAX keeps compiled programs on disk (its persistent compilation cache)."""
    config: Any = jax.config
    return bool(config.jax_enable_compilation_cache and config.jax_compilation_cache_dir)


def _is_for_export(ctx: Any) -> bool:
    return bool(ctx.module_context.lowering_parameters.for_export)


def all_gather(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[N, ...]: the arrays of all ranks along `axes`."""
    gathered: jax.Array = _lax.all_gather(array, axes)
    return gathered


def all_to_all(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[N, ...]: element d goes to rank d; element s of the result came from rank s."""
    exchanged: jax.Array = _lax.all_to_all(array, axes, 0, 0)
    return exchanged


def uniform_max(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Maximum over ranks, typed as equal on all of them."""
    largest: jax.Array = _lax.pmax(array, axes)
    return largest


def checkpoint_name(array: jax.Array, name: str) -> jax.Array:
    """`array`, under a name that remat policies know."""
    named: jax.Array = _ad_checkpoint.checkpoint_name(array, name)
    return named


def block_until_ready(tree: Any) -> Any:
    """Waits for every array in `tree`."""
    wait: Any = jax.block_until_ready
    return wait(tree)


def distributed_client() -> Any:
    """The jax.distributed key-value store client, or None in a job of one process."""
    from jax._src import distributed

    return distributed.global_state.client
