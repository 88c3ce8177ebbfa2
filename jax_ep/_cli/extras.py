"""Optional packages of the commands: imported on use, with one message when missing."""

from __future__ import annotations

import importlib
import sys
from typing import Any

PLAIN_WIDTH = 110  # columns of a file or a pipe


def require(name: str) -> Any:
    """Imports an optional module, or exits saying what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        sys.exit(
            f"python -m jax_ep: the package {error.name!r} is missing; "
            "install it with: pip install 'jax_ep[cli]' (in a checkout: pip install '.[examples]')"
        )


def make_console() -> Any:
    """A rich console; wide enough for the tables where the output is no terminal."""
    console = require("rich.console").Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    return console
