"""How process 0 tells the others what the next step is, and gets their bytes: TCP, small frames.

A collective of XLA's would do, too, but it hangs when a process has died; here a dead process is an
error with its number, and every wait is bounded.  Frames are (kind, number of bytes) and the bytes.
Whoever connects must know a secret that JAX's own broadcast has given to all processes of the job.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Collection

import jax
import numpy as np
from jax.experimental import multihost_utils

HEADER = struct.Struct("<II")
SECRET_BYTES = 32
JOIN_LIMIT_S = 60.0
REPLY_LIMIT_S = 120.0
IDLE_S = 2.0  # process 0 says at least this often that it is there
SILENCE_LIMIT_S = 60.0  # of process 0, before the others give up
MAX_FRAME = 1 << 28


class Kind(enum.IntEnum):
    """What a frame is about."""

    JOIN = 0  # from a process: its number, behind the secret
    IDLE = 1  # nothing to do
    STEP = 2  # the rows of a step; answered by the bytes of the process's ranks
    STOP = 3  # no more steps
    LOAD = 4  # answered by the load of the experts, u32[layers, E], since the last time
    PLACE = 5  # i32[layers, P], the expert in each slot, from the next step on
    FAILED = 6  # answers a step that has failed, with the error's text
    AGREE = 7  # i32 (steps, number): go on with the processes that live, as after so many steps;
    # answered by its number when it is done


class LostProcessError(RuntimeError):
    """Another process of the job has gone or is silent."""


class FailedStepError(RuntimeError):
    """A step has failed on another process; says why."""


def _send(connection: socket.socket, kind: Kind, payload: bytes = b"") -> None:
    connection.sendall(HEADER.pack(kind, len(payload)) + payload)


def _receive_bytes(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("its connection is closed")
        parts += part
    return bytes(parts)


def _receive(connection: socket.socket) -> tuple[Kind, bytes]:
    kind, size = HEADER.unpack(_receive_bytes(connection, HEADER.size))
    if size > MAX_FRAME:
        raise ConnectionError(f"its frame of {size} bytes is none of ours")
    return Kind(kind), _receive_bytes(connection, size)


class Hub:
    """Process 0's end.

    Args:
        host: name or address of process 0's host, at which the others reach it.
        reply_limit_s: for an answer, after process 0 has done the same step itself.
    """

    def __init__(self, host: str, reply_limit_s: float = REPLY_LIMIT_S) -> None:
        self._others: dict[int, socket.socket] = {}
        self._reply_limit_s = reply_limit_s
        secret = secrets.token_bytes(SECRET_BYTES)
        with socket.create_server((host, 0)) as server:
            _share(server.getsockname()[1], secret)
            limit = time.monotonic() + JOIN_LIMIT_S
            while len(self._others) < jax.process_count() - 1:
                server.settimeout(max(0.01, limit - time.monotonic()))
                try:
                    self._admit(server.accept()[0], secret)
                except TimeoutError:
                    missing = set(range(1, jax.process_count())) - self._others.keys()
                    raise LostProcessError(
                        f"processes {sorted(missing)} have not joined within {JOIN_LIMIT_S:g} s"
                    ) from None

    def _admit(self, connection: socket.socket, secret: bytes) -> None:
        """Takes a process that knows the secret; a stranger is closed at once."""
        connection.settimeout(5.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            header = _receive_bytes(connection, HEADER.size)
            if header != HEADER.pack(Kind.JOIN, SECRET_BYTES + 4):
                raise ConnectionError("no process of this job")
            payload = _receive_bytes(connection, SECRET_BYTES + 4)
            if not hmac.compare_digest(payload[:SECRET_BYTES], secret):
                raise ConnectionError("no process of this job")
        except OSError:
            connection.close()
            return
        connection.settimeout(self._reply_limit_s)
        self._others[int.from_bytes(payload[SECRET_BYTES:], "little")] = connection

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame to every other process that can be reached; raises if one cannot."""
        lost = None
        for process, connection in list(self._others.items()):
            try:
                _send(connection, kind, payload)
            except OSError as error:
                lost = self._lose(process, error)
        if lost is not None:
            raise lost

    def collect(self, kind: Kind, number: int | None = None) -> dict[int, np.ndarray]:
        """{process: i32 words of its answer of that kind}; answers before that are skipped.

        Args:
            kind: of the answers.
            number: which the answer has as its first word. Answers come in order, so none that was
                asked for before is left behind it.

        Raises:
            LostProcessError: a process has gone, or did not answer in time.
            FailedStepError: it answers that a step, of which this asks, has failed.
        """
        answers = {}
        for process, connection in list(self._others.items()):
            found, words = None, np.empty(0, np.int32)
            while found != kind or (number is not None and words[:1] != number):
                try:
                    found, payload = _receive(connection)
                except OSError as error:
                    raise self._lose(process, error) from error
                if found == Kind.FAILED and kind == Kind.STEP:
                    raise FailedStepError(f"process {process}: {payload.decode(errors='replace')}")
                if found == kind:
                    words = np.frombuffer(payload, np.int32)
            answers[process] = words
        return answers

    def forget(self, processes: Collection[int]) -> None:
        """Ends the connections to these, if there are any: they take part no more."""
        for process in processes:
            if connection := self._others.pop(process, None):
                connection.close()

    def _lose(self, process: int, error: OSError) -> LostProcessError:
        """Ends its connection, of which half a frame may have been read."""
        self.forget([process])
        return LostProcessError(f"process {process} is lost: {error}")

    def close(self) -> None:
        """Ends all connections."""
        for connection in self._others.values():
            connection.close()


class Member:
    """The end of every other process."""

    def __init__(self, host: str) -> None:
        port, secret = _share(0, bytes(SECRET_BYTES))
        self._connection = socket.create_connection((host, port), timeout=JOIN_LIMIT_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.settimeout(SILENCE_LIMIT_S)
        _send(self._connection, Kind.JOIN, secret + jax.process_index().to_bytes(4, "little"))

    def receive(self) -> tuple[Kind, bytes]:
        """What process 0 says next."""
        try:
            return _receive(self._connection)
        except OSError as error:
            raise LostProcessError(f"process 0 is lost: {error}") from error

    def answer(self, kind: Kind, payload: bytes | np.ndarray = b"") -> None:
        """Gives process 0 what it asked for; arrays are i32."""
        try:
            _send(self._connection, kind, bytes(payload))
        except OSError as error:
            raise LostProcessError(f"process 0 is lost: {error}") from error

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def _share(port: int, secret: bytes) -> tuple[int, bytes]:
    """Process 0's port and secret, on every process; collective."""
    words = np.frombuffer(port.to_bytes(4, "little") + secret, np.uint8).astype(np.int32)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(words)).astype(np.uint8).tobytes()
    return int.from_bytes(shared[:4], "little"), shared[4:]
