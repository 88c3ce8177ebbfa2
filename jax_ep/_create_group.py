"""create_group: checks what was asked for, makes the Group and starts its native side."""

from __future__ import annotations

from typing import Any

import jax

from jax_ep import _config, _env, _extension, _jax_compat, _log, _mesh, _warn
from jax_ep._config import Config
from jax_ep._group import Group, Implementation
from jax_ep._ops import ffi
from jax_ep._runtime import bootstrap
from jax_ep._session_number import SessionNumber

_NATIVE_PLATFORMS = frozenset({"cpu", "gpu"})  # JAX's names of platforms with handlers


def create_group(
    mesh: Any,
    axis: str | tuple[str, ...],
    config: Config,
    implementation: Implementation = None,
) -> Group:
    """Creates the group(s) over `axis` of `mesh`; eager, and collective over the mesh's processes.

    Args:
        mesh: a `jax.sharding.Mesh`. With an `AbstractMesh`, or devices that this job does not own,
            the group is lowering-only: nothing is allocated, and running it raises unless
            `implementation` is "xla".
        axis: an axis name, or a tuple of names (ranks are row-major over it). Every other mesh axis
            gives an independent group.
        config: sizes and limits.
        implementation: None (native on cpu and GPUs where it is installed, else "xla", with a
            warning if only that is missing), "native" or "xla".

    Returns:
        The `Group`.

    Raises:
        ValueError: axis or config do not fit the mesh; says got, expected and the fix.
        NotImplementedError: "native" on a platform without handlers, or not installed for it.
        RuntimeError: the other processes did not come, or are gone; says which, and what to do.

    Example:
        >>> mesh = jax.make_mesh((4,), ("ep",))
        >>> config = jax_ep.Config(num_experts=8, top_k=2, hidden=64, max_tokens=128)
        >>> with jax_ep.create_group(mesh, "ep", config, implementation="xla") as group:
        ...     print(group.num_ranks)
        4
    """
    _check_mesh(mesh)
    owned = _mesh.is_owned(mesh)
    platform = mesh.devices.flat[0].platform if owned else None
    could_be_native = owned and platform in _NATIVE_PLATFORMS
    native = could_be_native and implementation != "xla"
    if owned and implementation == "native" and not native:
        raise NotImplementedError(
            f"jax_ep.create_group: got implementation='native' on platform {platform!r}, expected "
            f"one of {sorted(_NATIVE_PLATFORMS)}; use implementation=None or 'xla'"
        )
    process = jax.process_index(mesh.devices.flat[0].client) if owned else 0
    if owned and all(device.process_index != process for device in mesh.devices.flat):
        raise ValueError(
            "jax_ep.create_group: got a mesh in which this process owns no device, expected at "
            "least one; call create_group only in the processes of the mesh"
        )
    # From here on the others are told of an error, and count this call as this process does.
    is_shared = could_be_native and len({d.process_index for d in mesh.devices.flat}) > 1
    exchange = bootstrap.Exchange(mesh.devices.flat, process) if native or is_shared else None
    try:
        _env.check()
        _check_arguments(mesh, axis, config, implementation)
        axes = _mesh.axis_tuple(axis)
        _config.check_sizes("jax_ep.create_group", config, _mesh.axis_size(mesh, axes))
        if native and platform == "gpu" and config.overlap:
            _check_overlap(mesh)
        if native and config.elastic:
            _check_elastic(mesh, axes)
        group = Group(
            mesh,
            axis if isinstance(axis, str) else axes,
            config,
            implementation,
            native=native,
            platform=platform,
            local_ranks=_mesh.local_ranks(mesh, axes, process) if owned else (),
            number=SessionNumber(mesh, axes, config, lowering_only=not owned),
        )
        if exchange is not None and not native:
            # For those that are not "xla": they would wait for this process.
            exchange.fail(
                ValueError(
                    f"jax_ep.create_group: got implementation='xla' in process {process} and "
                    "another in others; pass the same in every process"
                )
            )
        elif exchange is not None:
            try:
                _start(group, exchange)
            except BaseException as error:
                if not isinstance(error, NotImplementedError) or implementation == "native":
                    group.number.give_back()
                    raise
                exchange.fail(error)
                group.native = False
                _warn.warn(f"{error}; using implementation='xla'", RuntimeWarning)
    except BaseException as error:
        if exchange is not None:
            exchange.fail(error)
        raise
    if not owned or process == min(device.process_index for device in mesh.devices.flat):
        _log.info(lambda: _summary(group))
    return group


def _summary(group: Group) -> str:
    """The line that JAX_EP_LOG=info has for each group."""
    nodes = group.num_ranks // group.node_size
    parts = [
        "lowering-only" if group.lowering_only else f"{group.resolved} on {group.platform}",
        f"ranks {group.num_ranks}, nodes {nodes}",
        f"transport {group.transport}",
        str(group.memory()),
        f"{group.heap_bytes} bytes in this process",
    ]
    details = dict(group.health().details)
    if group.platform == "gpu" and "data_path" in details:
        parts.append(f"rows travel {details['data_path']}")
    return f"group {group.name}: " + ", ".join(parts)


def _start(group: Group, exchange: bootstrap.Exchange) -> None:
    """Registers the handlers and starts the native session; collective over the processes."""
    if not _extension.is_built():
        raise NotImplementedError(
            "jax_ep.create_group: this installation is pure Python, without the native extension "
            "jax_ep._core; run `pip install jax_ep` (in a checkout `pip install .`), or pass "
            "implementation='xla'"
        )
    from jax_ep._runtime import start  # what native groups alone need

    try:
        ffi.register(_ffi_platform(group.mesh))
    except ImportError as error:
        raise RuntimeError(
            "jax_ep.create_group: the native extension jax_ep._core cannot be imported "
            f"({error}); expected a built package; run `pip install .`, or pass "
            "implementation='xla'"
        ) from error
    group._attach(start.start(group, exchange))


def _ffi_platform(mesh: Any) -> str:
    """The name under which XLA knows handlers for the mesh's devices."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return "cpu"
    return "ROCM" if "rocm" in device.client.platform_version.lower() else "CUDA"


def _check_overlap(mesh: Any) -> None:
    """Raises unless XLA can run calls on these devices beside other work."""
    wrong = ""
    if _ffi_platform(mesh) != "CUDA":
        wrong = "AMD GPUs, expected NVIDIA GPUs"
    elif not _jax_compat.has_streams():
        wrong = f"jax {jax.__version__}, expected 0.10.2, or 0.11.1 or newer"
    if wrong:
        raise NotImplementedError(
            f"jax_ep.create_group: got Config.overlap=True on {wrong}; leave overlap out"
        )


def _check_elastic(mesh: Any, axes: tuple[str, ...]) -> None:
    """Raises unless groups on this mesh can go on without some of their ranks."""
    if _mesh.axis_size(mesh, axes) != mesh.size:
        raise NotImplementedError(
            f"jax_ep.create_group: got Config.elastic=True with axis={axes} of the mesh axes "
            f"{tuple(mesh.shape)}, which gives several teams, expected all axes; use a mesh of "
            "the group's devices alone"
        )


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise ValueError(
            f"jax_ep.create_group: got mesh of type {type(mesh).__name__}, expected "
            "jax.sharding.Mesh or AbstractMesh; build one with jax.make_mesh"
        )


def _check_arguments(mesh: Any, axis: Any, config: Any, implementation: Any) -> None:
    if not isinstance(config, Config):
        raise ValueError(
            f"jax_ep.create_group: got config of type {type(config).__name__}, expected "
            "jax_ep.Config; pass create_group(mesh, axis, jax_ep.Config(...))"
        )
    if implementation not in (None, "native", "xla"):
        raise ValueError(
            f"jax_ep.create_group: got implementation={implementation!r}, expected None, 'native' "
            "or 'xla'; use None for the best one of the platform"
        )
    axes = _mesh.axis_tuple(axis)
    unknown = [name for name in axes if name not in mesh.shape]
    if not axes or unknown or len(set(axes)) != len(axes):
        raise ValueError(
            f"jax_ep.create_group: got axis={axis!r}, expected one or several distinct names of "
            f"the mesh axes {tuple(mesh.shape)}; pass one of these"
        )
