"""The only file that looks at JAX versions, moved names and private modules.

Everything else in jax_ep calls these functions and stays the same when JAX moves a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import ad_checkpoint, lax
from jax.interpreters import mlir
from jaxlib.mlir.dialects import func as _func

_lax: Any = lax  # its collectives carry no types in jax 0.10
_ad_checkpoint: Any = ad_checkpoint
func: Any = _func


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


@functools.cache
def _uniform_primitive() -> Any:
    from jax.extend.core import Primitive  # at the first use: it imports Pallas

    made: Any = Primitive("jax_ep_uniform")
    made.def_abstract_eval(lambda array, *, result: result)
    mlir.register_lowering(made, lambda ctx, array, *, result: [array])
    return made


def as_uniform(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`array`, which is equal along `axes` and is typed so from here on; not differentiable."""
    axes = tuple(axes)
    if not axes:
        return array
    result = result_type(array, array.shape, array.dtype, invariant_over=axes)
    uniform: jax.Array = _uniform_primitive().bind(array, result=result)
    return uniform


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


@dataclasses.dataclass
class _Module:
    """A module that has calls, and what call_primitive must know when it is complete."""

    module: Any
    module_key: Callable[[str], int]
    numbered: bool  # its calls get numbers
    runs_on_cpu: bool  # then no two calls of XLA may have one number, nor lines be in its text
    note_lines: Callable[[list[tuple[int, str]]], None]
    targets: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class _Lowering:
    """A lowering that has begun: JAX says when one does, and when it ends."""

    handled: BaseException | None  # the exception that was handled then
    module: _Module | None = None


class _Lowerings(threading.local):
    """Those of this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[_Lowering] = []


_lowerings = _Lowerings()


def _is_of_lowering(event: str) -> bool:
    return "jaxpr_to_mlir_module" in event


def _note_lowering(event: str, value: float, **_: Any) -> None:
    del value
    if _is_of_lowering(event):
        _lowerings.open.append(_Lowering(sys.exc_info()[1]))


def _note_lowered(event: str, duration_secs: float, **_: Any) -> None:
    """When a module is complete, gives its calls their names (call_primitive)."""
    del duration_secs
    if not _is_of_lowering(event) or not _lowerings.open:
        return
    lowering = _lowerings.open.pop()
    lowered = lowering.module
    if lowered is None or sys.exc_info()[1] is not lowering.handled:  # it has raised
        return
    operation = lowered.module.operation
    key = lowered.module_key(str(operation.get_asm(large_elements_limit=16)))
    with lowered.module.context:
        if lowered.numbered and lowered.runs_on_cpu:
            _separate_calls(lowered.module, lowered.targets)
        calls = _operations(operation, lambda inner: _is_call(inner, lowered.targets))
        lines = _lines_of(lowered.module, calls)
        if lowered.numbered and lowered.runs_on_cpu and jax.process_count() > 1:
            _forget_lines(operation)
        names = []
        for number, call in enumerate(calls, start=1):
            config = call.attributes["mhlo.backend_config"]
            entries = {config[i].name: config[i].attr for i in range(len(config))}
            name = key | number if lowered.numbered else key
            names.append(name & _ALL_ONES)
            entries["module"] = mlir.ir.IntegerAttr.get(entries["module"].type, name)
            call.attributes["mhlo.backend_config"] = mlir.ir.DictAttr.get(entries)
    lowered.note_lines(list(zip(names, lines, strict=True)))


_ALL_ONES = (1 << 64) - 1
_MOST_FUNCTIONS = 64  # that a call may stand within, one inside the other
_FRAME = re.compile(r'"([^"]+)":(\d+)')  # in the text of a location, the innermost first


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Those of JAX, Flax and this package, with a separator at the end."""
    specs = map(importlib.util.find_spec, ("jax", "jaxlib", "flax"))
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return tuple(os.path.join(os.path.dirname(file), "") for file in (*files, __file__))


@functools.cache
def _is_of_libraries(file: str) -> bool:
    """Whether a frame of that file is JAX's, Flax's, Python's or this package's own."""
    if file.startswith(("<", *_library_folders())):
        return True
    is_installed = f"{os.sep}site-packages{os.sep}" in file
    return not is_installed and file.startswith(os.path.join(os.path.dirname(os.__file__), ""))


def _lines_of(module: Any, calls: Sequence[Any]) -> list[str]:
    """Where the user's program made each call, as "train.py:42"; "" if that is not known.

    JAX may lower equal operations to one function: then the lines are those of its uses.
    """

    @functools.cache
    def uses() -> dict[str, Any]:
        """By the name of a function, the operation that names it first."""
        found: dict[str, Any] = {}
        for operation in _operations(module.operation, lambda _: True):
            for name in _symbols_of(operation).values():
                found.setdefault(name, operation)
        return found

    def line_of(operation: Any) -> str:
        for _ in range(_MOST_FUNCTIONS):
            for file, line in _FRAME.findall(str(operation.location)):
                if not _is_of_libraries(file):
                    return f"{file}:{line}"
            while operation is not None and operation.name != "func.func":
                operation = operation.parent
            if operation is None:
                return ""
            name = mlir.ir.StringAttr(operation.attributes["sym_name"]).value
            operation = uses().get(name)
            if operation is None:
                return ""
        return ""

    return [line_of(call.operation) for call in calls]


def _symbols_of(operation: Any) -> dict[str, str]:
    """The functions that `operation` names, by attribute."""
    attributes = map(operation.attributes.__getitem__, range(len(operation.attributes)))
    return {
        attribute.name: attribute.attr.value
        for attribute in attributes
        if isinstance(attribute.attr, mlir.ir.FlatSymbolRefAttr)
    }


def _forget_lines(root: Any) -> None:
    """Takes the lines of source out of the locations of `root`; the operations' names stay.

    XLA's run ids depend on all that it compiles: one function that is first called from different
    lines on different processes would be different programs.
    """
    for operation in _operations(root, lambda _: True):
        name: str | None = getattr(operation.location, "name_str", None)
        operation.location = (
            mlir.ir.Location.unknown() if name is None else mlir.ir.Location.name(name)
        )


def _operations(root: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """The operations inside `root` that are `wanted`, in the order of the text."""
    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if wanted(operation):
            found.append(operation)
        return mlir.ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


def _is_call(operation: Any, targets: set[str]) -> bool:
    if operation.name != "stablehlo.custom_call":
        return False
    return mlir.ir.StringAttr(operation.attributes["call_target_name"]).value in targets


def _separate_calls(module: Any, targets: set[str]) -> None:
    """Copies functions until each that reaches a call of `targets` is used in one place only.

    JAX lowers a jitted layer that is used sixteen times to one function. XLA inlines all of its
    uses anyway, so this adds no work; but now each call that XLA will make is one in the text.
    """
    functions = {
        mlir.ir.StringAttr(operation.attributes["sym_name"]).value: operation
        for operation in (inner.operation for inner in module.body.operations)
        if operation.name == "func.func"
    }

    def uses(function: Any) -> list[tuple[Any, str, str]]:
        """Where `function` names another: the operation, its attribute, the other's name."""
        return [
            (operation, attribute, name)
            for operation in _operations(function, lambda _: True)
            for attribute, name in _symbols_of(operation).items()
        ]

    @functools.cache
    def reaches_a_call(name: str) -> bool:
        function = functions[name]
        return bool(_operations(function, lambda inner: _is_call(inner, targets))) or any(
            reaches_a_call(other) for _, _, other in uses(function) if other in functions
        )

    used: set[str] = set()
    numbers = map("jax_ep_copy_{}".format, itertools.count())
    fresh_names = (name for name in numbers if name not in functions)

    def separate(function: Any) -> None:
        for operation, attribute, name in uses(function):
            if name not in functions or not reaches_a_call(name):
                continue
            if name in used:
                copy = functions[name].clone(ip=False)
                name = next(fresh_names)
                copy.attributes["sym_name"] = mlir.ir.StringAttr.get(name)
                module.body.append(copy)
                functions[name] = copy
                operation.attributes[attribute] = mlir.ir.FlatSymbolRefAttr.get(name)
            used.add(name)
            separate(functions[name])

    separate(functions["main"])


def explain_compile_errors(explain: Callable[[str], str]) -> None:
    """Has each error of a compilation carry a note.

    Args:
        explain: from the error's text to the note, or "" for none.
    """

    def note(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        error = sys.exc_info()[1]
        if error is not None and "backend_compile" in event and (text := explain(str(error))):
            error.add_note(text)

    jax.monitoring.register_event_duration_secs_listener(note)


# Locations hold ten frames: let them be the user's.
with contextlib.suppress(ImportError, AttributeError):
    importlib.import_module("jax._src.source_info_util").register_exclusion(
        os.path.dirname(__file__)
    )
jax.monitoring.register_scalar_listener(_note_lowering)
jax.monitoring.register_event_duration_secs_listener(_note_lowered)


def call_primitive(
    name: str,
    check: Callable[[jax.sharding.Mesh | None, Any], bool],
    module_key: Callable[[str], int],
    note_lines: Callable[[list[tuple[int, str]]], None],
) -> Callable[..., Sequence[jax.Array]]:
    """jax.ffi.ffi_call that checks where it is lowered, and an attribute `module` that names it.

    The name is the key of the module and, in its lower half, the call's number in that module, from
    1. In a program for jax.export, which may be called several times within another, that half is
    0. Where no CPU is lowered for, a function that is used at several places has one number.

    Args:
        name: of the primitive.
        check: (mesh, owner), raises ValueError where the mesh of the enclosing shard_map will not
            do. None if the program does not say on which devices (abstract meshes, jax.export).
            Returns whether the call shall carry its position, the first operand; else that is
            replaced by one of no elements.
        module_key: from the text of a whole lowered module (long constants left out) to the i64
            that its calls carry; its lower half is 0.
        note_lines: takes the name of each call of a lowered module, with the line of the user's
            program that made it ("" if it is not known). The program does not carry these.

    Returns:
        A function of operands and, by name, `owner` (hashable), `target`, `results` (a tuple made
        by `result_type`), `attributes` (a dict of ints and tuples of ints, as i64) and `stream`
        (None, or as in `_call_on_stream`).
    """

    def lower(
        ctx: Any,
        *operands: Any,
        owner: Any,
        target: str,
        attributes: Any,
        stream: str | None,
        **_: Any,
    ) -> Sequence[Any]:
        mesh = getattr(ctx.module_context.axis_context, "mesh", None)
        known = isinstance(mesh, jax.sharding.Mesh) and not _is_for_export(ctx)
        if not check(mesh if known else None, owner):
            nowhere = np.zeros(0, np.int32)
            operands = (mlir.ir_constant(nowhere), *operands[1:])
            ctx = ctx.replace(avals_in=[jax.typeof(nowhere), *ctx.avals_in[1:]])
        rule: Any = jax.ffi.ffi_lowering(target)
        if _lowerings.open:  # else JAX does not say when it is complete, and it gets no name
            lowering = _lowerings.open[-1]
            if lowering.module is None:
                lowering.module = _Module(
                    ctx.module_context.module,
                    module_key,
                    numbered=not _is_for_export(ctx),
                    runs_on_cpu="cpu" in ctx.module_context.platforms,
                    note_lines=note_lines,
                )
            lowering.module.targets.add(target)
        words = {name: np.asarray(value, np.int64)[()] for name, value in attributes}
        emit = functools.partial(rule, ctx, **words, module=np.int64(0))
        if stream is not None:
            return _call_on_stream(ctx, emit, operands, stream)
        results: Sequence[Any] = emit(*operands)
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
        attributes: Mapping[str, int | tuple[int, ...]],
        stream: str | None = None,
    ) -> Sequence[jax.Array]:
        bound: Sequence[jax.Array] = primitive().bind(
            *operands,
            owner=owner,
            target=target,
            results=results,
            attributes=tuple(attributes.items()),
            stream=stream,
        )
        return bound

    return call


# XLA of jax 0.10.2 makes functions asynchronous, that of 0.11.1 and newer custom calls.
_HAS_STREAMED_FUNCTIONS: bool = (0, 10, 2) <= jax.__version_info__ < (0, 11)
_HAS_STREAMED_CALLS: bool = jax.__version_info__ >= (0, 11, 1)


def has_streams() -> bool:
    """Whether XLA of this jax can run custom calls on another of a GPU's streams."""
    return _HAS_STREAMED_FUNCTIONS or _HAS_STREAMED_CALLS


def _call_on_stream(
    ctx: Any, emit: Callable[..., Sequence[Any]], operands: Sequence[Any], stream: str
) -> Sequence[Any]:
    """Lowers a custom call to an asynchronous one on a GPU's `stream` of XLA.

    Args:
        ctx: of the lowering.
        emit: from operands to the results of the custom call.
        operands: of it.
        stream: "collective", or the number of a compute stream.
    """
    streamed: dict[str, Any] = {"_xla_stream_annotation": mlir.ir.StringAttr.get(stream)}
    if _HAS_STREAMED_CALLS:
        results = list(emit(*operands))
        operation = results[0].owner
        operation = getattr(operation, "operation", operation)
        if "mhlo.frontend_attributes" in operation.attributes:  # of jax.experimental.xla_metadata
            given = operation.attributes["mhlo.frontend_attributes"]
            streamed |= {given[i].name: given[i].attr for i in range(len(given))}
        operation.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get(streamed)
        return results
    ir = mlir.ir
    inputs = [operand.type for operand in operands]
    with ir.InsertionPoint.at_block_begin(ctx.module_context.module.body):
        function = func.FuncOp("jax_ep_beside", ir.FunctionType.get(inputs, []))
    function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    ctx.module_context.symbol_table.insert(function)
    block = function.add_entry_block()
    with ir.InsertionPoint(block):
        inner = list(emit(*block.arguments))
        func.ReturnOp(inner)
    outputs = [result.type for result in inner]
    whole_type = ir.FunctionType.get(inputs, outputs)
    function.attributes["function_type"] = ir.TypeAttr.get(whole_type)
    call = func.CallOp(outputs, ir.FlatSymbolRefAttr.get(function.name.value), list(operands))
    streamed["inlineable"] = ir.StringAttr.get("false")
    call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(streamed)
    return list(call.results)


def tie(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, which XLA does not use before all of them are there.

    All that vary over the same mesh axes: a barrier of arrays that do not would change their types.
    """
    alike: dict[frozenset[str], list[int]] = {}
    for place, array in enumerate(arrays):
        alike.setdefault(varying_axes(array), []).append(place)
    tied = list(arrays)
    for places in alike.values():
        group = _lax.optimization_barrier(tuple(arrays[place] for place in places))
        for place, array in zip(places, group, strict=True):
            tied[place] = array
    return tuple(tied)


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


def _distributed_state() -> Any:
    from jax._src import distributed

    return distributed.global_state


_client_of_parent: Any = None  # in a forked child: the client that it has got with the memory


def _note_fork() -> None:
    global _client_of_parent
    _client_of_parent = _distributed_state().client


os.register_at_fork(after_in_child=_note_fork)


def distributed_client() -> Any:
    """The jax.distributed key-value store client, or None in a job of one process.

    Raises:
        RuntimeError: it was made in another process, of which this one is a fork. gRPC does not
            survive a fork: a single request of the child never ends, and those of the parent, on
            the same connection, do not either from then on.
    """
    client = _distributed_state().client
    if client is not None and client is _client_of_parent:
        raise RuntimeError(
            f"got a call in process {os.getpid()}, which was forked after its parent had joined "
            "the job (jax.distributed), expected one in a process of the job: JAX's coordination "
            "client does not work in a forked child; call it in the parent, or start the child by "
            "subprocess or multiprocessing's 'spawn'"
        )
    return client


_MTLS_OPTIONS = ("mtls_cert_file", "mtls_key_file", "mtls_ca_file", "mtls_peer_uri_prefix")


def start_coordination_service(address: str, num_processes: int) -> Any:
    """JAX's coordination service at `address`, as process 0 starts it for recoverable processes.

    It stops when what is returned is dropped. The arguments are those of jax 0.10.2 to 0.11; from
    jax 0.11.2 on the channels may be secured, by options that processes read from the environment.
    """
    from jaxlib import _jax

    options = {name: getattr(jax.config, f"jax_{name}", None) for name in _MTLS_OPTIONS}
    if getattr(jax.config, "jax_distributed_verify_secure_credentials", False):
        options["verify_secure_credentials"] = True
    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=100,
        shutdown_timeout=300,
        recoverable=True,
        **{name: value for name, value in options.items() if value is not None},
    )


def stop_own_coordination_service() -> None:
    """Ends the service that jax.distributed.initialize has started in this process, if it has."""
    state = _distributed_state()
    if state.service is not None:
        state.service.shutdown()
        state.service = None
