"""Cuts a child's output into lines and writes each with the child's prefix, whole.

One LinePrefixer per stream; all of them belong to the launcher's single thread, so that no two
lines mix.  It knows nothing of processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TextIO

# A progress bar ends its lines with a carriage return; each state becomes a line of its own.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)


class LinePrefixer:
    """Collects bytes and writes complete lines to ``sink``; after a broken pipe it swallows.

    Lines for which ``leave_out`` is true are not written.
    """

    def __init__(
        self, prefix: str, sink: TextIO, leave_out: Callable[[bytes], bool] = lambda line: False
    ) -> None:
        self._prefix = prefix
        self._sink = sink
        self._leave_out = leave_out
        self._pending = b""
        self._is_sink_gone = False

    def feed(self, chunk: bytes) -> None:
        """Takes what was read; writes the lines that it completes."""
        *lines, self._pending = _LINE_END.split(self._pending + chunk)
        self._write(lines)

    def close(self) -> None:
        """Writes what is left, as a line."""
        if self._pending:
            self._write([self._pending.rstrip(b"\r")])
            self._pending = b""

    def _write(self, lines: list[bytes]) -> None:
        lines = [line for line in lines if not self._leave_out(line)]
        if not lines or self._is_sink_gone:
            return
        text = "".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines)
        try:
            self._sink.write(text)
            self._sink.flush()
        except (BrokenPipeError, ValueError):
            self._is_sink_gone = True
