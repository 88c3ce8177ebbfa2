"""Passes file descriptors between the processes of one host, over unix sockets.

Memory of a GPU travels between processes as descriptors only, which need SCM_RIGHTS. Addresses are
abstract (nothing to clean up) and reach the peers through the bootstrap. They are no secret: every
user of the host can list them. So both sides ask the kernel who the other one is, and give and take
descriptors only between processes of the same user that the group knows by pid.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence

MAX_DESCRIPTORS = 250  # in one message: the kernel's SCM_MAX_FD is 253
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


@contextlib.contextmanager
def serve(descriptors: Sequence[int], pids: Collection[int]) -> Iterator[str]:
    """Gives `descriptors` to the processes `pids` of this user until the block ends.

    Yields the address for `fetch`. Others are hung up on.

    Raises:
        ValueError: more descriptors than one message carries.
    """
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(
            f"got {len(descriptors)} descriptors, expected at most {MAX_DESCRIPTORS}; use more "
            "processes with fewer devices each"
        )
    address = f"jax_ep-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        stopping = threading.Event()

        def accept() -> None:
            listener.settimeout(0.1)
            while not stopping.is_set():
                with contextlib.suppress(OSError):  # a timeout, or a peer that left
                    connection, _ = listener.accept()
                    with connection:
                        if _stranger(connection, pids) is None:
                            socket.send_fds(connection, [bytes([len(descriptors)])], descriptors)

        thread = threading.Thread(target=accept, name="jax_ep-descriptors", daemon=True)
        thread.start()
        try:
            yield address
        finally:
            stopping.set()
            thread.join()


def fetch(address: str, pid: int, timeout_s: float) -> list[int]:
    """The descriptors that process `pid` of this user serves at `address`; the caller closes them.

    Raises:
        TimeoutError: the server did not answer within `timeout_s`.
        PermissionError: somebody else serves there, or the server does not know this process.
        OSError: it is gone, or sent something else.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{address}")
        if stranger := _stranger(connection, (pid,)):
            raise PermissionError(f"{address} is served by {stranger}, expected process {pid}")
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        message, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_DESCRIPTORS)
    if not message:
        raise PermissionError(f"process {pid} gives no descriptors to this process ({os.getpid()})")
    if len(message) != 1 or message[0] != len(descriptors):
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(f"got {len(descriptors)} descriptors from {address}, expected {message!r}")
    return list(descriptors)


def _stranger(connection: socket.socket, pids: Collection[int]) -> str | None:
    """Who is at the other end, unless it is one of `pids` of this user."""
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return None if user == os.geteuid() and pid in pids else f"process {pid} of user {user}"
