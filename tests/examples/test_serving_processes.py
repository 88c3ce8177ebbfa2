"""examples/serve_moe.py as processes, over HTTP: its texts, load, ends, and lost processes."""

import concurrent.futures
import itertools
import json
import re
import signal
import subprocess
import sys
import time

import children
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from serving import EXAMPLES, LIMIT_S, ON_CPUS, Server
from tiny_world import PROMPTS, World

pytestmark = [pytest.mark.multiprocess, pytest.mark.ci]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved model, and the texts of its requests."""
    folder = tmp_path_factory.mktemp("model")
    world = World(1, "xla")
    asked = [(PROMPTS[number % 5], 20, 0.8, number) for number in range(6)]
    with world.group:
        world.save(folder)
        texts = world.complete(asked, [0] * len(asked))
    return folder, asked, texts


@pytest.fixture
def start(model):
    """Starts a server with options, and ends it."""
    started = []

    def run(*options, **more):
        started.append(Server(model[0], *options, **more))
        return started[-1]

    yield run
    for server in started:
        server.close()


@pytest.fixture
def server(start):
    return start("--eplb-every", "7")


def test_texts_load_and_sigterm(server, model, tmp_path):
    _, asked, texts = model
    for (prompt, max_tokens, temperature, seed), text in zip(asked, texts, strict=True):
        body = {"prompt": prompt.decode(), "max_tokens": max_tokens, "seed": seed}
        written = text[max(1, len(prompt)) :]
        expected = written.decode(errors="replace")
        assert server.complete(body | {"temperature": temperature}) == expected
    command = [sys.executable, str(EXAMPLES / "serve_load.py"), "--url", server.url]
    command += ["--requests", "12", "--rate", "50", "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=children.quick()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "serve_load.json").read_text())
    assert figures["answered"] == 12 and figures["tokens_per_s"] > 0
    for name in ("first_token_ms", "per_token_ms"):
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]
    assert (tmp_path / "serve_load.png").stat().st_size > 10_000
    server.process.send_signal(signal.SIGTERM)
    code, text = server.end()
    assert code == 0, text
    assert re.search(r"\d+ tokens in \d+ steps of", text)
    assert int(re.search(r"experts were placed (\d+) times", text).group(1)) > 10


def test_a_killed_process_ends_the_server_with_its_name(server, model):
    server.complete({"prompt": "def ", "max_tokens": 3})
    server.send_signal(1, signal.SIGKILL)
    code, text = server.end()
    assert code != 0
    assert re.search(r"process 1|rank 1", text), text


PEER_TIMEOUT_S = 3.0
# Beyond the silence of a lost process: 2 s to agree, as tests/chaos/elastic.py allows; 2 s to place
# the experts and to prefill, on cores that all processes share with sixteen clients.
GAP_S = PEER_TIMEOUT_S + 2.0 + 2.0


def test_streams_go_on_without_lost_processes(start):
    """One of three is killed, one is stopped for ever, while sixteen clients read."""
    options = ("--elastic", "--peer-timeout-s", str(PEER_TIMEOUT_S))
    server = start(*options, processes=3)  # 6 slots for 4 experts: two ranks have room for all
    bodies = [
        {"prompt": PROMPTS[n % 5].decode(), "max_tokens": 150, "temperature": 0.8, "seed": n}
        for n in range(16)
    ]

    def ask_all(pool):
        return [pool.submit(server.stream, body) for body in bodies]

    def texts(answers):
        return ["".join(text for _, text in answer.result(LIMIT_S)) for answer in answers]

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        wanted = texts(ask_all(pool))
        written = server.health()["tokens"]
        for lost, how in ((2, signal.SIGKILL), (1, signal.SIGSTOP)):
            begun = server.health()["tokens"]
            answers = ask_all(pool)
            limit = time.monotonic() + LIMIT_S
            while server.health()["tokens"] < begun + written // 3:
                assert time.monotonic() < limit, server.health()
                time.sleep(0.01)
            lost_at = server.send_signal(lost, how)
            got = texts(answers)
            parts = [part for answer in answers for part in answer.result()]
            arrivals = sorted(at for at, _ in parts if at > lost_at)
            assert len(arrivals) > 200
            gap = max(b - a for a, b in itertools.pairwise([lost_at, *arrivals]))
            print(f"{how.name} of process {lost}: {gap:.2f} s without a byte")
            assert gap < GAP_S
            assert got == wanted if how == signal.SIGKILL else all(got)
        health = server.health()
        assert "jax_ep_healthy" in server.metrics()
    assert health["status"] == "ok" and health["lost_processes"] == 2
    server.process.send_signal(signal.SIGTERM)
    code, text = server.end()
    print(text)
    assert code == 0
    assert re.search(r"lost process 2 .* 2 of 3 ranks go on.* 0 experts of each layer", text)
    assert re.search(r"lost process 1 .* 1 of 3 ranks go on.* 2 experts of each layer", text)
    assert f"processes lost: 2, requests moved: {health['moved_requests']}" in text
    assert health["moved_requests"] >= 2


def test_a_process_that_is_started_again_serves_again(start):
    """Killed twice while clients read; each time it comes back, and has requests again.

    Texts are those of the undisturbed server throughout, and no survivor compiles.
    """
    options = ("--elastic", "--peer-timeout-s", str(PEER_TIMEOUT_S))
    server = start(*options, processes=3, launch=("--restarts", "2", "--coordinator"))
    bodies = [
        {"prompt": PROMPTS[n % 5].decode(), "max_tokens": 80, "temperature": 0.8, "seed": n}
        for n in range(9)  # as many as there are slots
    ]

    def ask_all(pool):
        return [pool.submit(server.stream, body) for body in bodies]

    def texts(answers):
        return ["".join(text for _, text in answer.result(LIMIT_S)) for answer in answers]

    def wait_for(**counts):
        limit = time.monotonic() + LIMIT_S
        while not counts.items() <= server.health().items():
            assert time.monotonic() < limit, server.health()
            time.sleep(0.02)
        return time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        wanted = texts(ask_all(pool))
        for kills in (1, 2):
            answers = ask_all(pool)
            wait_for(running=len(bodies))
            killed_at = server.send_signal(2, signal.SIGKILL)
            assert texts(answers) == wanted
            lost_after = wait_for(lost_processes=kills) - killed_at
            arrivals = [at for answer in answers for at, _ in answer.result() if at > killed_at]
            while server.health()["returned_processes"] < kills:  # and streams go on
                answers = ask_all(pool)
                assert texts(answers) == wanted
                arrivals += [at for answer in answers for at, _ in answer.result()]
                assert time.monotonic() < killed_at + LIMIT_S
            gap = max(b - a for a, b in itertools.pairwise([killed_at, *sorted(arrivals)]))
            assert gap < GAP_S
            back_after = time.monotonic() - killed_at
            print(f"noticed by {lost_after:.2f} s, back by {back_after:.2f} s, gap {gap:.2f} s")
            # All slots are needed at once: its own, too.
            answers = ask_all(pool)
            wait_for(running=len(bodies), waiting=0)
            assert texts(answers) == wanted
        health = server.health()
    assert health["status"] == "ok" and health["lost_processes"] == 2
    server.process.send_signal(signal.SIGTERM)
    code, text = server.end()
    assert code == 0, text
    assert len(re.findall(r"Compiling jit\(_step\)", text)) == 3 + 2  # in each life of a process
    assert text.count("process 2 (ranks [2]) is back: 3 of 3 ranks go on") == 2
    assert "processes that came back: 2" in text


def test_without_the_front_end_the_server_ends_and_nobody_waits_for_it(start):
    """Also where the launcher starts all processes again: none is left that could go on."""
    options = ("--elastic", "--peer-timeout-s", str(PEER_TIMEOUT_S))
    server = start(*options, processes=3, launch=("--restarts", "1", "--coordinator"))
    server.complete({"prompt": "def ", "max_tokens": 3})
    server.send_signal(0, signal.SIGKILL)
    code, text = server.end()
    assert code != 0
    assert "process 0 is lost" in text, text
    assert "none of those that could take it back has given a sign of life" in text, text


def test_a_port_that_is_taken_ends_all_processes(server, model):
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "jax_ep", "launch", "-n", "2"]
    command += [str(EXAMPLES / "serve_moe.py"), "--model", str(model[0]), "--port", port]
    command += ["--chunk", "8"]
    environment = children.quick() | ON_CPUS
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    assert done.returncode != 0 and "address already in use" in done.stdout + done.stderr
