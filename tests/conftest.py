"""Test session: 8 virtual CPU devices, strict dtype promotion, implementations to test."""

from __future__ import annotations

import os

# Before jax: XLA reads its thread-pool size when the CPU client starts; with fewer threads than
# executions in flight, 8 virtual devices on 2 cores deadlock inside XLA itself.
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import importlib.util

import jax
import pytest

# Not through XLA_FLAGS: the multi-process tests' children would inherit it.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

NATIVE_IS_BUILT = importlib.util.find_spec("jax_ep._core") is not None
IMPLEMENTATIONS = ["xla", "native"] if NATIVE_IS_BUILT else ["xla"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `implementation` runs once for each of them."""
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture
def native() -> str:
    """Skips where the extension is not built."""
    if not NATIVE_IS_BUILT:
        pytest.skip("jax_ep._core is not built")
    return "native"
