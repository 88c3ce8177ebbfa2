"""What process 0 and the others say to each other over TCP: (kind, number of bytes), the bytes."""

from __future__ import annotations

import enum
import socket
import struct

HEADER = struct.Struct("<II")
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
    WELCOME = 8  # the same to a process that was started again, which takes part from here on;
    # answered by AGREE


class LostProcessError(RuntimeError):
    """Another process of the job has gone or is silent."""


def send(connection: socket.socket, kind: Kind, payload: bytes = b"") -> None:
    """Sends a frame."""
    connection.sendall(HEADER.pack(kind, len(payload)) + payload)


def receive_bytes(connection: socket.socket, count: int) -> bytes:
    """That many; ConnectionError if the other end closes before."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("its connection is closed")
        parts += part
    return bytes(parts)


def receive(connection: socket.socket) -> tuple[Kind, bytes]:
    """The next frame."""
    kind, size = HEADER.unpack(receive_bytes(connection, HEADER.size))
    if size > MAX_FRAME:
        raise ConnectionError(f"its frame of {size} bytes is none of ours")
    return Kind(kind), receive_bytes(connection, size)
