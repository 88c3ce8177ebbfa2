"""Test session: 8 virtual CPU devices, strict dtype promotion, implementations to test.

`pytest -m gpu` runs the tests of operations on this machine's GPUs instead, with no more ranks than
GPUs, and with `--all-sizes` also those that only add sizes.
"""

from __future__ import annotations

import importlib.metadata
import os

from gpu_session import ON_GPU

# Before jax: XLA reads its thread-pool size when the CPU client starts; with fewer threads than
# executions in flight, 8 virtual devices on 2 cores deadlock inside XLA itself.
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "" if ON_GPU else "cpu")
# Tests that launch processes share the GPUs with this one.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".3")
if not ON_GPU:
    # Most of the time is XLA:CPU's code generation, for programs that run once or twice: the HLO
    # passes stay, LLVM's optimizations and the MLIR emitters go. Tests of what a user types (the
    # README's and the documents' code, the command line) start processes without these flags.
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # newer ones refuse this flag
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

import gc
import importlib.util

import jax
import pytest

# Not through XLA_FLAGS: the multi-process tests' children would inherit it.
if ON_GPU:
    jax.config.update("jax_default_matmul_precision", "highest")  # TF32 is not f32
else:
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Above all limits of the jobs that a test runs: theirs say more.
MULTIPROCESS_LIMIT_S = 1200
NATIVE_IS_BUILT = importlib.util.find_spec("jax_ep._core") is not None
IMPLEMENTATIONS = ["xla", "native"] if NATIVE_IS_BUILT else ["xla"]
if ON_GPU:
    IMPLEMENTATIONS = ["native"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-sizes",
        action="store_true",
        help="with -m gpu: also the sizes that others cover (elsewhere they always run)",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's, which reads these options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone uses all cores (up to 8) where pytest-xdist is installed: -n0 does not."""
    option = config.option
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_worker = hasattr(config, "workerinput")  # it comes here, too
    if not is_whole or is_worker or ON_GPU or not hasattr(option, "numprocesses"):
        return
    if option.numprocesses is None and not (option.usepdb or option.trace or option.collectonly):
        # One more than cores: tests that lose a rank wait. More than eight would only take memory.
        option.numprocesses = min(len(os.sched_getaffinity(0)) + 1, 8)
        option.dist = "loadfile"  # the tests of a file share jobs and compiled programs
        option.loadscopereorder = False  # pytest_collection_modifyitems has the order


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `implementation` runs once for each of them."""
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", IMPLEMENTATIONS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Jobs of several processes get time, and on CPUs come first: they are the longest files.

    Tests marked `ci` run by `-m ci` only. Under `-m gpu`, tests of native operations are its.
    """
    if "ci" not in config.option.markexpr.split():
        for item in items:
            if item.get_closest_marker("ci"):
                item.add_marker(pytest.mark.skip(reason="CI's part of the tests: pytest -m ci"))
    if not ON_GPU:
        starts_jobs = {item.path for item in items if item.get_closest_marker("multiprocess")}
        items.sort(key=lambda item: item.path not in starts_jobs)
    for item in items:
        if item.get_closest_marker("multiprocess") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(MULTIPROCESS_LIMIT_S))
    if not ON_GPU:
        return
    has_gpu = jax.default_backend() == "gpu"
    for item in items:
        if {"implementation", "native"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("gpu")
        if not has_gpu:
            item.add_marker(pytest.mark.skip(reason="JAX sees no GPU"))
        elif item.get_closest_marker("more_sizes") and not config.getoption("--all-sizes"):
            item.add_marker(pytest.mark.skip(reason="one more size: --all-sizes runs it"))


def pytest_collection_finish() -> None:
    """A tenth of the time would go into looking for garbage among JAX's modules, again and again.

    Not among the tests' own objects, though.
    """
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what C++ tests skipped, and why: to pytest they are one test that passed."""
    for report in terminalreporter.getreports("passed"):
        for key, value in report.user_properties:
            if key == "skipped in C++":
                terminalreporter.write_line(f"SKIPPED in C++ {value}")


@pytest.fixture
def native() -> str:
    """Skips where the extension is not built."""
    if not NATIVE_IS_BUILT:
        pytest.skip("jax_ep._core is not built")
    return "native"
