"""Runs the GPU benchmarks on this machine's GPUs; writes results/exchange_MACHINE.json and layer_*.

    python benchmarks/run_gpu.py [--ranks N] [--only CASE...] [--tokens T...] [--methods M...]
                                 [--commit HASH]

Everything is inside jit, one process, all GPUs or the first N. Files and plots are named as
benchmarks/README.md says and written after every result. A run replaces the cases that it measures
and keeps the others, so the benchmarks can be run in parts; each result names its commits. Results
of another jax are dropped. With --copy-engine-gb-s RATE (what bench_kernels of tests/kernels_gpu
measured for the copy engines' all-to-all just before), the least times that RATE allows are added.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import threading

import plots
from specs import file_name_of

HERE = pathlib.Path(__file__).parent
SIZES = {"ht": ["1024", "4096", "8192", "16384"], "ll": ["1", "8", "32", "128", "512"]}
# XLA's own kernel for one host is the default; this takes NCCL's sends and receives instead. The
# second flag is new in jax 0.11, which refuses without it.
RAGGED_BY_NCCL = (
    "--xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=false "
    "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true"
)
# What a decoder does too: a short call's launches would cost more than the call.
CAPTURED = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL,WHILE "
    "--xla_gpu_graph_min_graph_size=1"
)
FLAGS = {"ht": "", "ll": CAPTURED}
SMS = int(os.environ.get("JAX_EP_GPU_SMS", 0))  # 0: each call chooses
EXCHANGE, LAYER = "gpu_worker.py", "gpu_layer_worker.py"


def exchange_cases():
    """{name: (worker, arguments, XLA flags)}: every mode, shape and routing."""
    cases = {}
    for mode, tokens in SIZES.items():
        for spec in ("deepseek-v3", "qwen3-235b", "qwen3-30b"):
            for routing in ("uniform", "zipf"):
                name = f"{mode} {spec} {routing}"
                what = ["--mode", mode, "--spec", spec, "--routing", routing, "--tokens", *tokens]
                cases[name] = EXCHANGE, what, FLAGS[mode]
                ragged = ["--methods", "ragged", "--ragged-name", "ragged_nccl", *what]
                flags = f"{FLAGS[mode]} {RAGGED_BY_NCCL}".strip()
                cases[f"{name} ragged_nccl"] = EXCHANGE, ragged, flags
    return cases


CASES = exchange_cases() | {
    "layer uniform": (LAYER, ["--tokens", "8192"], ""),
    "layer zipf": (LAYER, ["--routing", "zipf", "--tokens", "8192"], ""),
}
DEFAULT = list(CASES)
# Where ragged_all_to_all does not exist, as on CPU: shows that the programs run.
WITHOUT_RAGGED = ["--spec", "smoke", "--tokens", "32", "--methods", "jax_ep", "all_gather"]
CASES |= {
    "smoke": (EXCHANGE, [*WITHOUT_RAGGED, "dense", "--calls", "3"], ""),
    "layer smoke": (LAYER, [*WITHOUT_RAGGED, "all_to_all", "--rounds", "3"], ""),
}


def run(name, tokens, methods, ranks, limit_s):
    """Yields the results of a case as they come, also of one that does not come to its end."""
    worker, arguments, flags = CASES[name]
    command = [sys.executable, "-u", str(HERE / worker), *arguments, "--ranks", str(ranks)]
    if tokens:
        command += ["--tokens", *tokens]
    if methods and "--methods" not in arguments:
        command += ["--methods", *methods]
    env = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    timer = threading.Timer(limit_s, worker.kill)
    timer.start()
    for line in worker.stdout:
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
            methods = dict.fromkeys(result["us"], env["XLA_FLAGS"])
            yield {**result, "sms": SMS, "xla_flags": methods}
    if worker.wait() != 0:
        print(f"{name} ended with {worker.returncode}", flush=True)
    timer.cancel()


def add_rates(result, bound_gb_s):
    """Wire GB/s of our calls, and the least time that the bound allows."""
    if "jax_ep" not in result["us"]:
        return
    wire, ours = result["remote_bytes_per_rank"], result["us"]["jax_ep"]
    for name in ("dispatch", "combine"):
        result[f"{name}_wire_gb_s"] = wire / ours[name] / 1e3
    if bound_gb_s:
        result["floor_us"] = wire / bound_gb_s / 1e3


def key_of(result):
    """What must be alike for a result to take another's place."""
    case = tuple(result.get(name) for name in ("spec", "mode", "routing", "tokens", "ranks", "sms"))
    # Methods of a layer share the time of the experts' products, which differs between runs.
    return (*case, *sorted(result["us"])) if "gemms_us" in result else case


def merge(results, new):
    """Puts `new` among the results: beside other methods of the same case, or in their place."""
    for result in results:
        if key_of(result) == key_of(new):
            for name, value in new.items():
                result[name] = {**result[name], **value} if isinstance(value, dict) else value
            return
    results.append(new)


class Report:
    """One file of results, and its plot; begun with the first result, which names the machine."""

    def __init__(self, args, benchmark, plot):
        self.args, self.benchmark, self.plot = args, benchmark, plot
        self.header, self.results = {}, []

    def begin(self, machine):
        self.header = {
            "date": datetime.date.today().isoformat(),
            **machine,
            "commit": self.args.commit or commit_here(),
            "copy_engine_gb_s": self.args.copy_engine_gb_s,
        }
        self.args.out.mkdir(parents=True, exist_ok=True)
        self.path = self.args.out / f"{self.benchmark}_{file_name_of(machine['machine'])}.json"
        if self.path.exists():
            old = json.loads(self.path.read_text())
            if all(old.get(name) == self.header[name] for name in ("machine", "jax")):
                self.results = old["results"]

    def add(self, result):
        machine = result.pop("machine")
        if not self.header:
            self.begin(machine)
        result["commits"] = dict.fromkeys(result["us"], self.header["commit"])
        merge(self.results, result)
        text = json.dumps({**self.header, "results": self.results}, indent=1)
        self.path.write_text(text + "\n")

    def draw(self):
        if self.results:
            self.plot(self.results, self.path.with_suffix(".png"))


def commit_here():
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--commit", default="")
    add("--copy-engine-gb-s", type=float, default=0.0, help="bound of the same run")
    add("--only", nargs="+", default=DEFAULT, choices=list(CASES), metavar="CASE")
    add("--tokens", nargs="+", help="in place of each case's own")
    add("--methods", nargs="+", help="some of each case's own, as its program calls them")
    add("--ranks", type=int, default=0, help="0: every GPU")
    add("--limit", type=float, default=600.0, help="seconds of one case")
    add("--out", type=pathlib.Path, default=HERE / "results")
    args = parser.parse_args()
    reports = {
        EXCHANGE: Report(args, "exchange", plots.exchanges),
        LAYER: Report(args, "layer", plots.layers),
    }
    for case in args.only:
        report = reports[CASES[case][0]]
        for result in run(case, args.tokens, args.methods, args.ranks, args.limit):
            if report is reports[EXCHANGE]:
                add_rates(result, args.copy_engine_gb_s)
            report.add(result)
            print(*key_of(result), json.dumps(result["us"]), flush=True)
    for report in reports.values():
        report.draw()


if __name__ == "__main__":
    main()
