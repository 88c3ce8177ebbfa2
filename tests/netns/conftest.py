"""Tests over several hosts; skipped, with the reason, where this machine cannot play them."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hosts as hosts_module


@pytest.fixture(scope="session")
def network():
    """Skips where there is no ofi transport or no network namespaces; returns the module."""
    if importlib.util.find_spec("jax_ep._core") is None:
        pytest.skip("jax_ep._core is not built")
    from jax_ep import _core

    usable, reason = {name: (ok, why) for name, ok, why in _core.transports()}["ofi"]
    if not usable:
        pytest.skip(f"ofi: {reason}")
    if reason := hosts_module.missing():
        pytest.skip(reason)
    return hosts_module


@pytest.fixture
def full():
    """For cases that only `.ci/run hosts` runs, to keep the README's command short."""
    if os.environ.get("JAX_EP_TEST_HOSTS") != "all":
        pytest.skip("set JAX_EP_TEST_HOSTS=all (as `.ci/run hosts` does)")
