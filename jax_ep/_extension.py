"""The compiled extension, jax_ep._core (xla_ffi/module.cc)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def is_built() -> bool:
    """Whether it is installed at all; a pure Python installation has none."""
    return importlib.util.find_spec("jax_ep._core") is not None


def load() -> Any:
    """The module; not imported with jax_ep, as groups of implementation="xla" do without it.

    Raises:
        ImportError: it is not built, or does not fit this installation.
    """
    return importlib.import_module("jax_ep._core")
