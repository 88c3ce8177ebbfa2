"""The compiled extension, jax_ep._core (xla_ffi/module.cc)."""

from __future__ import annotations

import importlib
from typing import Any


def load() -> Any:
    """The module; not imported with jax_ep, as groups of implementation="xla" do without it.

    Raises:
        ImportError: it is not built, or does not fit this installation.
    """
    return importlib.import_module("jax_ep._core")
