"""Passes file descriptors between the processes of one host, over unix sockets.

Memory of a GPU travels between processes as descriptors only, which need SCM_RIGHTS. Addresses are
abstract (nothing to clean up) and unguessable; they reach the peers through the bootstrap.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence

MAX_DESCRIPTORS = 250  # in one message: the kernel's SCM_MAX_FD is 253


@contextlib.contextmanager
def serve(descriptors: Sequence[int]) -> Iterator[str]:
    """Gives `descriptors` to whoever knows the address (yielded) until the block ends.

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
                        socket.send_fds(connection, [bytes([len(descriptors)])], descriptors)

        thread = threading.Thread(target=accept, name="jax_ep-descriptors", daemon=True)
        thread.start()
        try:
            yield address
        finally:
            stopping.set()
            thread.join()


def fetch(address: str, timeout_s: float) -> list[int]:
    """The descriptors served at `address`; the caller closes them.

    Raises:
        TimeoutError: the server did not answer within `timeout_s`.
        OSError: it is gone, or sent something else.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{address}")
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        message, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_DESCRIPTORS)
    if len(message) != 1 or message[0] != len(descriptors):
        raise OSError(f"got {len(descriptors)} descriptors from {address}, expected {message!r}")
    return list(descriptors)
