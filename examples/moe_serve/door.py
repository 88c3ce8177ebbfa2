"""How processes come to process 0: at the start, and one that was started again at any time.

Process 0 leaves its port in JAX's key-value store, with a number that is drawn for this server.
Whoever connects must know a secret that follows from that number and from JAX_EP_JOB_SECRET, which
`launch` gives to all processes of the job.  (A collective of XLA's could bring both, but not to a
process that was started again: all that live would have to take part.)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

import jax
import orbax.checkpoint as ocp

from moe_serve.frames import HEADER, Kind, LostProcessError, receive_bytes, send

KEY = "moe_serve/door"
SECRET_BYTES = 32
JOIN_LIMIT_S = 60.0
STRANGER_LIMIT_S = 5.0  # to say who it is


def _store() -> Any:
    """The key-value store of jax.distributed; JAX has no public name for it, Orbax has."""
    return ocp.multihost.get_jax_distributed_client()


def _secret_of(drawn: bytes) -> bytes:
    of_job = os.environ.get("JAX_EP_JOB_SECRET", "").encode()
    return hmac.new(of_job, KEY.encode() + drawn, hashlib.sha256).digest()


class Door:
    """Process 0's: a thread takes who connects and knows the secret; the loop asks who is there.

    Args:
        host: name or address of process 0's host, at which the others reach it.
    """

    def __init__(self, host: str) -> None:
        drawn = secrets.token_bytes(SECRET_BYTES)
        self._secret = _secret_of(drawn)
        self._arrived: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._server = socket.create_server((host, 0))
        port = self._server.getsockname()[1]
        _store().key_value_set_bytes(KEY, port.to_bytes(4, "little") + drawn, allow_overwrite=True)
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def waiting(self) -> list[int]:
        """The processes that stand before the door, and live as far as one sees."""
        with self._changed:
            for process, connection in list(self._arrived.items()):
                if _has_ended(connection):
                    self._arrived.pop(process).close()
            return sorted(self._arrived)

    def wait_for(self, processes: Collection[int]) -> None:
        """Until all of these are there; LostProcessError says who is not, after JOIN_LIMIT_S."""
        with self._changed:
            if self._changed.wait_for(lambda: self._arrived.keys() >= set(processes), JOIN_LIMIT_S):
                return
            missing = sorted(set(processes) - self._arrived.keys())
        raise LostProcessError(f"processes {missing} have not joined within {JOIN_LIMIT_S:g} s")

    def take(self, process: int) -> socket.socket:
        """The connection of one that waits; LostProcessError: it does not wait any more."""
        with self._changed:
            if connection := self._arrived.pop(process, None):
                return connection
        raise LostProcessError(f"process {process} is lost: it has left the door")

    def close(self) -> None:
        """Ends the thread, and sends away who waits."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()
        self._thread.join(STRANGER_LIMIT_S + 1.0)
        with self._changed:
            for connection in self._arrived.values():
                connection.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # it is closed
                return
            try:
                process = self._ask(connection)
            except OSError:
                connection.close()
                continue
            with self._changed:
                if before := self._arrived.pop(process, None):
                    before.close()
                self._arrived[process] = connection
                self._changed.notify_all()

    def _ask(self, connection: socket.socket) -> int:
        """The number of a process that knows the secret; OSError for a stranger."""
        connection.settimeout(STRANGER_LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        header = receive_bytes(connection, HEADER.size)
        if header != HEADER.pack(Kind.JOIN, SECRET_BYTES + 4):
            raise ConnectionError("no process of this job")
        payload = receive_bytes(connection, SECRET_BYTES + 4)
        if not hmac.compare_digest(payload[:SECRET_BYTES], self._secret):
            raise ConnectionError("no process of this job")
        return int.from_bytes(payload[SECRET_BYTES:], "little")


def knock(host: str) -> socket.socket:
    """For every other process: its connection to process 0, which may be about to open the door."""
    limit = time.monotonic() + JOIN_LIMIT_S
    while True:
        left_s = max(0.01, limit - time.monotonic())
        found = _store().blocking_key_value_get_bytes(KEY, int(left_s * 1e3))
        port, secret = int.from_bytes(found[:4], "little"), _secret_of(found[4:])
        try:
            connection = socket.create_connection((host, port), timeout=left_s)
        except OSError as error:
            if time.monotonic() >= limit:
                raise LostProcessError(f"process 0 is not at {host}:{port}: {error}") from error
            time.sleep(0.1)
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(connection, Kind.JOIN, secret + jax.process_index().to_bytes(4, "little"))
        return connection


def _has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
