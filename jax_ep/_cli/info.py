"""``python -m jax_ep info``: what is installed here and what it can use.  Starts nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from jax_ep import _env, _extension, _jax_compat
from jax_ep._cli.sections import Row, print_sections
from jax_ep._runtime import gpu

_PACKAGES = ("jax_ep", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")
_ENV_PREFIXES = ("JAX", "XLA_", "NPROC", "SLURM_JOB_ID", "OMPI_COMM_WORLD", "CUDA_VISIBLE_DEVICES")
_MIB, GIB = 1 << 20, 1 << 30


def info() -> int:
    """Prints one section per subject; returns 0 if jax_ep's native part can be used, else 1."""
    has_native, extension_rows = transports()
    print_sections(
        {
            "versions": list(versions()),
            "devices": list(_devices(has_native)),
            "native extension": extension_rows,
            "memory": list(_memory()),
            "environment": list(_environment()),
        }
    )
    return 0 if has_native else 1


def versions() -> Iterator[Row]:
    """Python's and the packages'."""
    yield "python", f"{platform.python_version()} ({platform.machine()}, {platform.release()})"
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


def _devices(has_native: bool) -> Iterator[Row]:
    yield "cores of this process", str(len(os.sched_getaffinity(0)))
    yield "XLA's CPU thread pool", os.environ.get("NPROC", "one per core (NPROC is not set)")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield "jax devices", f"none: {error}"
        return
    platform = devices[0].platform
    yield "jax platform", platform
    gpu_problem = _gpu_problem(platform) if has_native else "no native extension"
    is_native = has_native and (platform == "cpu" or (platform == "gpu" and not gpu_problem))
    yield "default implementation", "native" if is_native else "xla"
    yield "GPU kernels", f"not used: {gpu_problem}" if gpu_problem else "available"
    if platform == "gpu":
        can = "possible" if _jax_compat.has_streams() else "not possible"
        yield "Config.overlap", f"{can} with jax {jax.__version__}"
    yield "jax devices", f"{len(devices)} ({jax.local_device_count()} of this process)"
    yield "processes", f"{jax.process_count()} (this is {jax.process_index()})"


def _gpu_problem(platform: str) -> str:
    """Why the GPU kernels of a built extension are not what JAX's devices use, or ""."""
    try:
        gpu.load_library()
    except NotImplementedError as error:
        return str(error)
    if platform != "gpu":
        return f"the library can be loaded, but JAX's devices are of platform {platform}, not gpu"
    return ""


def transports() -> tuple[bool, list[Row]]:
    """Whether the native extension can be loaded, and rows on its transports."""
    if not _extension.is_built():
        cause = "left out, as JAX_EP_PURE_PYTHON asked" if _extension.is_left_out() else "not built"
        reason = f"{cause}: only implementation='xla' works; run `pip install .`"
        return False, [("jax_ep._core", reason)]
    try:
        core = _extension.load()
    except ImportError as error:
        return False, [("jax_ep._core", f"cannot be loaded: {error}")]
    rows = [("jax_ep._core", str(core.__file__))]
    for name, is_available, reason in core.transports():
        state = "available" if is_available else "not available"
        rows.append((f"transport {name}", f"{state}: {reason}" if reason else state))
    return True, rows


def _memory() -> Iterator[Row]:
    meminfo = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    for label, key in (("total", "MemTotal"), ("available for heaps", "MemAvailable")):
        yield label, f"{int(meminfo[key].split()[0]) * 1024 / GIB:.1f} GiB"
    for path in (Path("/sys/fs/cgroup/memory.max"),):
        if path.exists() and (limit := path.read_text().strip()) != "max":
            yield "cgroup limit", f"{int(limit) / GIB:.1f} GiB"
    if Path("/dev/shm").exists():
        usage = shutil.disk_usage("/dev/shm")
        yield (
            "/dev/shm",
            (
                f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free "
                "(heaps are memfds: nothing of jax_ep ever has a name there)"
            ),
        )
    for label, limit_id, scale in (
        ("address space limit", resource.RLIMIT_AS, _MIB),
        ("locked memory limit", resource.RLIMIT_MEMLOCK, _MIB),
        ("file descriptor limit", resource.RLIMIT_NOFILE, 1),
    ):
        soft, _ = resource.getrlimit(limit_id)
        unit = " MiB" if scale == _MIB else ""
        is_unlimited = soft == resource.RLIM_INFINITY
        yield label, "unlimited" if is_unlimited else f"{soft // scale:,}{unit}"


def _environment() -> Iterator[Row]:
    found = sorted(name for name in os.environ if name.startswith(_ENV_PREFIXES))
    if not found:
        yield "(none)", "no variable of jax_ep, JAX or XLA is set"
    for name in found:
        value = "(set, not shown)" if name == _env.SECRET_ENV else os.environ[name]
        yield name, value + _problem(name)


def _problem(name: str) -> str:
    """What is wrong with a variable of jax_ep, in brackets, or ""."""
    try:
        problem = _env.unknown(name)
        if name in _env.NAMES:
            _env.NAMES[name](name)
    except ValueError as error:
        problem = str(error)
    return f" ({problem})" if problem else ""
