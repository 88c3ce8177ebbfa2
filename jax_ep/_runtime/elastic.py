"""Groups that go on without ranks that died: Config(elastic=True).

Why a new session. A rank that dies leaves its node-mates' and peers' state at any point: flags,
epochs, slot sets, sequence numbers and the order log differ between the survivors, and somebody may
still write for the old call (a process that was stopped, a NIC with a queue). To bring all that to
a common state would need an answer for every place where a rank can stand. So agreeing makes a new
session: new heaps, rings, connections and threads for the survivors under the same Group, the same
name and the same session id, which is all that programs know, so nothing is compiled anew. Ranks
keep their numbers, and those without a process are holes: no heap, no signal, no wait on CPUs
(`Rank::active`), and on GPUs only signals of a rank to itself (SenderTo, kernels/gpu/protocol).
Whatever is written late goes to memory and connections of the old session, which nobody
reads. It takes as long as create_group, and memory is never held twice: the old session goes first.

What outlives a session in programs carries the number of the decision: epochs of halves
(kernels/epoch.h) and the names of executions (xla_ffi/run_names.h). On GPUs XLA does not record
these programs in command buffers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jax_ep import _config
from jax_ep._group import Group, takes_part_message
from jax_ep._runtime import agreement, bootstrap
from jax_ep._runtime.agreement import Decision, Member
from jax_ep._runtime.blueprint import Blueprint
from jax_ep._runtime.group_store import GroupStore
from jax_ep._runtime.pulse import Pulse

# Messages of a failure that says: that process is silent or has ended.
_LOSSES = ("is gone:", "stopped answering:")
_MOST_BUILDS = 3  # that fail although every member lives: then another one will fail, too
_REQUEST_POLL_S = 0.05
# For all members to make a session, beyond peer_timeout_s, if none of them falls silent.
_BUILD_S = 60.0


class LeftOutError(RuntimeError):
    """The others go on without this process."""


class Elastic:
    """The members of an elastic group, as this process knows them."""

    def __init__(
        self, store: GroupStore | None, group: Group, me: int, blueprint: Blueprint, life: str
    ):
        """Args: store (None: this process is alone), and what a session is made from."""
        self._store = store
        self._group = group
        self._me = me
        self._blueprint = blueprint
        self._life = life
        self._decision = Decision(0, {})
        self.active = np.ones(group.num_ranks, np.int32)
        self._pulse: Pulse | None = None  # from begin or join to close
        self._has_left = False
        self._is_closed = False

    def _begin_pulse(self) -> None:
        if self._store is not None:
            self._pulse = Pulse(self._store, self._me, self._peer_timeout_s)

    def leave(self) -> None:
        """Before this process ends its session: others that agree know at once that it is gone."""
        if self._store is None or self._has_left:
            return
        self._has_left = True
        with contextlib.suppress(Exception):  # the store may be gone
            last = agreement.newest(self._store) or self._decision
            if last.has(self._me, self._life):  # not one that was left out
                agreement.leave(self._store, self._me, self._life)

    def close(self) -> None:
        """Ends what it runs; whoever does so last removes what the group keeps in the store."""
        self.leave()
        if self._pulse is not None:
            self._pulse.close()
        if self._store is None or self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):  # the store may be gone
            last = agreement.newest(self._store) or self._decision
            if last.has(self._me, self._life):  # not one that was left out
                agreement.close(self._store, last)

    @property
    def _member(self) -> Member:
        return Member(self._life, os.getpid(), bootstrap.host_id())

    def begin(self, members: Mapping[int, Member], record: Mapping[str, Any]) -> None:
        """Notes who created the group; the first of them tells it the store, with `record`."""
        self._decision = Decision(0, members)
        if self._store is not None and self._me == min(members):
            agreement.begin(self._store, members)
            if not agreement.has_ended(self._store):  # without this one, which stood still
                self._store.put("group", record)
        self._begin_pulse()

    def agree(
        self,
        deadline: float,
        suspects: Collection[int],
        before: Callable[[], None],
        waits_for: Callable[[Collection[int]], None] = lambda _: None,
    ) -> Any:
        """Decides with the other living processes who goes on; a started session of them.

        Args:
            deadline: by time.monotonic().
            suspects: ranks that this process has seen dying or silent.
            before: called once it is decided: ends the old session, if it has not ended.
            waits_for: as in `agreement.decide`; told nobody once it is decided, ahead of `before`.

        Raises:
            LeftOutError: this process was left out.
            TimeoutError: no session could be made before the deadline.
        """
        if self._store is None:
            waits_for(())
            before()
            return self._build(Decision(self._decision.number + 1, self._decision.members))
        store = self._store
        lost = {self._blueprint.process_of(rank) for rank in suspects} - {self._me}
        failed = 0
        while True:
            last = agreement.newest(store) or self._decision
            self._refuse_if_left_out(last)
            decision = agreement.decide(
                store,
                last,
                self._me,
                self._member,
                suspects=lost,
                deadline=deadline,
                is_gone=self._is_gone,
                is_silent=self._is_silent,
                usable=self._usable,
                waits_for=waits_for,
            )
            self._refuse_if_left_out(decision)
            waits_for(())
            before()
            try:
                return self._build(decision)
            except Exception as error:
                culprit = getattr(error, "process", None)
                if culprit is not None and culprit != self._me:
                    lost.add(culprit)
                everybody_lives = not any(map(self._is_gone, decision.members.values()))
                failed += everybody_lives and not isinstance(error, bootstrap.BootstrapError)
                if failed >= _MOST_BUILDS:
                    raise
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{self._label}: agree: no session could be made in time; the last try "
                        f"ended with: {error}"
                    ) from error

    def join(self, deadline: float) -> Any:
        """For a process that was started again: waits until the others admit it; the session.

        Raises:
            RuntimeError: nobody lives who could.
            TimeoutError: they did not before the deadline.
        """
        store = self._store
        assert store is not None
        seen = agreement.newest(store)
        agreement.request(store, self._me, self._member)
        try:
            decision = self._admission(store, deadline)
            self._decision = seen or Decision(0, {})
            self._begin_pulse()
            try:
                return self._build(decision)
            except bootstrap.BootstrapError:
                return self.agree(deadline, (), lambda: None)
        except BaseException:
            self.close()
            raise
        finally:
            agreement.withdraw(store, self._me)

    def _admission(self, store: GroupStore, deadline: float) -> Decision:
        """The decision that has this process, once there is one."""
        # Longer than those wait who only seek who is lost: here the answer is final.
        limit_s = 2 * self._peer_timeout_s
        with contextlib.closing(Pulse(store, None, limit_s)) as pulse:
            while True:
                decision = agreement.newest(store)
                if decision is not None and decision.has(self._me, self._life):
                    return decision
                refuse_if_ended(store, self._label, self._me)
                # This process's life before counts no more.
                members = {self._me, *(decision.members if decision is not None else ())}
                if all(map(pulse.is_silent, members)):
                    raise RuntimeError(
                        f"{self._label}: process {self._me} was started again, and none of those "
                        f"that could take it back has given a sign of life for {limit_s:g} s; "
                        "start the whole job again"
                    )
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{self._label}: create_group of process {self._me}, which was started "
                        "again, waited longer than timeout_s to be admitted; the others must call "
                        "group.readmit(rank) and then group.agree()"
                    )
                time.sleep(_REQUEST_POLL_S)

    def readmit(self, rank: int, deadline: float) -> None:
        """As `Group.readmit`."""
        process = self._blueprint.process_of(rank)
        if self._store is None or process in self._decision.members:
            raise ValueError(takes_part_message(f"{self._label}: readmit", rank, self.active))
        while True:
            member = agreement.requested(self._store, process)
            if member is not None and not self._is_gone(member):
                return agreement.admit(self._store, process, member)
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self._label}: readmit: process {process}, of rank {rank}, has not called "
                    "create_group of this group in time; start it again, or if it waits in that of "
                    "another group, agree on that one first"
                )
            time.sleep(_REQUEST_POLL_S)

    @property
    def _peer_timeout_s(self) -> float:
        return _config.peer_timeout_s(self._group.config)

    @property
    def _label(self) -> str:
        return f"group {self._blueprint.name}"

    def _is_silent(self, process: int) -> bool:
        return self._pulse is not None and self._pulse.is_silent(process)

    def _is_gone(self, member: Member) -> bool:
        return member.host == bootstrap.host_id() and bootstrap.is_gone(member.pid)

    def _usable(self, living: Collection[int]) -> Collection[int]:
        """In mode ht rows between nodes travel by rails, so a node takes part as a whole."""
        blueprint = self._blueprint
        if blueprint.node_size == self._group.num_ranks or self._group.config.mode == "ll":
            return living
        usable = set(living)
        while True:
            active = blueprint.active(usable)
            nodes = active.reshape(-1, blueprint.node_size).all(axis=1)
            broken = np.flatnonzero(np.repeat(~nodes, blueprint.node_size))
            fewer = usable - {blueprint.process_of(int(rank)) for rank in broken}
            if fewer == usable:
                return usable
            usable = fewer

    def _refuse_if_left_out(self, decision: Decision) -> None:
        is_unknown = not decision.members  # to one that was started again
        if is_unknown or decision.has(self._me, self._life):
            return
        if self._pulse is not None:  # another life of this process may count by now
            self._pulse.close()
        raise LeftOutError(
            f"{self._label}: process {self._me} was left out when the others agreed (decision "
            f"{decision.number}): it was silent or late, or its node lost a rank; close the group, "
            "and start the process again to have it readmitted (Group.readmit)"
        )

    def _build(self, decision: Decision) -> Any:
        """The session of `decision`; collective over its members."""
        here = bootstrap.host_id()
        exchange = bootstrap.Exchange.among(
            decision.members, self._me, self._store, str(decision.number), self._label
        )
        exchange.timeout_s = self._peer_timeout_s + _BUILD_S
        if self._pulse is not None:
            for process, member in decision.members.items():
                if self._decision.members.get(process) != member:
                    self._pulse.expect(process)
        exchange.listen(self._is_silent)
        exchange.watch({p: m.pid for p, m in decision.members.items() if m.host == here})
        # A process that was started again may be on another host.
        hosts = {**self._blueprint.hosts, **{p: m.host for p, m in decision.members.items()}}
        self._blueprint = dataclasses.replace(self._blueprint, hosts=hosts)
        active = self._blueprint.active(decision.members)
        try:
            session = self._blueprint.start(self._group, exchange, active, decision.number)
        except BaseException as error:
            exchange.fail(error)
            raise
        self._decision = decision
        self.active = active
        if self._store is not None and self._me == min(decision.members):
            agreement.forget(self._store, decision.number)
        return session


def refuse_if_ended(store: GroupStore, label: str, me: int) -> None:
    """For a process that was started again: raises BootstrapError if nobody has the group."""
    if agreement.has_ended(store):
        raise bootstrap.BootstrapError(
            f"{label}: process {me} was started again, and the others have closed the group; "
            "start the whole job again"
        )


def losses(failure: str, blamed: int) -> tuple[int, ...]:
    """The rank that this failure of a session says has ended or is silent, if it does."""
    return (blamed,) if blamed >= 0 and any(words in failure for words in _LOSSES) else ()
