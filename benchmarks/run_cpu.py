"""Runs the CPU benchmarks, prints them against their bounds, writes results/exchange_cpu.*.

    cmake -S . -B build/bench -DJAX_EP_BUILD_PYTHON=OFF -DJAX_EP_BUILD_BENCHMARKS=ON
    cmake --build build/bench && python benchmarks/run_cpu.py --build build/bench

Needs mpirun, mpi4py and mpi4jax for that comparison; without them it says so and goes on.
"""

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def environment(changes=None):
    """This process's, without what tests set for theirs, and with `changes`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    return kept | (changes or {})


def run(command, env=None, timeout=None):
    done = subprocess.run(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(env),
        timeout=timeout,
    )
    if done.returncode != 0:
        raise SystemExit(f"{command} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def gpu_names():
    """Of every GPU of this machine; this process takes none."""
    return run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()


def worker_result(text):
    return json.loads(re.search(r"RESULT (\{.*\})", text).group(1))


def launched(processes, *options, devices=1, bind_to="none"):
    command = [sys.executable, "-m", "jax_ep", "launch", "-n", processes, "--bind-to", bind_to]
    command += ["--devices-per-process", devices, HERE / "exchange_worker.py", *options]
    return worker_result(run(command))


def under_mpi(processes, *options):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", processes]
    command += [sys.executable, HERE / "exchange_worker.py", *options]
    return worker_result(run(command, {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}))


def machine():
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model.group(1) if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def commit():
    """The commit; "-dirty" if the sources differ from it (earlier results do not count)."""
    git = ["git", "-C", HERE]
    changes = run([*git, "status", "--porcelain", "--untracked-files=no", "--", ":/",
                   ":(top,exclude)benchmarks/results"])  # fmt: skip
    return run([*git, "rev-parse", "--short", "HEAD"]).strip() + ("-dirty" if changes else "")


def stamp(of=None):
    """What every results file begins with; `of`: the commit, where there is no repository."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": of or commit(),
    }


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    titles = [("processes", "4 processes"), ("virtual_devices", "1 process, 8 virtual devices")]
    for axis, (key, title) in zip(axes, titles, strict=True):
        medians = results[key]["median_us"]
        names = sorted(medians, key=medians.get)
        colours = ["tab:green" if n == "jax_ep" else "0.6" for n in names]
        axis.barh(names, [medians[n] / 1e3 for n in names], color=colours)
        axis.set_xlabel("ms per dispatch + combine (median, slowest process)")
        axis.set_title(title)
        axis.invert_yaxis()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    args = parser.parse_args()
    results = stamp()
    has_mpi = shutil.which("mpirun") and importlib.util.find_spec("mpi4jax")
    if not has_mpi:
        print("mpi4jax is left out: mpirun or the mpi4jax package is not installed")
    exchange = under_mpi if has_mpi else launched
    results["processes"] = exchange(4, "--spec", "train")
    results["virtual_devices"] = launched(1, "--spec", "train", "--calls", "8", devices=8)
    barrier = [args.build / "benchmarks" / "bench_barrier", "4", "20000"]
    before = json.loads(run(barrier))
    # A scan of 1,000 round trips at a time: one alone would time the start of an execution. Ranks
    # and barrier processes are bound: where three of four share a core both take twice as long.
    ll = ["--spec", "decode", "--mode", "ll", "--calls", "1000", "--repeats", "15"]
    ll += ["--only", "jax_ep"]
    results["ll"] = launched(4, *ll, bind_to="core")
    results["ll, not bound"] = launched(4, *ll)
    after = json.loads(run(barrier))
    results["barrier"] = [before, after]
    results["ring"] = json.loads(run([args.build / "benchmarks" / "bench_ring"]))

    many, one = results["processes"]["median_us"], results["virtual_devices"]["median_us"]
    barrier_us = (before["p50_us"] + after["p50_us"]) / 2
    results["targets"] = {
        "a: x faster than lax.all_to_all, 4 processes (>= 3)": many["lax.all_to_all"]
        / many["jax_ep"],
        "a: x faster than mpi4jax, 4 processes (>= 3)": many.get("mpi4jax", float("nan"))
        / many["jax_ep"],
        "b: x faster than lax.all_to_all, 8 devices (>= 1.5)": one["lax.all_to_all"]
        / one["jax_ep"],
        "c: share of the memcpy ceiling, 4 processes (>= 0.5)": many["memcpy"] / many["jax_ep"],
        "e: LL round trip / futex barrier (<= 3)": results["ll"]["median_us"]["jax_ep"]
        / barrier_us,
    }
    args.out.mkdir(exist_ok=True)
    (args.out / "exchange_cpu.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, args.out / "exchange_cpu.png")
    for name, value in results["targets"].items():
        print(f"{name}: {value:.2f}")
    print(json.dumps(results["ring"]))


if __name__ == "__main__":
    main()
