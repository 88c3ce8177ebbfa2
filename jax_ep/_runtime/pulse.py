"""Who is silent while processes make a session: those of other hosts, whose end nobody sees."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType

from jax_ep._runtime.store import Store

_BEATS = 6  # in the time after which a process counts as gone
_LONGEST_PERIOD_S = 1.0


class Pulse:
    """Counts in the store as long as the block runs; the counts of the others say that they live.

    Thread rule: `is_silent` is for the thread that entered the block.
    """

    def __init__(self, store: Store, me: int, limit_s: float) -> None:
        """Args: the group's store, this process's index, how long silence is none."""
        self._store = store
        self._me = me
        self._limit_s = limit_s
        self._seen: dict[int, tuple[int | None, float]] = {}  # count, since when
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jax_ep-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        """Begins to count."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it."""
        self._stopping.set()
        self._thread.join()

    def watch(self) -> None:
        """From now on silence counts."""
        self._seen = {}

    def is_silent(self, process: int) -> bool:
        """Whether `process` has not counted on for limit_s, since this was first asked."""
        count = self._store.get(f"pulse/{process}")
        now = time.monotonic()
        last, since = self._seen.setdefault(process, (count, now))
        if count != last:
            self._seen[process] = (count, now)
            return False
        return now - since > self._limit_s

    def _run(self) -> None:
        period_s = min(self._limit_s / _BEATS, _LONGEST_PERIOD_S)
        # Of another agreement, or of a process that was started again: it may begin as it ended.
        count = time.time_ns()
        while True:
            with contextlib.suppress(Exception):  # the store is gone: others will say so
                self._store.put(f"pulse/{self._me}", count, overwrite=True)
            count += 1
            if self._stopping.wait(period_s):
                return
