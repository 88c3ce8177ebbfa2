"""Exchange of small records between the processes of a group, over jax.distributed's store."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_ep import _jax_compat

PROTOCOL_VERSION = 1
_POLL_S = 1.0  # slices of a blocking read, so that Ctrl-C and dead peers are noticed


class BootstrapError(RuntimeError):
    """create_group could not agree with the other processes."""


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


class Exchange:
    """Rounds of all-to-all records between the processes of one group.

    Every round is named; a process publishes one record and reads everybody's. A process that fails
    publishes its error instead, so that the others raise at once and with its words.
    """

    def __init__(self, key: str, label: str, processes: Iterable[int], me: int, timeout_s: float):
        """Args: store key prefix, words for messages, process indices, own index, limit."""
        self._key = f"jax_ep/{key}"
        self._label = label
        self._processes = sorted(processes)
        self.me = me
        self.timeout_s = timeout_s
        self._client: Any = _jax_compat.distributed_client() if len(self._processes) > 1 else None
        self.alone = len(self._processes) == 1
        self._published: list[str] = []
        self._pids: dict[int, int] = {}
        if len(self._processes) > 1 and self._client is None:
            raise BootstrapError(
                f"{label}: its mesh spans {len(self._processes)} processes but jax.distributed is "
                "not "
                "initialised; call jax_ep.initialize() (or jax.distributed.initialize) first"
            )

    def share(self, stage: str, record: dict[str, Any], blob: bytes = b"") -> dict[int, Any]:
        """Publishes (record, blob) under `stage` and returns {process: (record, blob)} of all.

        Raises:
            BootstrapError: a process failed, is gone, or did not arrive within the limit.
        """
        if self._client is None:
            return {self.me: (record, blob)}
        self._publish(stage, {"record": record, "blob": blob.hex()})
        deadline = time.monotonic() + self.timeout_s
        return {process: self._read(stage, process, deadline) for process in self._processes}

    def watch(self, pids: dict[int, int]) -> None:
        """From now on a process of this host that is gone ends every wait: {process: pid}."""
        self._pids = dict(pids)

    def fail(self, stage: str, error: BaseException) -> None:
        """Tells the others that this process gave up before or in `stage`."""
        if self._client is not None and f"{self._key}/{stage}/{self.me}" not in self._published:
            self._publish(stage, {"error": f"{type(error).__name__}: {error}"})

    def clean_up(self) -> None:
        """Removes what this process published before its newest stage.

        Whoever entered the newest stage has read the earlier ones; the newest itself may still be
        read by others and stays (a few bytes).
        """
        for key in self._published[:-1]:
            self._client.key_value_delete(key)
        del self._published[:-1]

    def _publish(self, stage: str, message: dict[str, Any]) -> None:
        key = f"{self._key}/{stage}/{self.me}"
        self._client.key_value_set_bytes(key, json.dumps(message).encode())
        self._published.append(key)

    def _read(self, stage: str, process: int, deadline: float) -> tuple[dict[str, Any], bytes]:
        while True:
            slice_s = max(0.001, min(_POLL_S, deadline - time.monotonic()))
            try:
                text = self._client.blocking_key_value_get_bytes(
                    f"{self._key}/{stage}/{process}", int(slice_s * 1000)
                )
                break
            except Exception as error:
                # The store reports an absent key as DEADLINE_EXCEEDED; anything else is fatal.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise BootstrapError(
                        f"{self._label}: the jax.distributed store failed in stage {stage!r} while "
                        f"waiting for process {process}: {error}"
                    ) from error
            self._check_alive(stage, process)
            if time.monotonic() >= deadline:
                raise BootstrapError(
                    f"{self._label}: process {process} did not reach stage {stage!r} of "
                    "create_group "
                    f"within {self.timeout_s:g} s; every process of the mesh must call "
                    "create_group, "
                    "with the same arguments and in the same order"
                ) from None
        message = json.loads(text)
        if "error" in message:
            raise BootstrapError(f"{self._label}: process {process} failed: {message['error']}")
        return message["record"], bytes.fromhex(message["blob"])

    def _check_alive(self, stage: str, process: int) -> None:
        pid = self._pids.get(process)
        if pid is None:
            return
        if _is_gone(pid):
            raise BootstrapError(
                f"{self._label}: process {process} (pid {pid}) is gone; it ended before stage "
                f"{stage!r} of create_group"
            )


def _is_gone(pid: int) -> bool:
    """Whether the process has ended, reaped by its parent or not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (ProcessLookupError, FileNotFoundError):
        return True
    except OSError:  # it exists, under another user
        return False
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")
