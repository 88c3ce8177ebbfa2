"""Shares the oracle of tests/flax and the launcher of tests/multiprocess."""

import pathlib
import sys

import pytest

pytest.importorskip("flax", reason="Flax is not installed (pip install 'jax_ep[examples]')")
pytest.importorskip("optax", reason="Optax is not installed (pip install 'jax_ep[examples]')")

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("flax", "multiprocess")]

from support import cheap_compiles_and_closed_groups  # noqa: E402, F401
