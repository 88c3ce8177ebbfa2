"""``HOST:PORT``, where JAX's coordination service is reached."""

from __future__ import annotations

import contextlib
import socket


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_host = bool(host) and (is_bracketed or ":" not in host)
    is_port = port.isdecimal() and 0 < int(port) < 1 << 16
    if not (colon and is_host and is_port):
        raise ValueError(f"got {address!r}, expected HOST:PORT, such as node0:7777")
    return host.strip("[]"), int(port)


def answers(address: str, limit_s: float) -> bool:
    """Whether somebody listens there."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(split_address(address), timeout=limit_s),
    ):
        return True
    return False
