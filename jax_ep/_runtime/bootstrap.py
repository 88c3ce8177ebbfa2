"""Exchange of small records between the processes of a group, over jax.distributed's store."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from jax_ep import _env, _jax_compat
from jax_ep._runtime import records, seal
from jax_ep._runtime.group_store import GroupStore
from jax_ep._runtime.store import Store

PROTOCOL_VERSION = 4
_POLL_S = 1.0  # slices of a blocking read, so that Ctrl-C and dead peers are noticed


class BootstrapError(RuntimeError):
    """create_group could not agree with the other processes.

    `process` is the one that did not come or is gone, if that was the reason. `words` are what the
    others are told of it.
    """

    def __init__(self, text: str, process: int | None = None, of_call: str = ""):
        """Args: what it says, of which process, and behind it of which call, to this one alone."""
        super().__init__(text + of_call)
        self.process = process
        self.words = text


def host_id() -> str:
    """Names the set of processes that can map each other's memory: same kernel, same pid space."""

    def read(path: str) -> str:
        try:
            with open(path, encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            return ""

    try:
        pid_space = os.readlink("/proc/self/ns/pid")
    except OSError:
        pid_space = ""
    boot = read("/proc/sys/kernel/random/boot_id") or socket.gethostname()
    return f"{boot}/{pid_space}"


class _Calls:
    """How often a process has called create_group on each set of devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()

    def next(self, devices: str, process: int) -> int:
        with self._lock:
            self._counts[devices, process] += 1
            return self._counts[devices, process]

    def give_back(self, devices: str, process: int) -> None:
        with self._lock:
            self._counts[devices, process] -= 1


_calls = _Calls()


class Exchange:
    """Rounds of all-to-all records between the processes of one create_group call.

    The n-th call on a set of devices meets the n-th call of the other processes, so every call
    counts, also one that fails: making the Exchange counts it. In each round a process publishes
    one record and gets everybody's; one that gives up publishes its error as the outcome of the
    round that the others are in or come to next, so that they raise at once and with its words.

    A round is a folder of the store:

        records/P   the record of process P, sealed for this place
        arrived     a counter; who makes it the number of processes gathers the records
        all         the records as they were stored, one behind the other
        outcome     empty: `all` is there. Else the process that gave up, and its sealed words

    So a round costs a process four requests, one more for each second that it waits, and the bytes
    of one record of each process. Nobody is special: if the one that gathers dies over it, whoever
    reaches the limit first does it instead. If one dies before it is counted, and its record is
    there, whoever was counted last gathers: it reads all records each peer_timeout_s while one is
    late. Who gathers also removes the folder of the round before, which all have left, and in the
    first round that of the call before.
    """

    _store: Any

    def __init__(self, devices: Iterable[Any], me: int):
        """Args: the devices of the mesh (JAX's objects), this process's index.

        Raises:
            BootstrapError: there are several processes and no jax.distributed, or this is a forked
                child.
            ValueError: JAX_EP_JOB_SECRET is none.
        """
        devices = list(devices)
        names = sorted(f"{device.platform}:{device.id}" for device in devices)
        key = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
        number = _calls.next(key, me)  # of this call on these devices, from 1
        self._begin(
            {int(device.process_index) for device in devices}, me, number, f"jax_ep/{key}.{number}"
        )
        self._left = f"jax_ep/{key}.{number - 1}"
        self._counted_as = key
        if self.alone:
            return
        try:
            client = _jax_compat.distributed_client()
        except RuntimeError as error:
            raise BootstrapError(f"{self.label}: {error}") from None
        if client is None:
            raise BootstrapError(
                f"{self.label}: its mesh spans {len(self.processes)} processes but jax.distributed "
                "is not initialised; call jax_ep.initialize() (or jax.distributed.initialize) first"
            )
        self._store = Store(client)
        try:
            self._secret = _env.job_secret()
        except ValueError as error:
            self.fail(error)
            raise

    @classmethod
    def among(
        cls, processes: Iterable[int], me: int, store: GroupStore | None, name: str, label: str
    ) -> Exchange:
        """Of those processes of a group alone; `name` is new in its `store` (None: only this)."""
        exchange = cls.__new__(cls)
        exchange._begin(processes, me, 0, "" if store is None else f"{store.prefix}/{name}")
        exchange.label = label
        exchange.alone |= store is None
        if store is not None:
            exchange._store = store.store
            exchange._secret = store.secret
        return exchange

    def _begin(self, processes: Iterable[int], me: int, number: int, call: str) -> None:
        self.label = "jax_ep.create_group"
        self.timeout_s = 0.0  # all three known once the arguments are checked
        self.peer_timeout_s = math.inf
        self.me = me
        self.processes = sorted(processes)
        self.alone = len(self.processes) == 1
        self.number = number
        self._call = call
        self._left = f"{call}/before"  # the folder that all have left: none yet
        self._round = 0
        self._pids: dict[int, int] = {}
        self._is_silent: Callable[[int], bool] = lambda _: False
        self._secret = b""
        self._store = None

    def uncount(self) -> None:
        """This call was none: the next one on these devices gets its number."""
        _calls.give_back(self._counted_as, self.me)

    def group_store(self) -> GroupStore | None:
        """For what the group keeps beyond this call; None if this process is alone."""
        if self.alone:
            return None
        # Not in the folder of this call, which the next one on these devices removes.
        return GroupStore(self._store, self._call.replace("/", "/kept/", 1), self._secret)

    def share(self, stage: str, record: dict[str, Any], blob: bytes = b"") -> dict[int, Any]:
        """Publishes (record, blob), and returns {process: (record, blob)} of all.

        `stage` is for messages; the order of calls says which round it is.

        Raises:
            BootstrapError: a process failed, is gone, or did not arrive within the limit.
        """
        if self.alone:
            return {self.me: (record, blob)}
        try:
            stored = self._gather(stage, records.encode(record, blob))
            opened = {process: self._open(process, stored[process]) for process in self.processes}
        except BootstrapError:
            raise
        except Exception as error:
            raise BootstrapError(
                f"{self.label}: the jax.distributed store failed in stage {stage!r}: {error}"
            ) from error
        self._left = f"{self._call}/{self._round}"
        self._round += 1
        return opened

    def watch(self, pids: dict[int, int]) -> None:
        """From now on a process of this host that is gone ends every wait: {process: pid}."""
        self._pids = dict(pids)

    def listen(self, is_silent: Callable[[int], bool]) -> None:
        """From now on a process of which that is true ends every wait."""
        self._is_silent = is_silent

    @property
    def pids(self) -> dict[int, int]:
        """{process: pid} of the watched ones."""
        return self._pids

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process has given up; never raises."""
        if self._store is None:
            return
        # Others add the call, which is theirs, too.
        words = error.words if isinstance(error, BootstrapError) else str(error)
        words = f"{type(error).__name__}: {words}"
        with contextlib.suppress(Exception):  # the store may be what failed
            # The round that this process is in may have an outcome already.
            for number in (self._round, self._round + 1):
                place = self._place(number, f"outcome/{self.me}")
                sealed = seal.seal(self._secret, place, words.encode())
                if self._store.insert(
                    self._place(number, "outcome"), records.pack({self.me: sealed})
                ):
                    return

    def _place(self, number: int, name: str) -> str:
        return f"{self._call}/{number}/{name}"

    def _gather(self, stage: str, message: bytes) -> dict[int, bytes]:
        """Publishes `message` in this round; what all have stored in it."""
        deadline = time.monotonic() + self.timeout_s
        place = self._place(self._round, f"records/{self.me}")
        self._store.insert(place, seal.seal(self._secret, place, message))
        arrived = self._store.count(self._place(self._round, "arrived"))
        if arrived >= len(self.processes):
            self._publish_all()
        looks = arrived == len(self.processes) - 1
        outcome = self._await_outcome(stage, deadline, self.peer_timeout_s if looks else math.inf)
        if outcome:
            self._raise_failure(outcome)
        stored = records.unpack(self._read(stage, "all"))
        if sorted(stored) != self.processes:
            raise BootstrapError(
                f"{self.label}: got the records of {len(stored)} processes in stage {stage!r}, "
                f"expected {len(self.processes)}; somebody else writes to the store"
            )
        return stored

    def _publish_all(self) -> list[int]:
        """Gathers the records for all, unless some are not there: the processes that lack."""
        found = self._store.folder(self._place(self._round, "records"))
        missing = [process for process in self.processes if str(process) not in found]
        if not missing:
            gathered = records.pack({process: found[str(process)] for process in self.processes})
            self._store.insert(self._place(self._round, "all"), gathered)
            self._store.insert(self._place(self._round, "outcome"), b"")
            self._store.remove(self._left)
        return missing

    def _await_outcome(self, stage: str, deadline: float, look_every_s: float) -> bytes:
        place = self._place(self._round, "outcome")
        next_look = time.monotonic() + look_every_s
        while True:
            # Looked up first: who ends after the outcome is there is no concern of this round.
            lost = self._find_lost(stage)
            slice_s = _POLL_S if lost is None else 0.0  # else the outcome is there already
            outcome = self._store.wait(place, min(slice_s, deadline - time.monotonic()))
            if outcome is not None:
                return bytes(outcome)
            if lost is not None:
                raise lost
            if time.monotonic() >= deadline:
                break
            if time.monotonic() >= next_look:
                self._publish_all()
                next_look += look_every_s
        missing = self._publish_all()
        if missing:
            fix = ""
            if self.number:
                fix = (
                    "; every process of the mesh must call create_group, with the same arguments "
                    "and in the same order"
                )
            raise BootstrapError(
                f"{self.label}: {_named(missing)} did not reach {self._named_stage(stage)} within "
                f"{self.timeout_s:g} s{fix}",
                missing[0],
                self._of_call(),
            )
        return self._read(stage, "outcome")

    def _find_lost(self, stage: str) -> BootstrapError | None:
        """The error that a process is gone or silent, if one is."""
        for process, pid in self._pids.items():
            if is_gone(pid):
                return BootstrapError(
                    f"{self.label}: process {process} (pid {pid}) is gone; it ended in or before "
                    f"{self._named_stage(stage)}",
                    process=process,
                )
        for process in self.processes:
            if self._is_silent(process):
                return BootstrapError(
                    f"{self.label}: process {process} fell silent before stage {stage!r}",
                    process=process,
                )
        return None

    def _read(self, stage: str, name: str) -> bytes:
        """What is in the store already; with many processes at once it takes its time to come."""
        value = self._store.wait(self._place(self._round, name), self.timeout_s)
        if value is None:
            raise BootstrapError(
                f"{self.label}: the jax.distributed store did not give out the records of stage "
                f"{stage!r} within {self.timeout_s:g} s; see that the host of its coordinator "
                "(process 0's, if no other) is not overloaded, or raise Config.timeout_s"
            )
        return bytes(value)

    def _raise_failure(self, outcome: bytes) -> None:
        ((process, sealed),) = records.unpack(outcome).items()
        place = self._place(self._round, f"outcome/{process}")
        words = self._unseal(process, place, sealed).decode(errors="replace")
        raise BootstrapError(
            f"{self.label}: process {process} failed: {words}",
            of_call=self._of_call("; to try again, call create_group again in every process"),
        )

    def _named_stage(self, stage: str) -> str:
        return f"stage {stage!r}" + (" of create_group" if self.number else "")

    def _of_call(self, advice: str = "") -> str:
        """Which call of create_group it is, for the end of a message; nothing if it is none."""
        return f" (call {self.number} on these devices{advice})" if self.number else ""

    def _open(self, process: int, sealed: bytes) -> tuple[dict[str, Any], bytes]:
        place = self._place(self._round, f"records/{process}")
        return records.decode(self._unseal(process, place, sealed))

    def _unseal(self, process: int, place: str, sealed: bytes) -> bytes:
        try:
            return seal.unseal(self._secret, place, sealed)
        except seal.SealError as error:
            raise BootstrapError(
                f"{self.label}: the record of process {process} is refused: {error}; give every "
                f"process the same {_env.SECRET_ENV}"
            ) from None


def _named(processes: Collection[int]) -> str:
    """The first few of them, for a message."""
    names = [str(process) for process in list(processes)[:8]]
    if len(processes) > len(names):
        names.append(f"{len(processes) - len(names)} more")
    if len(names) == 1:
        return f"process {names[0]}"
    return f"processes {', '.join(names[:-1])} and {names[-1]}"


def is_gone(pid: int) -> bool:
    """Whether the process has ended, reaped by its parent or not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (ProcessLookupError, FileNotFoundError):
        return True
    except OSError:  # it exists, under another user
        return False
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")
