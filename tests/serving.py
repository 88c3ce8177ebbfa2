"""examples/serve_moe.py as processes, for tests that talk to it over HTTP."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import children

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LIMIT_S = 120
ON_CPUS = {"JAX_PLATFORMS": "cpu"}


class Server:
    """The launcher with serving processes; its options come before those of the example.

    `environment` goes on top of a user's; without it the ranks are CPU devices.
    """

    def __init__(self, model, *options, processes=2, launch=(), environment=None):
        command = [sys.executable, "-m", "jax_ep", "launch", "-n", str(processes), *launch]
        command += ["--grace", "5"] + ["--keep-going"] * ("--elastic" in options)
        command += [str(EXAMPLES / "serve_moe.py"), "--model", str(model), "--port", "0"]
        command += ["--slots", "3", "--chunk", "8", "--redundant", "2", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=children.quick() | (environment or ON_CPUS) | {"JAX_LOG_COMPILES": "1"},
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

    def stream(self, body):
        """[(time of arrival, text)] of the parts of an answer."""
        data = json.dumps(body | {"stream": True}).encode()
        request, parts = urllib.request.Request(f"{self.url}/v1/completions", data), []
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
                    parts.append((time.monotonic(), choice["text"]))
        return parts

    def health(self):
        with urllib.request.urlopen(f"{self.url}/health", timeout=LIMIT_S) as answer:
            return json.loads(answer.read())

    def metrics(self):
        """{metric: sum over its labels}, as Prometheus reads them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
        sums = {}
        for line in lines:
            if not line.startswith("#"):
                name, value = re.split(r"[{ ]", line)[0], float(line.rpartition(" ")[2])
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def send_signal(self, index, number):
        """Sends it to a process; when that was."""
        parent = self.process.pid
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            try:
                environment = Path(f"/proc/{pid}/environ").read_text()
            except ProcessLookupError:  # one that was killed before
                continue
            if f'"index": {index},' in environment:
                os.kill(int(pid), number)
                return time.monotonic()
        raise AssertionError(f"no process {index} among the launcher's")

    def close(self):
        """Ends it, unless it has ended."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate(timeout=LIMIT_S)

    def end(self):
        """(exit code, all that was printed)."""
        rest, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, "".join(self.lines) + rest
