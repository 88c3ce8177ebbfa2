"""Serves a trained model under load; writes results/serve_MACHINE.json and .png.

    python -m jax_ep launch -n 4 examples/train_moe_lm.py
    python benchmarks/run_serve.py [--gpus N] [--model moe_lm_out/model] [--rates 4 16 32]

On two CPU ranks, or in one process on all of N GPUs. The package must be installed with the extra
`serve`. For each rate examples/serve_load.py asks a server of its own, which shares the cores with
it.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request

from run_cpu import HERE, environment, gpu_names, run, stamp
from specs import file_name_of

EXAMPLES = HERE.parent / "examples"
LIMIT_S = 300


class Server:
    """`launch serve_moe.py`, from its start until it has drained."""

    def __init__(self, model, launch, options):
        command = [sys.executable, "-m", "jax_ep", "launch", *launch, EXAMPLES / "serve_moe.py"]
        command += ["--model", model, "--port", "0", *options]
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, text=True, env=environment()
        )
        for line in self.process.stdout:
            if found := re.search(r"ready: (http://[^/]*)/", line):
                self.url = found.group(1)
                return
        raise SystemExit("the server did not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=LIMIT_S)

    def counters(self):
        with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
            return json.loads(answer.read())


def measure(model, launch, rate, requests, options, folder):
    with Server(model, launch, options) as server:
        command = [sys.executable, EXAMPLES / "serve_load.py", "--url", server.url]
        load = os.getloadavg()[0]
        run([*command, "--rate", rate, "--requests", requests, "--out", folder])
        counters = server.counters()
    steps = counters["steps"]
    return {
        "server_options": [str(word) for word in options],
        "load_before": load,
        **json.loads((folder / "serve_load.json").read_text()),
        "steps": steps,
        "tokens_per_step": counters["tokens"] / steps,
        "step_ms": counters["step_s"] / steps * 1e3,
        "run_ms": counters["run_s"] / steps * 1e3,
        "exchange_ms": counters["exchange_s"] / steps * 1e3,
        "placements": counters["placements"],
        "placement_ms": counters["place_s"] / max(1, counters["placements"]) * 1e3,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=pathlib.Path, default=pathlib.Path("moe_lm_out/model"))
    add("--rates", type=float, nargs="+", default=[4, 16, 32], help="requests per second")
    add("--requests", type=int, default=100)
    add("--gpus", type=int, default=0, help="ranks, in one process (default: two CPU processes)")
    add("--commit", default="")
    add("--out", type=pathlib.Path, default=HERE / "results")
    args = parser.parse_args()
    report = stamp(args.commit or None)
    name, launch = "serve_cpu", ["-n", "2"]
    if args.gpus:
        gpus = f"{args.gpus}x {gpu_names()[0]}"
        report |= {"host": report["machine"], "machine": gpus}
        name = f"serve_{file_name_of(gpus)}"
        launch = ["-n", "1", "--gpus-per-process", args.gpus]
    cases = [(rate, []) for rate in args.rates]
    cases.append((args.rates[len(args.rates) // 2], ["--redundant", "2", "--eplb-every", "100"]))
    report["results"] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        for rate, options in cases:
            result = measure(args.model, launch, rate, args.requests, options, folder)
            report["results"].append(result)
            print(rate, *options, json.dumps(result), flush=True)
            if rate == args.rates[len(args.rates) // 2] and not options:
                shutil.copy(folder / "serve_load.png", args.out / f"{name}.png")
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
