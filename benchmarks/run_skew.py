"""Runs the workloads of skews.py without and with EPLB; writes results/skew_MACHINE.json and .png.

    python benchmarks/run_skew.py [--gpus] [worker's options]

On CPUs two processes, each bound to a core of its own: more ranks than cores would hide that one of
them has more to do than the others. With --gpus one process has all GPUs, and the spec is
deepseek-v3. The package must be installed.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import plots
from run_cpu import HERE, environment, stamp
from specs import file_name_of

CPU = ["-m", "jax_ep", "launch", "-n", "2", "--bind-to", "core"]


def results_of(command):
    """The worker's lines as they come."""
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    for line in worker.stdout:
        _, is_result, text = line.partition("RESULT ")
        if is_result:
            yield json.loads(text)
    if worker.wait() != 0:
        raise SystemExit(f"{command} ended with {worker.returncode}")


def add_ratios(results):
    """A workload's layer over the balanced one without EPLB."""
    balanced = next(r["us"]["plain"]["layer"] for r in results if r["workload"] == "balanced")
    for result in results:
        result["layer_over_balanced"] = {
            side: us["layer"] / balanced for side, us in result["us"].items()
        }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    options, others = parser.parse_known_args()
    start = [sys.executable, "-u"] if options.gpus else [sys.executable, *CPU]
    spec = ["--spec", "deepseek-v3"] if options.gpus else []
    header = stamp(options.commit or None)
    results = []
    for result in results_of([*start, str(HERE / "skew_worker.py"), *spec, *others]):
        kind = result.pop("machine")
        print(result["workload"], json.dumps(result["us"]), result["busiest_rank"], flush=True)
        results.append(result)
    if options.gpus:
        header |= {"host": header["machine"], **kind}
    header["load_after"] = os.getloadavg()[0]
    add_ratios(results)
    name = file_name_of(kind["machine"]) if options.gpus else "cpu"
    path = options.out / f"skew_{name}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**header, "results": results}, indent=1) + "\n")
    plots.skews(results, path.with_suffix(".png"))
    for result in results:
        ratios = result["layer_over_balanced"]
        print(f"{result['workload']:24s} {ratios['plain']:.2f}, with EPLB {ratios['eplb']:.2f}")


if __name__ == "__main__":
    main()
