"""Many processes of one create_group call as threads, over a real coordination service of JAX's."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from jax._src.lib import _jax

from jax_ep import _jax_compat
from jax_ep._runtime import bootstrap


@contextlib.contextmanager
def service() -> Iterator[Any]:
    """A client of a coordination service that ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    server = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0, init_timeout=30)
    client.connect()
    try:
        yield client
    finally:
        client.shutdown()
        server.shutdown()


class CountingClient:
    """The client of one process: what it asks for, and the bytes that it gets."""

    def __init__(self, client: Any):
        self._client = client
        self.requests = 0
        self.bytes_read = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*arguments: Any) -> Any:
            self.requests += 1
            result = method(*arguments)
            if name == "key_value_dir_get_bytes":
                self.bytes_read += sum(len(key) + len(value) for key, value in result)
            elif isinstance(result, bytes):
                self.bytes_read += len(result)
            return result

        return call


@dataclasses.dataclass
class Process:
    """One simulated process: what it did, and how it ended."""

    exchange: bootstrap.Exchange
    client: CountingClient
    result: Any = None
    error: str = ""  # "TypeOfError: its words"
    seconds: float = 0.0


def make(client: Any, count: int, timeout_s: float) -> list[Process]:
    """The processes of the next call of create_group on `count` devices, one each."""
    devices = [SimpleNamespace(platform="sim", id=i, process_index=i) for i in range(count)]
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for me in range(count):
            own = CountingClient(client)
            patch.setattr(_jax_compat, "distributed_client", lambda own=own: own)
            exchange = bootstrap.Exchange(devices, me)
            exchange.timeout_s = timeout_s
            made.append(Process(exchange, own))
    return made


def run(processes: list[Process], program: Callable[[bootstrap.Exchange], Any]) -> None:
    """Runs `program` in all at once. Like create_group, it tells the others of an error.

    A SystemExit is a death: nobody is told.
    """

    def main(process: Process) -> None:
        start = time.monotonic()
        try:
            process.result = program(process.exchange)
        except SystemExit:
            process.error = "dead"
        except Exception as error:
            process.exchange.fail(error)
            process.error = f"{type(error).__name__}: {error}"
        process.seconds = time.monotonic() - start

    before = threading.stack_size(512 << 10)
    threads = [threading.Thread(target=main, args=(process,)) for process in processes]
    threading.stack_size(before)
    # A thread that waits for the interpreter asks for it each 5 ms: a thousand of them take more of
    # two cores by that than by the rounds.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.1)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
