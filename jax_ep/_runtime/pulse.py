"""Which processes of an elastic group live: also those of other hosts, whose end nobody sees."""

from __future__ import annotations

import contextlib
import threading
import time

from jax_ep._runtime.group_store import GroupStore

_BEATS = 6  # in the time after which a process counts as gone
_LONGEST_PERIOD_S = 1.0


class Pulse:
    """Counts in the store from here to `close`, and watches the others' counts.

    Thread rule: any thread may ask; owns one thread.
    """

    def __init__(self, store: GroupStore, me: int | None, limit_s: float) -> None:
        """Args: the group's store, this process's index, how long silence is none.

        Who waits to be taken back only watches: its index is None.
        """
        self._store = store
        self._me = me
        self._limit_s = limit_s
        self._seen: dict[int, tuple[int, float]] = {}  # count, since when
        self._begun = time.monotonic()
        self._looked = self._begun  # when what is compared below was complete
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jax_ep-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def is_silent(self, process: int) -> bool:
        """Whether `process` has not counted on for limit_s, as far as this one has looked."""
        _, since = self._seen.get(process, (0, self._begun))
        return self._looked - since > self._limit_s

    def expect(self, process: int) -> None:
        """Another life of that process begins: what was seen of the one before says nothing."""
        self._seen[process] = (0, time.monotonic())

    def _run(self) -> None:
        period_s = min(self._limit_s / _BEATS, _LONGEST_PERIOD_S)
        # A process that is started again does not begin as it ended.
        count = time.time_ns()
        while True:
            with contextlib.suppress(Exception):  # the store is gone: others will say so
                if self._me is not None:
                    self._store.put(f"pulse/{self._me}", count, overwrite=True)
                counts = self._store.folder("pulse")
                now = time.monotonic()
                # If this thread stood still, that says nothing of the others.
                stood_still = now - self._looked > self._limit_s / 2
                for process, newest in counts.items():
                    if stood_still or self._seen.get(process, (None, 0.0))[0] != newest:
                        self._seen[process] = (newest, now)
                self._looked = now
            count += 1
            if self._stopping.wait(period_s):
                return
