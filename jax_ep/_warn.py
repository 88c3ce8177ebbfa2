"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings

# Code that runs between the user's line and ours.
_NOT_THE_USERS = frozenset({"jax_ep", "jax", "jaxlib", "flax"})


def warn(message: str, category: type[Warning], source: object = None) -> None:
    """Warns as of the innermost line that is neither jax_ep's nor JAX's nor Flax's.

    Args:
        message: what is wrong, and the fix.
        category: the warning's class.
        source: for a ResourceWarning, the object that was not released.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _NOT_THE_USERS:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "<unknown>"),
        frame.f_globals.setdefault("__warningregistry__", {}),
        source=source,
    )


def _package(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", "")).partition(".")[0]
