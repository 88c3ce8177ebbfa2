"""How process 0 tells the others what the next step is, and gets their bytes: TCP, small frames.

A collective of XLA's would do, too, but it hangs when a process has died; here a dead process is an
error with its number, and every wait is bounded.
"""

from __future__ import annotations

import socket
from collections.abc import Collection

import jax
import numpy as np

from moe_serve import frames
from moe_serve.door import JOIN_LIMIT_S, Door, knock
from moe_serve.frames import Kind, LostProcessError

REPLY_LIMIT_S = 120.0
IDLE_S = 2.0  # process 0 says at least this often that it is there
SILENCE_LIMIT_S = 60.0  # of process 0, before the others give up


class FailedStepError(RuntimeError):
    """A step has failed on another process; says why."""


class Hub:
    """Process 0's end; made when all others have come.

    Args:
        host: name or address of process 0's host, at which the others reach it.
        reply_limit_s: for an answer, after process 0 has done the same step itself.
    """

    def __init__(self, host: str, reply_limit_s: float = REPLY_LIMIT_S) -> None:
        self._others: dict[int, socket.socket] = {}
        self._reply_limit_s = reply_limit_s
        others = range(1, jax.process_count())
        self._door = Door(host) if others else None
        if self._door is not None:
            try:
                self._door.wait_for(others)
            except LostProcessError:
                self.close()
                raise
        for process in others:
            self.take(process)

    def waiting(self) -> list[int]:
        """Processes that were started again, and are ready to be taken back."""
        return [] if self._door is None else self._door.waiting()

    def take(self, process: int) -> None:
        """From now on one that waits is spoken to; its first answer may come late."""
        assert self._door is not None
        connection = self._door.take(process)
        connection.settimeout(max(JOIN_LIMIT_S, self._reply_limit_s))
        self.forget([process])  # an older life of it
        self._others[process] = connection

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame to every other process that can be reached; raises if one cannot."""
        lost = None
        for process in list(self._others):
            try:
                self.tell(process, kind, payload)
            except LostProcessError as error:
                lost = error
        if lost is not None:
            raise lost

    def tell(self, process: int, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame to one process; raises if that cannot be reached."""
        try:
            frames.send(self._others[process], kind, payload)
        except OSError as error:
            raise self._lose(process, error) from error

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
                    found, payload = frames.receive(connection)
                except OSError as error:
                    raise self._lose(process, error) from error
                if found == Kind.FAILED and kind == Kind.STEP:
                    raise FailedStepError(f"process {process}: {payload.decode(errors='replace')}")
                if found == kind:
                    words = np.frombuffer(payload, np.int32)
            connection.settimeout(self._reply_limit_s)
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
        """Ends all connections, and takes no more. Idempotent."""
        if self._door is not None:
            self._door.close()
        self.forget(list(self._others))


class Member:
    """The end of every other process.

    Args:
        host: process 0's.
    """

    def __init__(self, host: str) -> None:
        self._connection = knock(host)
        self._connection.settimeout(SILENCE_LIMIT_S)

    def receive(self) -> tuple[Kind, bytes]:
        """What process 0 says next."""
        try:
            return frames.receive(self._connection)
        except OSError as error:
            raise LostProcessError(f"process 0 is lost: {error}") from error

    def answer(self, kind: Kind, payload: bytes | np.ndarray = b"") -> None:
        """Gives process 0 what it asked for; arrays are i32."""
        try:
            frames.send(self._connection, kind, bytes(payload))
        except OSError as error:
            raise LostProcessError(f"process 0 is lost: {error}") from error

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
