"""Exchange of small records between the processes of a group, over jax.distributed's store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax_ep import _env, _jax_compat
from jax_ep._runtime import seal
from jax_ep._runtime.store import Store

PROTOCOL_VERSION = 2
_POLL_S = 1.0  # slices of a blocking read, so that Ctrl-C and dead peers are noticed


class BootstrapError(RuntimeError):
    """create_group could not agree with the other processes.

    `process` is the one that did not come or is gone, if that was the reason.
    """

    process: int | None = None


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
    """How often this process has called create_group on each set of devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._published: defaultdict[str, list[str]] = defaultdict(list)

    def next(self, devices: str) -> int:
        with self._lock:
            self._counts[devices] += 1
            return self._counts[devices]

    def published(self, devices: str) -> list[str]:
        """Keys that this process has in the store for `devices`, oldest first."""
        return self._published[devices]


_calls = _Calls()


class Exchange:
    """Rounds of all-to-all records between the processes of one create_group call.

    The n-th call on a set of devices meets the n-th call of the other processes, so every call
    counts, also one that fails: making the Exchange counts it. In each round a process publishes
    one record and reads everybody's; one that gives up publishes its error as its record of the
    round that comes next, so that the others raise when they get there, at once and with its words.
    """

    def __init__(self, devices: Iterable[Any], me: int):
        """Args: the devices of the mesh (JAX's objects), this process's index.

        Raises:
            BootstrapError: there are several processes and no jax.distributed.
            ValueError: JAX_EP_JOB_SECRET is none.
        """
        devices = list(devices)
        names = sorted(f"{device.platform}:{device.id}" for device in devices)
        key = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
        self.label = "jax_ep.create_group"
        self.timeout_s = 0.0  # both known once the arguments are checked
        self.me = me
        self.processes = sorted({int(device.process_index) for device in devices})
        self.alone = len(self.processes) == 1
        self.number = _calls.next(key)  # of this call on these devices, from 1
        self._prefix = f"jax_ep/{key}.{self.number}"
        self._published = _calls.published(key)
        self._round = 0
        self._pids: dict[int, int] = {}
        self._is_silent: Callable[[int], bool] = lambda _: False
        self._secret = b""
        self._client: Any = None
        if self.alone:
            return
        self._client = _jax_compat.distributed_client()
        if self._client is None:
            raise BootstrapError(
                f"{self.label}: its mesh spans {len(self.processes)} processes but jax.distributed "
                "is not initialised; call jax_ep.initialize() (or jax.distributed.initialize) first"
            )
        try:
            self._secret = _env.job_secret()
        except ValueError as error:
            self.fail(error)
            raise

    @classmethod
    def among(
        cls, processes: Iterable[int], me: int, store: Store | None, name: str, label: str
    ) -> Exchange:
        """Of those processes of a group alone; `name` is new in its `store` (None: only this)."""
        exchange = cls.__new__(cls)
        exchange.label = label
        exchange.timeout_s = 0.0
        exchange.me = me
        exchange.processes = sorted(processes)
        exchange.alone = store is None or len(exchange.processes) == 1
        exchange.number = 0
        exchange._published = []
        exchange._round = 0
        exchange._pids = {}
        exchange._is_silent = lambda _: False
        if store is not None:
            exchange._prefix = f"{store.prefix}/{name}"
            exchange._client = store.client
            exchange._secret = store.secret
        else:
            exchange._client = None
        return exchange

    def store(self) -> Store | None:
        """For what the group keeps beyond this call; None if this process is alone."""
        if self.alone:
            return None
        return Store(self._client, f"{self._prefix}/elastic", self._secret)

    def share(self, stage: str, record: dict[str, Any], blob: bytes = b"") -> dict[int, Any]:
        """Publishes (record, blob), and returns {process: (record, blob)} of all.

        `stage` is for messages; the order of calls says which round it is.

        Raises:
            BootstrapError: a process failed, is gone, or did not arrive within the limit.
        """
        if self.alone:
            return {self.me: (record, blob)}
        number = self._publish({"record": record, "blob": blob.hex()})
        deadline = time.monotonic() + self.timeout_s
        return {process: self._read(stage, number, process, deadline) for process in self.processes}

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
        if self._client is not None:
            with contextlib.suppress(Exception):  # the store may be what failed
                self._publish({"error": f"{type(error).__name__}: {error}"})

    def clean_up(self) -> None:
        """Removes what this process published before its newest record, in earlier calls too.

        Whoever entered the newest round has read the earlier ones; the newest itself may still be
        read by others and stays (a few bytes) until the next call on the same devices.
        """
        for key in self._published[:-1]:
            self._client.key_value_delete(key)
        del self._published[:-1]

    def _publish(self, message: dict[str, Any]) -> int:
        number = self._round
        self._round += 1
        key = f"{self._prefix}/{number}/{self.me}"
        text = json.dumps(message).encode()
        self._client.key_value_set_bytes(key, seal.seal(self._secret, key, text))
        self._published.append(key)
        return number

    def _read(
        self, stage: str, number: int, process: int, deadline: float
    ) -> tuple[dict[str, Any], bytes]:
        key = f"{self._prefix}/{number}/{process}"
        while True:
            slice_s = max(0.001, min(_POLL_S, deadline - time.monotonic()))
            try:
                stored = self._client.blocking_key_value_get_bytes(key, int(slice_s * 1000))
                break
            except Exception as error:
                # The store reports an absent key as DEADLINE_EXCEEDED; anything else is fatal.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise BootstrapError(
                        f"{self.label}: the jax.distributed store failed in stage {stage!r} while "
                        f"waiting for process {process}: {error}"
                    ) from error
            self._check_alive(stage, process)
            if time.monotonic() >= deadline:
                late = BootstrapError(
                    f"{self.label}: process {process} did not reach stage {stage!r} of "
                    f"create_group within {self.timeout_s:g} s (call {self.number} on these "
                    "devices); every process of the mesh must call create_group, with the same "
                    "arguments and in the same order"
                )
                late.process = process
                raise late from None
        try:
            message = json.loads(seal.unseal(self._secret, key, stored))
        except seal.SealError as error:
            raise BootstrapError(
                f"{self.label}: the record of process {process} is refused: {error}; give every "
                f"process the same {_env.SECRET_ENV}"
            ) from None
        if "error" in message:
            raise BootstrapError(
                f"{self.label}: process {process} failed: {message['error']} (call "
                f"{self.number} on these devices; to try again, call create_group again in "
                "every process)"
            )
        return message["record"], bytes.fromhex(message["blob"])

    def _check_alive(self, stage: str, process: int) -> None:
        pid = self._pids.get(process)
        if pid is not None and is_gone(pid):
            gone = BootstrapError(
                f"{self.label}: process {process} (pid {pid}) is gone; it ended before stage "
                f"{stage!r} of create_group"
            )
            gone.process = process
            raise gone
        if self._is_silent(process):
            silent = BootstrapError(
                f"{self.label}: process {process} fell silent before stage {stage!r}"
            )
            silent.process = process
            raise silent


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
