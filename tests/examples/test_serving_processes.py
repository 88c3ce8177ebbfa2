"""examples/serve_moe.py as two processes, over HTTP: its texts, the load generator, its ends."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import children
import jax
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from moe_lm import checkpoint
from tiny_world import PROMPTS, SIZE, WINDOW, World

pytestmark = [pytest.mark.multiprocess, pytest.mark.ci]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 120


class Server:
    """The launcher with two serving processes."""

    def __init__(self, model):
        command = [sys.executable, "-m", "jax_ep", "launch", "-n", "2"]
        command += [str(EXAMPLES / "serve_moe.py"), "--model", str(model), "--port", "0"]
        command += ["--slots", "3", "--chunk", "8", "--redundant", "2", "--eplb-every", "7"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**children.quick(), "JAX_PLATFORMS": "cpu"},
        )
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"ready: (http://[^/]*)/", line):
                self.url = found.group(1)
                return
        raise AssertionError("".join(self.lines))

    def complete(self, body):
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    def end(self):
        """(exit code, all that was printed)."""
        rest, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, "".join(self.lines) + rest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved model, and the texts of its requests."""
    folder = tmp_path_factory.mktemp("model")
    world = World(1, "xla")
    asked = [(PROMPTS[number % 5], 20, 0.8, number) for number in range(6)]
    with world.group:
        placed = jax.tree.map(jax.numpy.asarray, (world.dense, world.experts))
        checkpoint.save(folder, checkpoint.Trained(SIZE, WINDOW), *placed)
        texts = world.complete(asked, [0] * len(asked))
    return folder, asked, texts


@pytest.fixture
def server(model):
    server = Server(model[0])
    yield server
    if server.process.poll() is None:
        server.process.terminate()
        server.process.communicate(timeout=LIMIT_S)


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
    parent = server.process.pid
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    environments = {pid: Path(f"/proc/{pid}/environ").read_text() for pid in pids}
    (second,) = (pid for pid, text in environments.items() if '"index": 1,' in text)
    os.kill(int(second), signal.SIGKILL)
    code, text = server.end()
    assert code != 0
    assert re.search(r"process 1|rank 1", text), text


def test_a_port_that_is_taken_ends_all_processes(server, model):
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "jax_ep", "launch", "-n", "2"]
    command += [str(EXAMPLES / "serve_moe.py"), "--model", str(model[0]), "--port", port]
    command += ["--chunk", "8"]
    environment = {**children.quick(), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    assert done.returncode != 0 and "address already in use" in done.stdout + done.stderr
