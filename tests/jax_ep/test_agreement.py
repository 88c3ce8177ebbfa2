"""Who goes on: processes that live, die, are late or come back, as threads over one store."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import time
import types
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_ep
from jax_ep._runtime import agreement, start
from jax_ep._runtime.agreement import Decision, Member
from jax_ep._runtime.elastic import Elastic, LeftOutError
from jax_ep._runtime.group_store import GroupStore
from jax_ep._runtime.pulse import Pulse
from jax_ep._runtime.seal import SealError
from jax_ep._runtime.session import NativeSession
from jax_ep._runtime.store import Store


class Client:
    """The key-value store of jax.distributed, as far as agreements use it."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self.lock:
            if key in self.stored and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.stored[key] = value

    def key_value_try_get_bytes(self, key: str) -> bytes:
        with self.lock:
            if key not in self.stored:
                raise RuntimeError(f"NOT_FOUND: {key}")
            return self.stored[key]

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        with self.lock:
            return [item for item in self.stored.items() if item[0].startswith(folder)]

    def key_value_increment(self, key: str, by: int) -> int:
        with self.lock:
            self.stored[key] = str(int(self.stored.get(key, b"0")) + by).encode()
            return int(self.stored[key])

    def key_value_delete(self, key: str) -> None:
        with self.lock:
            for name in list(self.stored):
                if name == key or name.startswith(f"{key}/"):
                    del self.stored[name]


class World:
    """Processes 0 .. count-1 of one group."""

    def __init__(self, count: int) -> None:
        self.store = GroupStore(Store(Client()), "group", b"secret")
        self.members = {p: Member(f"life{p}", 1000 + p, "host") for p in range(count)}
        self.gone: set[int] = set()  # pids
        self.silent: set[int] = set()
        self.decided: dict[int, Decision] = {}
        agreement.begin(self.store, self.members)

    def decide(
        self,
        process: int,
        last: Decision,
        *,
        suspects: Collection[int] = (),
        within_s: float = 20.0,
        usable: Any = lambda living: living,
    ) -> Decision:
        self.decided[process] = agreement.decide(
            self.store,
            last,
            process,
            self.members[process],
            suspects=suspects,
            deadline=time.monotonic() + within_s,
            is_gone=lambda member: member.pid in self.gone,
            is_silent=lambda process: process in self.silent,
            usable=usable,
            waits_for=lambda _: None,
        )
        return self.decided[process]

    def together(self, processes: Collection[int], **options: Any) -> Decision:
        """All of them decide at once; the one decision."""
        self.decided = {}
        last = agreement.newest(self.store)
        assert last is not None
        threads = [
            threading.Thread(target=self.decide, args=(p, last), kwargs=options) for p in processes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        decisions = list(self.decided.values())
        assert len(decisions) == len(processes)
        assert all(decision == decisions[0] for decision in decisions)
        return decisions[0]


def test_all_that_live_go_on() -> None:
    world = World(4)
    assert set(world.together(range(4)).members) == {0, 1, 2, 3}
    world.gone = {1002}
    decision = world.together([0, 1, 3])
    assert decision.number == 2 and set(decision.members) == {0, 1, 3}
    world.gone |= {1001}
    assert set(world.together([0, 3]).members) == {0, 3}


def test_a_process_that_ends_while_others_wait_is_left_out() -> None:
    world = World(3)
    threading.Timer(0.2, lambda: world.gone.add(1001)).start()
    begun = time.monotonic()
    assert set(world.together([0, 2]).members) == {0, 2}
    assert 0.1 < time.monotonic() - begun < 2


def test_who_is_suspected_is_waited_for_a_moment_only() -> None:
    world = World(3)
    begun = time.monotonic()
    assert set(world.together([0, 1], suspects=[2]).members) == {0, 1}
    assert agreement.GRACE_S <= time.monotonic() - begun < agreement.GRACE_S + 2


def test_who_is_suspected_and_comes_takes_part() -> None:
    world = World(3)
    assert set(world.together([0, 1, 2], suspects=[2]).members) == {0, 1, 2}


def test_who_comes_after_the_deadline_finds_that_it_was_left_out() -> None:
    world = World(3)
    decision = world.together([0, 1], within_s=0.3)
    assert set(decision.members) == {0, 1}
    late = agreement.newest(world.store)
    assert late == decision and not late.has(2, "life2")


def test_who_joins_a_round_that_was_decided_reads_its_decision() -> None:
    world = World(2)
    last = agreement.newest(world.store)
    assert last is not None
    decision = world.together([0], within_s=0.0)
    late = world.decide(1, last, within_s=5)
    assert late == decision and not late.has(1, "life1")


def test_a_process_that_was_started_again_takes_part_once_it_is_admitted() -> None:
    world = World(3)
    world.gone = {1002}
    world.together([0, 1])
    again = Member("life2 again", 2002, "host")
    agreement.request(world.store, 2, again)
    assert set(world.together([0, 1]).members) == {0, 1}  # it only asks
    assert agreement.requested(world.store, 2) == again
    agreement.admit(world.store, 2, again)
    decision = world.together([0, 1])
    assert decision.members[2] == again and decision.has(2, "life2 again")
    assert not decision.has(2, "life2")
    world.members[2] = again
    assert set(world.together([0, 1, 2]).members) == {0, 1, 2}


def test_an_admitted_process_that_dies_first_is_dropped_and_may_be_admitted_again() -> None:
    world = World(2)
    world.gone = {1001}
    world.together([0])
    for life, is_gone in (("second", True), ("third", False)):
        again = Member(life, 2000 + len(life), "host")
        agreement.request(world.store, 1, again)
        agreement.admit(world.store, 1, again)
        if is_gone:
            world.gone.add(again.pid)
        assert world.together([0]).has(1, life) is not is_gone


def test_only_those_that_the_group_can_go_on_with_take_part() -> None:
    world = World(4)
    world.gone = {1003}

    def whole_nodes(living: Collection[int]) -> set[int]:
        return {p for p in living if p ^ 1 in living}

    decision = world.together([0, 1, 2], usable=whole_nodes)
    assert set(decision.members) == {0, 1} and not decision.has(2, "life2")


@pytest.mark.parametrize("seed", range(3))
def test_random_deaths_never_split_a_group(seed: int) -> None:
    rng = random.Random(seed)
    world = World(5)
    living = set(range(5))
    for _ in range(4):
        dying = rng.choice(sorted(living - {0}))
        delay = rng.uniform(0, 0.05)
        comes = rng.random() < 0.5  # to the round, and dies in it
        threading.Timer(delay, lambda pid=1000 + dying: world.gone.add(pid)).start()
        decision = world.together(sorted(living if comes else living - {dying}))
        living.remove(dying)
        assert living <= set(decision.members) <= living | {dying}
        time.sleep(0.06)
        if dying in decision.members:  # as a group that cannot be built
            assert set(world.together(sorted(living)).members) == living
        if len(living) == 2:
            return


def test_old_rounds_are_forgotten() -> None:
    world = World(2)
    for _ in range(6):
        decision = world.together([0, 1])
        agreement.forget(world.store, decision.number)
    stored = world.store.store._client.stored
    assert agreement.newest(world.store) == decision
    assert len(stored) == 2 + 2 * 2, sorted(stored)  # two rounds: a decision and two joins each


def test_who_stands_still_until_its_round_is_forgotten_reads_the_newest() -> None:
    world = World(3)
    old = agreement.newest(world.store)
    assert old is not None
    world.together([0, 1], within_s=0.0)
    for _ in range(4):
        decision = world.together([0, 1])
        agreement.forget(world.store, decision.number)
    late = world.decide(2, old, within_s=20)
    assert late == decision and not late.has(2, "life2")


def _elastic(world: World, process: int) -> Elastic:
    group: Any = types.SimpleNamespace(
        num_ranks=len(world.members),
        config=jax_ep.Config(num_experts=8, top_k=1, hidden=8, max_tokens=1),
    )
    blueprint: Any = types.SimpleNamespace(name="g", process_of=int)
    elastic = Elastic(world.store, group, process, blueprint, f"life{process}")
    elastic.begin(world.members, {"kept": "for those that come back"})
    return elastic


def _agree(elastic: Elastic) -> Any:
    return elastic.agree(time.monotonic() + 5, (), lambda: None)


def test_who_was_left_out_learns_it_also_when_the_others_have_closed_the_group() -> None:
    world = World(3)
    members = [_elastic(world, process) for process in range(3)]
    world.gone = {1001}  # it is stopped, and looks so
    last = world.together([0, 2])
    for process in (0, 2):
        members[process].close()
    assert agreement.newest(world.store) == last  # nothing else of the group is left
    stored = world.store.store._client.stored
    kept = {key for key in stored if "pulse" not in key}
    assert kept == {"group/decided/1", "group/ended"}
    with pytest.raises(LeftOutError, match="process 1 was left out"):
        _agree(members[1])
    members[1].close()
    assert agreement.newest(world.store) == last


def test_who_has_closed_the_group_is_not_waited_for() -> None:
    """They waited until their deadline, also if it had joined before it gave up."""
    world = World(3)
    members = [_elastic(world, process) for process in range(3)]
    last = agreement.newest(world.store)
    assert last is not None
    with pytest.raises(RuntimeError, match="gives up"):
        agreement.decide(
            world.store,
            last,
            0,
            world.members[0],
            suspects=(),
            deadline=time.monotonic() + 20,
            is_gone=lambda _: _raise(RuntimeError("gives up")),
            is_silent=lambda _: False,
            usable=lambda living: living,
            waits_for=lambda _: None,
        )
    members[0].leave()  # its session may take long to end: it waits for the others
    begun = time.monotonic()
    assert set(world.together([1, 2]).members) == {1, 2}
    assert time.monotonic() - begun < agreement.GRACE_S
    # Another life of it is another process.
    again = Member("life0 again", 2000, "host")
    agreement.admit(world.store, 0, again)
    assert world.together([1, 2]).has(0, "life0 again")
    for member in members:
        member.close()


def _raise(error: Exception) -> Any:
    raise error


def test_who_closed_before_the_others_agreed_does_not_count_with_them() -> None:
    world = World(3)
    members = [_elastic(world, process) for process in range(3)]
    members[0].close()  # the group has failed, and this process gives up
    world.gone = {1000}
    last = world.together([1, 2])
    members[1].close()
    assert not agreement.has_ended(world.store)  # process 2 has it yet
    assert agreement.newest(world.store) == last
    members[2].close()
    assert agreement.has_ended(world.store)


def test_a_closed_group_leaves_what_those_need_that_come_late() -> None:
    world = World(2)
    members = [_elastic(world, process) for process in range(2)]
    for member in members:
        member.close()
    kept = {key for key in world.store.store._client.stored if "pulse" not in key}
    assert kept == {"group/decided/0", "group/ended"}
    config = jax_ep.Config(num_experts=8, top_k=1, hidden=8, max_tokens=1, elastic=True)
    group: Any = types.SimpleNamespace(config=config)
    exchange: Any = types.SimpleNamespace(label="group g", me=1)
    with pytest.raises(jax_ep.BootstrapError, match="the others have closed the group; start"):
        start._find_again(group, exchange, world.store)


def test_who_waits_to_be_taken_back_learns_that_the_others_close_the_group() -> None:
    """It waited until they had given no sign of life for long, and said so."""
    world = World(2)
    member = _elastic(world, 0)
    world.gone = {1001}
    agreement.begin(world.store, world.members)
    world.together([0])
    again = _elastic(World(2), 1)
    again._store, again._life = world.store, "life1 again"
    threading.Timer(0.3, member.close).start()
    with pytest.raises(jax_ep.BootstrapError, match="the others have closed the group; start"):
        again.join(time.monotonic() + 20)
    assert world.store.folder("request") == {}  # nobody is left who could read it


def test_who_does_not_count_on_is_silent_and_who_comes_late_is_not() -> None:
    store = World(3).store
    limit_s = 0.6
    with contextlib.ExitStack() as stack:
        pulses = [Pulse(store, process, limit_s) for process in range(2)]
        for pulse in pulses:
            stack.callback(pulse.close)
        time.sleep(limit_s / 2)
        stack.callback(Pulse(store, 2, limit_s).close)
        time.sleep(limit_s)
        assert not any(pulses[0].is_silent(process) for process in (0, 1, 2))
        pulses[1].close()
        time.sleep(2 * limit_s)
        assert [pulses[0].is_silent(process) for process in (0, 1, 2)] == [False, True, False]
        # Another life of process 1 is not to blame for the silence of the one before.
        pulses[0].expect(1)
        assert not pulses[0].is_silent(1)


def test_a_slow_store_makes_nobody_silent() -> None:
    store = World(2).store
    limit_s = 0.4
    with contextlib.ExitStack() as stack:
        pulses = [Pulse(store, process, limit_s) for process in range(2)]
        for pulse in pulses:
            stack.callback(pulse.close)
        time.sleep(limit_s)
        with store.store._client.lock:  # it answers nobody
            time.sleep(3 * limit_s)
            assert not any(pulse.is_silent(p) for pulse in pulses for p in range(2))
        for _ in range(20):  # while it answers again, whoever looks first
            assert not any(pulse.is_silent(p) for pulse in pulses for p in range(2))
            time.sleep(limit_s / 20)


def test_an_onlooker_sees_whether_anybody_counts_on() -> None:
    store = World(3).store
    with contextlib.closing(Pulse(store, None, 0.3)) as onlooker:
        with contextlib.closing(Pulse(store, 1, 0.3)):
            limit = time.monotonic() + 1.0
            while time.monotonic() < limit:
                assert not all(map(onlooker.is_silent, (0, 1)))
                time.sleep(0.02)
        with contextlib.closing(Pulse(store, 2, 0.3)):  # of whom it is not asked
            time.sleep(0.6)
            assert all(map(onlooker.is_silent, (0, 1)))
    assert set(store.folder("pulse")) == {1, 2}  # it has not counted itself


def test_who_is_silent_is_waited_for_a_moment_only() -> None:
    world = World(3)
    world.silent = {1, 2}
    assert set(world.together([0, 2]).members) == {0, 2}


def test_who_waits_is_told_for_whom() -> None:
    """Reports and the log said that nobody waits."""
    world = World(3)
    world.gone = {1001}
    members: list[Any] = [_elastic(world, process) for process in (0, 2)]
    for member in members:
        member._is_gone = lambda other: other.pid in world.gone
        member._usable = lambda living: living
        member._build = lambda decision: None
    late = threading.Timer(0.3, _agree, members[1:])
    late.start()
    said: list[Any] = []
    members[0].agree(time.monotonic() + 20, (), lambda: said.append("ends"), said.append)
    late.join()
    assert said[0] == {2}
    assert said[-2:] == [(), "ends"]  # once it is decided, before the old session's end
    for member in members:
        member.close()


def test_records_are_under_the_jobs_secret() -> None:
    world = World(2)
    stranger = GroupStore(world.store.store, "group", b"another")
    with pytest.raises(SealError):
        agreement.newest(stranger)
    assert b"life0" not in b"".join(world.store.store._client.stored.values())


def _session(native: Any = None) -> Any:
    """A NativeSession of an elastic group around that `_core.Session`, without executions."""
    session: Any = object.__new__(NativeSession)
    session.name, session._session, session._elastic = "g", native, object()
    session._pid, session._closed, session._left_out = os.getpid(), False, ""
    session._timeout_s, session._close_lock = 60.0, threading.RLock()
    session._await_executions = lambda deadline: None
    session._agreeing = None
    page = types.SimpleNamespace(asks=lambda: None, waits_for=lambda _: None)
    session._agree_page = lambda: contextlib.nullcontext(page)
    return session


def test_a_closed_group_takes_nobody_back() -> None:
    """At once: nobody comes who could be waited for."""
    session = _session(types.SimpleNamespace(failure_text=lambda: ""))
    session._closed = True
    with pytest.raises(RuntimeError, match="group g is closed"):
        session.readmit(1, None)


def test_who_was_told_to_agree_and_closed_is_told_that_it_is_closed() -> None:
    """Not to call agree, which it cannot any more."""
    told = "group g: rank 1 says that the processes of the group agree anew; call group.agree"
    blamed = pytest.importorskip("jax_ep._core").AGREEMENT
    session = _session(types.SimpleNamespace(failure_text=lambda: told, blamed_rank=lambda: blamed))
    with pytest.raises(RuntimeError, match=r"call group\.agree"):
        session.check()
    session._closed = True
    with pytest.raises(RuntimeError, match="group g is closed"):
        session.check()
    blamed = 1
    with pytest.raises(RuntimeError, match=r"call group\.agree"):  # any failure keeps its text
        session.check()


@pytest.mark.parametrize("call", ["agree", "readmit"])
def test_a_forked_child_takes_no_part(call: str) -> None:
    """At once, also if another thread had the lock when it was forked."""
    config = jax_ep.Config(num_experts=2, top_k=1, hidden=8, max_tokens=4, elastic=True)
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    group = jax_ep.create_group(mesh, "ep", config, implementation="xla")
    group._handle = session = _session()
    group._pid = session._pid = -1  # of the parent
    session._close_lock.acquire()
    arguments = (1,) if call == "readmit" else ()
    told: list[str] = []

    def run() -> None:
        try:
            getattr(group, call)(*arguments)
        except RuntimeError as error:
            told.append(str(error))

    child = threading.Thread(target=run, daemon=True)
    child.start()
    child.join(20)
    assert told
    assert f"group g: {call}: this process is a fork of the group's process" in told[0]


def test_a_forked_child_takes_no_part_in_a_group_of_xla_either() -> None:
    config = jax_ep.Config(num_experts=2, top_k=1, hidden=8, max_tokens=4, elastic=True)
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    group = jax_ep.create_group(mesh, "ep", config, implementation="xla")
    group.check()
    group._pid = -1  # of the parent
    is_fork = "this process is a fork of the group's process"
    load = functools.partial(group.expert_load, all_processes=True)
    for call in (group.check, group.agree, lambda: group.readmit(1), load):
        with pytest.raises(RuntimeError, match=is_fork):
            call()
    assert not group.health().ok
    assert is_fork in group.health().message


def test_a_forked_child_is_told_so_of_a_group_that_is_not_elastic_too() -> None:
    """It was told to create the group with elastic=True, which it cannot."""
    config = jax_ep.Config(num_experts=2, top_k=1, hidden=8, max_tokens=4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    with jax_ep.create_group(mesh, "ep", config, implementation="xla") as group:
        parent, group._pid = group._pid, -1
        for call in (group.agree, lambda: group.readmit(1), lambda: group.agree("soon")):
            with pytest.raises(RuntimeError, match="is a fork of the group's process"):
                call()
        group._pid = parent


def test_who_was_left_out_says_so_everywhere() -> None:
    """A step said to call agree, and the report began with the failure before."""
    why = "group g: process 0 was left out"
    said: list[str] = []
    native = types.SimpleNamespace(
        failure_text=lambda: "",
        blamed_rank=lambda: -1,
        begin_to_agree=lambda: None,
        end_to_agree=lambda: said.append("called agree"),
        abort=said.append,
        report=lambda: "group g: closed, FAILED: rank 1 is gone",
    )
    session = _session(native)
    session._elastic = types.SimpleNamespace(agree=lambda *_: _raise(LeftOutError(why)))
    with pytest.raises(LeftOutError):
        session.agree(None)
    assert said == ["called agree", why]  # the newest is what executions are told
    assert session.report() == f"{why}\n"
    for call in (lambda: session.agree(None), session.check):
        with pytest.raises(RuntimeError, match=why):
            call()


def test_ctrl_c_while_the_others_are_told_ends_the_session() -> None:
    """They may have been told, so this process must not go on as if they had not."""
    ended = []

    def begin_to_agree() -> None:
        raise KeyboardInterrupt

    native = types.SimpleNamespace(
        failure_text=lambda: "",
        begin_to_agree=begin_to_agree,
        end_to_agree=lambda: ended.append(True),
    )
    with pytest.raises(KeyboardInterrupt):
        _session(native).agree(None)
    assert ended
