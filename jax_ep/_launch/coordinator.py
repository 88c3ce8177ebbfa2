"""JAX's coordination service in a process of its own: ``launch --coordinator``.

Started by ``process.py`` only. It takes part in nothing else, so that every process of the job may
be lost; how they join it is in ``join.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

from jax_ep import _jax_compat
from jax_ep._launch import lifeline
from jax_ep._launch.address import split_address
from jax_ep._launch.process import SPEC_ENV


def _check_free(address: str) -> None:
    """OSError if the service could not listen there: JAX would crash without a word."""
    host, port = split_address(address)
    reasons = []
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
                probe.listen()
            return
        except OSError as error:
            reasons.append(error)
    raise reasons[0]


def main() -> int:
    """Serves until the launcher ends it; returns if it cannot."""
    spec = json.loads(os.environ.pop(SPEC_ENV))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Of a signal to the whole job the processes decide what to do; they need it meanwhile.
        signal.signal(number, signal.SIG_IGN)
    control = lifeline.hold(spec)
    address = spec["bind_address"]
    if not spec["is_reserved"]:
        try:
            _check_free(address)
        except (OSError, ValueError) as error:
            print(
                f"the coordinator cannot listen at {address}: {error}; expected an address of this "
                f"host with a free port: change {spec['named_by']}",
                file=sys.stderr,
            )
            return 1
    service = _jax_compat.start_coordination_service(address, spec["num_processes"])
    with contextlib.suppress(OSError):
        control.send(b"started\n")
    while service:
        signal.pause()  # the launcher's end, or its SIGKILL, ends it
    return 1


if __name__ == "__main__":
    sys.exit(main())
