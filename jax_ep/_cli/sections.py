"""What `info` prints: titles with rows of a name and a value, by the standard library alone."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

Row = tuple[str, str]

_LEAST_VALUE_WIDTH = 20


def print_sections(sections: Mapping[str, Sequence[Row]]) -> None:
    """Prints each title with its rows; values start in one column."""
    for title, rows in sections.items():
        print(title)
        column = max((len(name) for name, _ in rows), default=0) + 4
        for name, value in rows or [("(none)", "")]:
            label = f"  {name}".ljust(column)
            print("\n".join(_wrap(value, label, " " * column)).rstrip())
        print()


def _wrap(value: str, label: str, indent: str) -> list[str]:
    width = _width()
    if width is None or width < len(indent) + _LEAST_VALUE_WIDTH:
        return [label + value]
    lines = textwrap.wrap(
        value, width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
    )
    return lines or [label]


def _width() -> int | None:
    """Columns of the terminal; None for a file or a pipe, whose lines stay whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
