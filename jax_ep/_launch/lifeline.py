"""What a launched process holds of its launcher: it dies with it, and reports to it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
from typing import Any

_F_SETSIG = getattr(fcntl, "F_SETSIG", 10)  # Linux's number; the fcntl module lacks the name


def hold(spec: dict[str, Any]) -> socket.socket:
    """Binds this process's life to its launcher's; the socket that reaches it."""
    _die_with_launcher(spec["lifeline_fd"])
    os.set_inheritable(spec["lifeline_fd"], False)
    control = socket.socket(fileno=spec["control_fd"])
    control.set_inheritable(False)
    return control


def _die_with_launcher(lifeline_fd: int) -> None:
    """Has the kernel kill this process group when the launcher's end of the pipe closes.

    The signal is delivered without Python, so a process that is stuck in C++ dies too.
    """
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    poller = select.poll()
    poller.register(lifeline_fd, select.POLLHUP)
    if poller.poll(0):  # it went before the lines above
        os._exit(1)
