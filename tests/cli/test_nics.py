"""`python -m jax_ep info --nics`: what it names, with and without RDMA in the kernel."""

import socket
import subprocess
import sys


def test_info_lists_interfaces_and_network_transports():
    command = [sys.executable, "-m", "jax_ep", "info", "--nics"]
    before = set(socket.if_nameindex())
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for _, name in before & set(socket.if_nameindex()):  # others may come and go meanwhile
        assert name in done.stdout
    for word in ("RDMA ports", "libfabric providers", "ofi", "verbs"):
        assert word in done.stdout
