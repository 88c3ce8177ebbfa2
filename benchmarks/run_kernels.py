"""Runs the benchmarks of the GPU kernels without JAX; writes results/kernels_*_MACHINE.json.

    python benchmarks/run_kernels.py BUILD [--only PART...] [--ranks N] [--commit HASH]

BUILD is a CMake build folder with -DJAX_EP_GPU=cuda -DJAX_EP_BUILD_TESTS=ON. Every mode, layout,
routing, shape and size on all GPUs of this machine, or the first N. A file is written when all of
its runs are done, and takes the place of an older one.
"""

import argparse
import datetime
import json
import pathlib
import re
import tempfile

from run_cpu import HERE, commit, gpu_names, run
from specs import SPECS, file_name_of

LIMIT_S = 120  # of one program
BY_NEED = 0
OPERATIONS = ("dispatch", "combine")
RANK_MAJOR = 2  # as kernels/layout.h numbers the layouts
PROGRAMS = {
    "ht": "bench_kernels: graphs of 20 calls, events, median of 9 launches of the slowest rank; "
    "sms 0: by need",
    "ll": "bench_ll: graphs of 40 calls, median of 11 launches of the slowest rank; us, "
    "DeepSeek-V3 shape, padding undefined; all SMs but 32",
    "quantized": "bench_fp8: SMs by need, DeepSeek-V3 shape",
    "nodes": "bench_kernels nodes=2 rings=1; bound: network bytes of a rank at the least of what "
    "kernels store and load and threads copy",
    "cuda": "bench_kernels nodes=2 cuda=1, bench_ll nodes=2 with and without cuda; bound: network "
    "bytes of a rank at the copy engines' rate",
}
LL_LINE = re.compile(
    r"(rank_major )?tokens (\d+): .* dispatch ([\d.]+) us .* combine ([\d.]+) us .* both ([\d.]+) "
    r"us; start\+done: dispatch ([\d.]+) us combine ([\d.]+) us"
)
LL_TIMES = (
    "dispatch",
    "combine",
    "dispatch_then_combine",
    "dispatch_start_and_done",
    "combine_start_and_done",
)
FP8_LINE = re.compile(
    r"(.*): bf16 ([\d.]+) us .* fp8 to bf16 ([\d.]+) us .* fp8 values and scales ([\d.]+) us"
)


class Build:
    """The programs of a build folder, on some GPUs."""

    def __init__(self, folder, ranks):
        self.programs = folder / "tests" / "kernels_gpu"
        names = gpu_names()
        self.ranks = ranks or len(names)
        self.machine = f"{self.ranks}x {names[0]}"
        shown = ",".join(map(str, range(self.ranks)))
        self.environment = {"CUDA_VISIBLE_DEVICES": shown}

    def run(self, program, *options):
        command = [self.programs / program, *options]
        return run(command, env=self.environment, timeout=LIMIT_S)

    def kernels(self, **options):
        """(copy engines' GB/s, runs) of bench_kernels."""
        words = [f"{name}={value}" for name, value in options.items()]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "out.json"
            self.run("bench_kernels", path, *words)
            report = json.loads(path.read_text())
        return report["copy_engine_gb_per_s"], report["runs"]


def ht_cases():
    """Options of bench_kernels, one dict for each start."""
    default = SPECS["deepseek-v3"].tokens
    for name in ("deepseek-v3", "qwen3-235b", "qwen3-30b"):
        spec = SPECS[name]
        shape = {"hidden": spec.hidden, "topk": spec.top_k, "experts": spec.num_experts}
        for zipf in (0, 1):
            for layout in (0, RANK_MAJOR):
                for tokens in (1024, default, 8192, 16384):
                    if tokens != default and (layout or name != "deepseek-v3"):
                        continue
                    sms = f"{BY_NEED},24,64" if tokens == default else f"{BY_NEED},24"
                    routed = {"zipf": zipf, "layout": layout, "tokens": tokens}
                    yield shape | routed | {"sms": sms}


def ht(build):
    engines, runs = [], []
    for options in ht_cases():
        rate, timed = build.kernels(**options)
        engines.append(rate)
        runs += map(named, timed)
    return {"copy_engine_gb_per_s": engines[0], "runs": runs}


def named(timed):
    """A run of bench_kernels, with words for its numbers of layout and routing."""
    unused = {"nodes", "cuda", "rings", "tma", "piece", "slots", "zipf", "network_bytes"}
    kept = {
        name: value
        for name, value in timed.items()
        if name not in unused and not name.startswith("host_")
    }
    kept["layout"] = "rank_major" if timed["layout"] == RANK_MAJOR else "expert_major"
    kept["routing"] = "zipf" if timed["zipf"] else "uniform"
    if timed["layout"] == RANK_MAJOR:  # weights are the caller's: no backward of its own
        del kept["backward_us"]
    return kept


def timed_ll(build, *options):
    """A run of bench_ll: {operation: {tokens: us}}."""
    layout = "rank_major" if "rank_major" in options else "expert_batched"
    times = {}
    for line in build.run("bench_ll", *options).splitlines():
        _, tokens, *us = LL_LINE.match(line).groups()
        times[tokens] = dict(zip(LL_TIMES, map(float, us), strict=True))
    by_name = {name: {tokens: each[name] for tokens, each in times.items()} for name in LL_TIMES}
    return {"ranks": build.ranks, "layout": layout, **by_name}


def ll(build):
    return {"runs": [timed_ll(build, *options) for options in ([], ["rank_major"])]}


def quantized(build):
    runs = []
    for options in (["ht", "ll"], ["ll", "tokens=32"]):
        for line in build.run("bench_fp8", *options).splitlines()[1:]:  # the first says how
            case, *us = FP8_LINE.match(line).groups()
            names = ("bf16_us", "fp8_to_bf16_us", "fp8_values_and_scales_us")
            runs.append({"case": case, **dict(zip(names, map(float, us), strict=True))})
    return {"runs": runs}


def nodes(build):
    _, runs = build.kernels(nodes=2, rings=1, sms=BY_NEED)
    for timed in runs:
        rate = min(timed[f"host_{name}_gb_per_s"] for name in ("stores", "loads", "copies"))
        timed["bound_us"] = round(timed["network_bytes"] / rate / 1e3, 1)
        for name in OPERATIONS:
            timed[f"{name}_share"] = round(timed["bound_us"] / timed[f"{name}_us"], 3)
    return {"runs": runs}


def cuda(build):
    runs = []
    for layout in (0, RANK_MAJOR):
        engines, (timed,) = build.kernels(nodes=2, cuda=1, sms=BY_NEED, layout=layout)
        bound_us = timed["network_bytes"] / engines / 1e3
        shares = {f"{op}_share": round(bound_us / timed[f"{op}_us"], 3) for op in OPERATIONS}
        runs.append({**named(timed), "bound_us": round(bound_us, 1), **shares})
    ways = {"cuda": ["cuda"], "loopback": []}
    decode = {way: timed_ll(build, "nodes=2", *words, "8", "128") for way, words in ways.items()}
    return {"copy_engine_gb_per_s": engines, "runs": runs, "ll": decode}


PARTS = {"ht": ht, "ll": ll, "quantized": quantized, "nodes": nodes, "cuda": cuda}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("build", type=pathlib.Path, metavar="BUILD")
    add("--only", nargs="+", default=list(PARTS), choices=list(PARTS))
    add("--ranks", type=int, default=0, help="0: one for each GPU")
    add("--commit", default="")
    add("--out", type=pathlib.Path, default=HERE / "results")
    args = parser.parse_args()
    build = Build(args.build, args.ranks)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        report = {
            "date": datetime.date.today().isoformat(),
            "machine": build.machine,
            "commit": args.commit or commit(),
            "program": f"tests/kernels_gpu/{PROGRAMS[name]}",
            **PARTS[name](build),
        }
        path = args.out / f"kernels_{name}_{file_name_of(build.machine)}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(path, flush=True)


if __name__ == "__main__":
    main()
