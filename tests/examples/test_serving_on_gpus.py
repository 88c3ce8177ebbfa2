"""examples/serve_moe.py on this machine's GPUs: its texts, what XLA replays, a lost process."""

from __future__ import annotations

import concurrent.futures
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("prometheus_client")

from serving import LIMIT_S, Server
from tiny_world import PROMPTS, SIZE, World

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

# Experts of lost ranks are on others: with 2 ranks each holds all of them.
REDUNDANT = ("--redundant", str(SIZE.num_experts))
BODIES = [
    {"prompt": PROMPTS[n % 5].decode(), "max_tokens": 80, "temperature": 0.8, "seed": n}
    for n in range(6)
]


def num_gpus() -> int:
    """At most 4; skips where there are not two."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 GPUs, JAX sees 1")
    return min(4, len(jax.devices()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a saved model."""
    num_gpus()
    folder = tmp_path_factory.mktemp("model")
    world = World(1, "xla")
    with world.group:
        world.save(folder)
    return folder


@pytest.fixture
def start(model: pathlib.Path) -> Iterator[Callable[..., Server]]:
    """Starts a server with options, and ends it."""
    started: list[Server] = []

    def run(*options: str, processes: int, launch: tuple[str, ...] = ()) -> Server:
        # A process that is started again compiles alone.
        environment = {"XLA_FLAGS": "--xla_gpu_shard_autotuning=false"}
        each = ("--gpus-per-process", str(num_gpus() // processes))
        server = Server(
            model, *options, processes=processes, launch=each + launch, environment=environment
        )
        started.append(server)
        return server

    yield run
    for server in started:
        server.close()


def texts_of(server: Server) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(server.complete, BODIES))


def stop(server: Server) -> str:
    """Ends it in good order; what it printed."""
    server.process.send_signal(signal.SIGTERM)
    code, text = server.end()
    assert code == 0, text
    return text


def test_texts_are_those_of_the_oracle(start: Callable[..., Server]) -> None:
    """Both have the same steps, hence the same products: all bits are equal."""
    oracle = start("--oracle", processes=1)
    expected = [oracle.complete(body) for body in BODIES]
    stop(oracle)
    server = start(processes=1)
    assert [server.complete(body) for body in BODIES] == expected
    stop(server)


def test_decode_steps_are_replayed_from_command_buffers(start: Callable[..., Server]) -> None:
    """Of a decoding step's operations, the host gives none to the GPU: XLA has captured them."""
    server = start("--eplb-every", "1000", processes=1)
    texts_of(server)
    first = server.metrics()
    text = server.complete({**BODIES[0], "max_tokens": 100})
    last = server.metrics()
    grown = {name: last[name] - first[name] for name in last if name.startswith("jax_ep_")}
    launches, combines = grown["jax_ep_launches_total"], grown["jax_ep_combines_total"]
    print(f"{len(text)} tokens: {combines} combines, {launches} operations launched by the host")
    steps_and_ranks = 100 * num_gpus()
    assert combines >= SIZE.layers * steps_and_ranks
    # Prefill is a branch: a step with a chunk, and what XLA runs before it captures.
    assert launches < 0.2 * combines
    stop(server)


def test_a_killed_process_is_left_out_and_comes_back(start: Callable[..., Server]) -> None:
    """Texts stay what they were without it, and after its return."""
    processes = num_gpus()
    server = start(
        *("--elastic", "--peer-timeout-s", "5", *REDUNDANT),
        processes=processes,
        launch=("--hide-other-gpus", "--restarts", "1", "--coordinator"),
    )
    wanted = texts_of(server)
    with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as pool:
        answers = [pool.submit(server.stream, body) for body in BODIES]
        time.sleep(0.05)
        killed_at = server.send_signal(processes - 1, signal.SIGKILL)
        arrivals: list[float] = []
        got: list[str] = []
        for answer in answers:
            parts: list[tuple[float, Any]] = answer.result(LIMIT_S)
            got.append("".join(text for _, text in parts))
            arrivals += [at for at, _ in parts]
    assert got == wanted
    gap = np.max(np.diff(sorted([killed_at, *(at for at in arrivals if at > killed_at)])))
    print(f"{gap:.2f} s without a byte")
    while server.health()["returned_processes"] == 0:
        assert time.monotonic() < killed_at + LIMIT_S, server.health()
        assert texts_of(server) == wanted
    print(f"back after {time.monotonic() - killed_at:.1f} s")
    assert texts_of(server) == wanted
    health = server.health()
    assert health["lost_processes"] == 1 and health["status"] == "ok"
    assert "is back" in stop(server)
