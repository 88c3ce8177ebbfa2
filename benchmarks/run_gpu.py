"""Runs the GPU benchmarks on this machine and writes results/gpu.json and a plot.

    python benchmarks/run_gpu.py [--commit HASH] [--copy-engine-gb-s RATE]

Everything is inside jit, one process, all GPUs. RATE is what tests/kernels_gpu/bench_kernels
measured for the copy engines' all-to-all just before, the bound of the figures.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys

import jax

HERE = pathlib.Path(__file__).parent
CASES = {
    "ht": ["--tokens", "1024", "4096", "8192"],
    "ht zipf": ["--routing", "zipf", "--methods", "jax_ep", "all_gather"],
    "ht qwen3-235b": ["--spec", "qwen3-235b", "--methods", "jax_ep", "dense", "all_gather"],
    "ll": ["--mode", "ll", "--tokens", "8", "32", "128", "--methods", "jax_ep", "dense"],
}


def run(arguments, limit_s):
    """The RESULT lines of one worker."""
    command = [sys.executable, str(HERE / "gpu_worker.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s)
    results = [
        json.loads(line.removeprefix("RESULT "))
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    if done.returncode != 0:
        print(f"{arguments} ended with {done.returncode}: {len(results)} results", flush=True)
    return results


def rates(result, bound_gb_s):
    """Wire GB/s of our calls, and the least time that the bound allows."""
    wire = result["remote_bytes_per_rank"]
    ours = result["us"]["jax_ep"]
    figures = {f"{name}_wire_gb_s": wire / ours[name] / 1e3 for name in ("dispatch", "combine")}
    if bound_gb_s:
        figures["floor_us"] = wire / bound_gb_s / 1e3
    return figures


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [(f"{r['spec']} {r['mode']} {r['routing']}\nT={r['tokens']}", r["us"]) for r in results]
    names = sorted({name for _, us in bars for name in us})
    figure, axes = plt.subplots(figsize=(2 + 1.3 * len(bars), 5))
    for i, name in enumerate(names):
        heights = [
            us[name]["dispatch"] + us[name]["combine"] if name in us else 0 for _, us in bars
        ]
        axes.bar([x + i / (len(names) + 1) for x in range(len(bars))], heights, 0.2, label=name)
    axes.set_xticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("dispatch + combine, us (lower is better)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="")
    parser.add_argument("--copy-engine-gb-s", type=float, default=0.0, help="bound of the same run")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one case")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    args = parser.parse_args()
    commit = (
        args.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    )
    results = [result for name in args.only for result in run(CASES[name], args.limit)]
    for result in results:
        result |= rates(result, args.copy_engine_gb_s)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{jax.device_count()}x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "commit": commit,
        "copy_engine_gb_s": args.copy_engine_gb_s,
        "results": results,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(results, args.out / "gpu.png")
    for result in results:
        times = {n: {k: round(v, 1) for k, v in us.items()} for n, us in result["us"].items()}
        case = (result["spec"], result["mode"], result["routing"], result["tokens"])
        print(*case, times, flush=True)


if __name__ == "__main__":
    main()
