"""The compiled extension, jax_ep._core (xla_ffi/module.cc)."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any


def is_built() -> bool:
    """Whether it is installed at all; a pure Python installation has none."""
    return importlib.util.find_spec("jax_ep._core") is not None


def is_left_out() -> bool:
    """Whether it is missing on purpose: this is a pure Python installation."""
    try:
        text = importlib.metadata.distribution("jax_ep").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return False
    return not is_built() and "Root-Is-Purelib: true" in text


def load() -> Any:
    """The module; not imported with jax_ep, as groups of implementation="xla" do without it.

    Raises:
        ImportError: it is not built, or does not fit this installation.
    """
    return importlib.import_module("jax_ep._core")
