"""Python's lines in the log that JAX_EP_LOG asks for (proxy/base/log.h): one write to stderr."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from jax_ep import _env

_STDERR = 2


def info(message: Callable[[], str]) -> None:
    """Makes and writes the line if the level is info or debug; writing never fails."""
    if _env.log_level() in ("info", "debug"):
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"jax_ep[{os.getpid()}] INFO {message()}\n".encode())
