"""Rounds of create_group between many processes: what they cost, and how they fail."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import simulated_processes as simulated
from hypothesis import given
from hypothesis import strategies as st

from jax_ep._runtime import bootstrap, cpu, records

PROCESSES = 64
RECORD_BYTES = 600  # as long as a greeting
BLOB_BYTES = 1500  # a rank's addresses and keys


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with simulated.service() as client:
        yield client


def _rounds(exchange: bootstrap.Exchange) -> list[int]:
    """The rounds of a CPU group: greetings, addresses, and three that carry nothing."""
    shared = [exchange.share("hello", {"me": exchange.me, "text": "x" * RECORD_BYTES})]
    shared.append(exchange.share("connect", {}, bytes([exchange.me % 256]) * BLOB_BYTES))
    shared += [exchange.share(stage, {}) for stage in ("connected", "started", "ready")]
    for process, (record, _) in shared[0].items():
        assert record["me"] == process
    for process, (_, blob) in shared[1].items():
        assert blob == bytes([process % 256]) * BLOB_BYTES
    return [len(each) for each in shared]


def _check_costs(client: Any, count: int, timeout_s: float) -> None:
    """Runs the rounds of `count` processes."""
    processes = simulated.make(client, count, timeout_s)
    simulated.run(processes, _rounds)
    assert {process.error for process in processes} == {""}
    assert all(process.result == [count] * 5 for process in processes)
    seconds = max(process.seconds for process in processes)
    print(
        f"{count} processes on {os.cpu_count()} cores: {seconds:.1f} s, at most "
        f"{max(process.client.requests for process in processes)} requests and "
        f"{max(process.client.bytes_read for process in processes) / 1e6:.1f} MB of one process"
    )
    # Four requests a round and one more for each second of waiting; who gathers makes four more.
    # All may fall to one process.
    limit = 5 * (4 + 4) + seconds + 5
    assert max(process.client.requests for process in processes) <= limit
    # One record of each process a round, with the names of its fields and its place in the store.
    # Who gathers reads it twice.
    round_bytes = RECORD_BYTES + BLOB_BYTES + 5 * 120
    assert max(process.client.bytes_read for process in processes) <= 2 * count * round_bytes
    mean = sum(process.client.bytes_read for process in processes) / count
    assert count * (RECORD_BYTES + BLOB_BYTES) <= mean <= count * round_bytes


def test_a_round_costs_four_requests_and_a_record_of_each_process(client: Any) -> None:
    _check_costs(client, PROCESSES, timeout_s=60)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_thousand_processes_in_the_same_few_requests(client: Any) -> None:
    _check_costs(client, 1024, timeout_s=300)


def test_of_each_call_only_its_last_round_stays_in_the_store(client: Any) -> None:
    count = 5
    for _ in range(3):
        processes = simulated.make(client, count, timeout_s=60)
        simulated.run(processes, _rounds)
        assert {process.error for process in processes} == {""}
        folder = processes[0].exchange._call
        kept = [key for key, _ in client.key_value_dir_get_bytes(folder.rpartition(".")[0])]
        kept += [key for key, _ in client.key_value_dir_get_bytes(folder)]
        assert all(key.startswith(f"{folder}/4/") for key in kept)
        assert len(kept) == count + 3
        assert not client.key_value_dir_get_bytes(
            f"{folder.rpartition('.')[0]}.{processes[0].exchange.number - 1}"
        )


class _DiesIn:
    """A store whose process ends at its n-th request of a kind."""

    def __init__(self, store: Any, method: str, number: int):
        self._store, self._method, self._left = store, method, number

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._left -= 1
            if self._left == 0:
                raise SystemExit
        return getattr(self._store, name)


DEATHS = {
    "before it publishes": ("insert", 1, "hello"),
    "before it is counted": ("count", 1, "connect"),
    "while it waits": ("wait", 1, "connect"),
    "after a round": ("insert", 2, "connect"),
}


@pytest.mark.parametrize("when", DEATHS)
def test_all_are_told_at_once_who_died(client: Any, when: str) -> None:
    method, number, stage = DEATHS[when]
    timeout_s = 1.5
    processes = simulated.make(client, PROCESSES, timeout_s)
    victim = processes[7].exchange
    victim._store = _DiesIn(victim._store, method, number)
    simulated.run(processes, _rounds)
    assert processes[7].error == "dead"
    for process in processes[:7] + processes[8:]:
        assert process.error.startswith("BootstrapError"), process.error
        assert f"process 7 did not reach stage '{stage}'" in process.error
        # Two limits where its record was there: the first says only that nobody lacks.
        assert process.seconds < 2 * timeout_s + 4


def test_who_dies_with_its_greeting_in_the_store_is_missed_soon(client: Any) -> None:
    """It ends before it is counted: the others waited for timeout_s, as nobody gathered.

    Found by the soak: a process killed in create_group was noticed after 30 s, with a
    peer_timeout_s of 3 s.
    """
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    processes = simulated.make(client, 4, timeout_s=60)
    victim = processes[2].exchange
    victim._store = _DiesIn(victim._store, "count", 1)

    def program(exchange: bootstrap.Exchange) -> None:
        exchange.peer_timeout_s = 1.0
        exchange.share("hello", {})
        exchange.watch({2: ended.pid})
        exchange.share("connect", {})

    simulated.run(processes, program)
    for process in (*processes[:2], processes[3]):
        assert f"process 2 (pid {ended.pid}) is gone" in process.error
        assert process.seconds < 20


def test_whoever_gathers_may_die_over_it(client: Any) -> None:
    """The last to arrive ends before it has published all records: another does it."""
    processes = simulated.make(client, 4, timeout_s=1.5)

    def program(exchange: bootstrap.Exchange) -> Any:
        if exchange.me == 3:
            time.sleep(0.5)
            exchange._store = _DiesIn(exchange._store, "folder", 1)
        return sorted(exchange.share("hello", {}))

    simulated.run(processes, program)
    assert [process.result for process in processes[:3]] == [[0, 1, 2, 3]] * 3


def test_an_error_reaches_all_with_its_words_and_at_once(client: Any) -> None:
    processes = simulated.make(client, PROCESSES, timeout_s=60)

    def program(exchange: bootstrap.Exchange) -> None:
        exchange.share("hello", {})
        if exchange.me == 5:
            raise ValueError("num_experts=3, expected a multiple of 64")
        exchange.share("connect", {})

    simulated.run(processes, program)
    assert processes[5].error.startswith("ValueError")
    for process in processes[:5] + processes[6:]:
        assert "process 5 failed: ValueError: num_experts=3, expected" in process.error
        assert process.seconds < 20  # a third of what they would wait
    again = simulated.make(client, PROCESSES, timeout_s=60)
    simulated.run(again, lambda exchange: len(exchange.share("hello", {})))
    assert [process.result for process in again] == [PROCESSES] * PROCESSES


def test_what_travels_from_process_to_process_names_the_call_once(client: Any) -> None:
    # Each that passed the words on added the call and the advice again.
    advice = r"to try again, call create_group again in every process"

    def program(exchange: bootstrap.Exchange) -> None:
        exchange.share("hello", {})
        if exchange.me == 0:
            raise ValueError("mine")
        while exchange.me == 2 and "failed" not in processes[1].error:
            time.sleep(0.01)
        exchange._round += exchange.me == 2  # it finds what process 1 has left
        exchange.share("connect", {})

    processes = simulated.make(client, 3, timeout_s=60)
    simulated.run(processes, program)
    number = processes[0].exchange.number
    call = f" (call {number} on these devices; {advice})"
    label = "jax_ep.create_group: process"
    assert processes[1].error == f"BootstrapError: {label} 0 failed: ValueError: mine{call}"
    words = f"BootstrapError: {label} 1 failed: BootstrapError: {label} 0 failed: ValueError: mine"
    assert processes[2].error == words + call

    def late(exchange: bootstrap.Exchange) -> None:
        while exchange.me == 1 and not processes[0].error:
            time.sleep(0.01)
        exchange.share("hello", {})

    processes = simulated.make(client, 2, timeout_s=0.5)
    simulated.run(processes, late)
    this = f"call {processes[0].exchange.number} on these devices"
    assert processes[0].error.endswith(f"in the same order ({this})")
    assert "process 1 did not reach stage 'hello'" in processes[1].error
    assert processes[1].error.endswith(f"in the same order ({this}; {advice})")


def test_processes_that_agree_are_not_told_of_a_call_of_create_group(client: Any) -> None:
    # "call 0 on these devices": what agree makes anew is no call of the program.
    calls = simulated.make(client, 2, timeout_s=0.5)
    store = [process.exchange.group_store() for process in calls]
    made = [bootstrap.Exchange.among([0, 1], me, store[me], "7", "group g") for me in range(2)]
    processes = [simulated.Process(exchange, calls[0].client) for exchange in made]
    for exchange in made:
        exchange.timeout_s = 0.5

    def program(exchange: bootstrap.Exchange) -> None:
        while exchange.me == 1 and not processes[0].error:
            time.sleep(0.01)
        exchange.share("connect", {})

    simulated.run(processes, program)
    said = "group g: process 1 did not reach stage 'connect' within 0.5 s"
    assert processes[0].error == f"BootstrapError: {said}"
    assert processes[1].error == (
        f"BootstrapError: group g: process 0 failed: BootstrapError: {said}"
    )


def test_a_process_of_this_host_that_is_gone_is_named(client: Any) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    processes = simulated.make(client, 3, timeout_s=60)

    def program(exchange: bootstrap.Exchange) -> None:
        exchange.share("hello", {})
        if exchange.me == 2:
            raise SystemExit
        if exchange.me == 1:
            exchange.watch({2: ended.pid})
        exchange.share("connect", {})

    simulated.run(processes, program)
    gone = f"process 2 (pid {ended.pid}) is gone; it ended in or before stage 'connect'"
    assert gone in processes[1].error
    # Another host cannot look: it gets the words.
    assert "process 1 failed" in processes[0].error and gone in processes[0].error
    assert max(process.seconds for process in processes) < 20


@pytest.mark.parametrize("odd", ["", "another secret...."])
def test_a_process_with_another_secret_is_refused_by_all(
    client: Any, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setenv("JAX_EP_JOB_SECRET", "the secret of this job")
    processes = simulated.make(client, 4, timeout_s=20)
    processes[2].exchange._secret = odd.encode()
    simulated.run(processes, lambda exchange: exchange.share("hello", {}))
    for process in (*processes[:2], processes[3]):
        assert "the record of process 2 is refused" in process.error, process.error
    assert "is refused" in processes[2].error


def test_what_a_stranger_writes_to_the_store_is_an_error(client: Any) -> None:
    for name, value, words in (
        ("all", b"garbage", "cut short|up to the last byte"),
        ("all", records.pack({0: b""}), "got the records of 1 processes"),
        ("all", records.pack({0: b"", 1: b""}), "expected a record"),
        ("outcome", b"garbage", "cut short|up to the last byte"),
    ):
        processes = simulated.make(client, 2, timeout_s=20)
        client.key_value_set_bytes(f"{processes[0].exchange._call}/0/{name}", value)
        with pytest.raises(bootstrap.BootstrapError, match=words):
            _raise(processes)


def _raise(processes: list[simulated.Process]) -> None:
    simulated.run(processes, lambda exchange: exchange.share("hello", {}))
    assert all(process.error for process in processes)
    raise bootstrap.BootstrapError(processes[0].error)


@given(st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=50), max_size=20))
def test_packed_records_come_back(stored: dict[int, bytes]) -> None:
    packed = records.pack(stored)
    assert records.unpack(packed) == stored
    for length in range(len(packed)):
        try:
            cut = records.unpack(packed[:length])
        except ValueError:
            continue
        assert cut.items() < stored.items()  # between two of them


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.binary(max_size=50))
def test_a_record_comes_back(record: dict[str, Any], blob: bytes) -> None:
    assert records.decode(records.encode(record, blob)) == (record, blob)


@given(st.sets(st.integers(0, 300)))
def test_ranges_hold_the_same_numbers(numbers: set[int]) -> None:
    runs = cpu.ranges(numbers)
    assert {n for first, last in runs for n in range(first, last + 1)} == numbers
    assert all(second[0] > first[1] + 1 for first, second in itertools.pairwise(runs))
