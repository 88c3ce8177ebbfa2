"""For whom a process waits that is inside Group.agree: on its page, and in the log."""

from __future__ import annotations

import time
from collections.abc import Collection

from jax_ep import _extension


class AgreePage:
    """The page of one call of agree; anybody who asks this process gets it, without Python."""

    def __init__(self, name: str, me: int, timeout_s: float):
        """Args: the group's name, this process's index, Config.timeout_s."""
        core = _extension.load()
        self._alone = f"group {name}: process {me} has not gone on"
        self._name = name
        self._me = me
        self._warn_at = time.monotonic() + timeout_s / core.STALL_SHARE
        self._page = core.WaitPage(
            self._alone, "in group.agree: it waits for its own executions to end"
        )

    def asks(self) -> None:
        """Its executions have ended."""
        self._page.set(self._alone, "in group.agree: it asks who takes part")

    def waits_for(self, processes: Collection[int]) -> None:
        """Others have to come first; nobody: it is decided, and a session is made."""
        if not processes:
            self._page.set(self._alone, "in group.agree: it makes a session with those that agreed")
            return
        who = ", ".join(map(str, sorted(processes)))
        one, verb, they = ("process", "has", "it has")
        if len(processes) > 1:
            one, verb, they = ("processes", "have", "they have")
        self._page.set(
            f"group {self._name}: {one} {who} {verb} kept process {self._me} waiting",
            f"{they} not called group.agree",
        )
        if time.monotonic() > self._warn_at:
            self._warn_at = float("inf")
            self._page.warn()

    @property
    def text(self) -> str:
        """The page as it is now."""
        return str(self._page.text())

    def end(self) -> None:
        """Nobody gets it any more."""
        self._page.end()
