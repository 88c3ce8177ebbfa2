"""Shows on the pages of all groups that this process is inside close, create_group or agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax_ep import _extension


@contextlib.contextmanager
def shown(what: str, name: str) -> Iterator[None]:
    """While inside: who waits for this process is told that it is in `what` of that group.

    Args:
        what: "close", "create_group" or "agree".
        name: the group's, as messages quote it: "ep[4]#2".
    """
    if not _extension.is_built():
        yield
        return
    core = _extension.load()
    number = name.rpartition("#")[2]
    place = None
    try:
        place = core.begin_stay(what, int(number) if number.isdecimal() else 0)
        yield
    finally:
        if place is not None:
            core.end_stay(place)
