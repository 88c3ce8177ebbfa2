"""Who goes on: a decision that all living processes of a group read alike.

Each round has a number. A process that lives writes a record `join`, waits until every process
that is expected has joined or is known to be lost, and proposes those that have as the members. The
store keeps the first proposal and refuses the others, so there is one decision per round, and
everybody reads that one: who joined and is not in it has been left out. (The store is consistent
because one process serves it; it is the only thing that must live.)

Known to be lost is: a process of this host that has ended; one that has closed the group, which it
writes first of all (`left`); one whose silence or end a member has seen in the group (`suspects`)
or in the store, if it does not join within GRACE_S; and at a member's deadline whoever has not
joined.

A round that cannot be built, since another process died meanwhile, is followed by the next one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax_ep._runtime.group_store import GroupStore

# From a process's join: who is suspected may live after all, and come.
GRACE_S = 0.5
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.05
_KEPT_ROUNDS = 2  # for processes that are late to read them


@dataclasses.dataclass(frozen=True)
class Member:
    """A process as the others know it; `life` is drawn anew each time that it is started."""

    life: str
    pid: int
    host: str


@dataclasses.dataclass(frozen=True)
class Decision:
    """Who takes part from `number` on: {process index: Member}."""

    number: int
    members: Mapping[int, Member]

    def has(self, process: int, life: str) -> bool:
        """Whether that very process takes part."""
        member = self.members.get(process)
        return member is not None and member.life == life


def _as_record(decision: Decision) -> Any:
    return {process: dataclasses.asdict(member) for process, member in decision.members.items()}


def _as_decision(number: int, record: Any) -> Decision:
    return Decision(number, {int(p): Member(**member) for p, member in record.items()})


def newest(store: GroupStore) -> Decision | None:
    """The newest decision of the group, if there is any."""
    rounds = store.folder("decided")
    return _as_decision(max(rounds), rounds[max(rounds)]) if rounds else None


def begin(store: GroupStore, members: Mapping[int, Member]) -> None:
    """Writes decision 0: those who created the group."""
    store.put("decided/0", _as_record(Decision(0, members)))


def leave(store: GroupStore, me: int, life: str) -> None:
    """This process begins to close the group: who agrees from here on does so without it."""
    store.put(f"left/{me}", life, overwrite=True)


def close(store: GroupStore, last: Decision) -> None:
    """A member of that decision, the newest, has closed the group; whoever is the last ends it.

    Then all that the group keeps is removed but for this decision, which a process that was left
    out may still look for, and the word that it has ended, for processes that are started again.
    """
    if store.count(f"closed/{last.number}") < len(last.members):
        return
    store.put("ended", last.number, overwrite=True)
    for name in ("group", "closed", "pulse", "request", "admitted", "left"):
        store.delete(name)
    for number in store.folder("decided"):
        store.delete(str(number))
        if number != last.number:
            store.delete(f"decided/{number}")


def has_ended(store: GroupStore) -> bool:
    """Whether all members have closed the group."""
    return store.get("ended") is not None


def request(store: GroupStore, me: int, member: Member) -> None:
    """For a process that was started again: asks to be admitted."""
    store.put(f"request/{me}", dataclasses.asdict(member), overwrite=True)


def withdraw(store: GroupStore, me: int) -> None:
    """It takes part."""
    store.delete(f"request/{me}")


def requested(store: GroupStore, process: int) -> Member | None:
    """What the newest such process asks, unless it has taken part already."""
    record = store.get(f"request/{process}")
    return None if record is None else Member(**record)


def admit(store: GroupStore, process: int, member: Member) -> None:
    """The round after the newest decision expects that process, too."""
    last = newest(store)
    record = {"member": dataclasses.asdict(member), "after": 0 if last is None else last.number}
    store.put(f"admitted/{process}", record, overwrite=True)


def decide(
    store: GroupStore,
    last: Decision,
    me: int,
    member: Member,
    *,
    suspects: Collection[int],
    deadline: float,
    is_gone: Callable[[Member], bool],
    is_silent: Callable[[int], bool],
    usable: Callable[[Collection[int]], Collection[int]],
    waits_for: Callable[[Collection[int]], None],
) -> Decision:
    """Joins the round after `last`, and returns its decision.

    Args:
        store: the group's.
        last: the newest decision.
        me: this process's index, and
        member: what the others are to know of it.
        suspects: processes whose silence or end this one has seen in the group.
        deadline: by time.monotonic(): who has not joined by then is left out.
        is_gone: whether a process of this host has ended.
        is_silent: whether a process has given no sign of life (pulse.py).
        usable: of processes that live, those that the group can go on with.
        waits_for: told again and again which processes have to come first.

    Returns:
        The round's `Decision`, or a later one if the others are beyond it.
    """
    number = last.number + 1
    join = {"member": dataclasses.asdict(member), "suspects": sorted(suspects)}
    store.put(f"{number}/join/{me}", join, overwrite=True)
    begun = time.monotonic()
    pause = _FIRST_PAUSE_S
    while True:
        rounds = store.folder("decided")
        if number in rounds:
            return _as_decision(number, rounds[number])
        if rounds and max(rounds) > number:  # this process stood still, and its round is forgotten
            return _as_decision(max(rounds), rounds[max(rounds)])
        left = store.folder("left")
        joins = store.folder(f"{number}/join")
        joined = {p: Member(**join["member"]) for p, join in joins.items()}
        admitted = {
            p: Member(**record["member"])
            for p, record in store.folder("admitted").items()
            if record["after"] == last.number
        }
        # Who was admitted has nothing to do but to wait: it counts as joined while it lives.
        expected = {**last.members, **admitted}
        lost = {p for p, m in expected.items() if left.get(p) == m.life or is_gone(m)}
        joined |= {p: m for p, m in admitted.items() if p not in lost}
        suspected = {p for join in joins.values() for p in join["suspects"]}
        now = time.monotonic()
        is_late = now >= deadline
        missing = {p for p, m in expected.items() if p not in joined or joined[p].life != m.life}
        if all(
            is_late or p in lost or ((p in suspected or is_silent(p)) and now - begun > GRACE_S)
            for p in missing
        ):
            living = {p: m for p, m in expected.items() if p not in missing and p not in lost}
            chosen = set(usable(living))
            proposal = {p: m for p, m in living.items() if p in chosen}
            store.put(f"decided/{number}", _as_record(Decision(number, proposal)))
            continue
        waits_for(missing - lost)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def forget(store: GroupStore, number: int) -> None:
    """Removes what rounds before `number` have left; one member does."""
    for old in store.folder("decided"):
        if old <= number - _KEPT_ROUNDS:
            store.delete(f"decided/{old}")
            store.delete(f"{old}")
