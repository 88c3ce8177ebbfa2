"""Environment variables that Python reads (docs/tuning.md lists all of them)."""

from __future__ import annotations

import os


def flag(name: str) -> bool | None:
    """A boolean: unset or empty (None), 0 or 1.

    Raises:
        ValueError: anything else.
    """
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}: got {text!r}, expected 0 or 1; correct or unset it")
    return None if text == "" else text == "1"


def positive_int(name: str) -> int | None:
    """A count: unset or empty (None), or at least 1.

    Raises:
        ValueError: anything else.
    """
    text = os.environ.get(name, "")
    if text == "":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"{name}: got {text!r}, expected an int of at least 1; correct or unset it"
        )
    return int(text)
