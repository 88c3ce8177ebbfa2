"""Times the network path and writes results/network_cpu.json; needs root, for network namespaces.

    python benchmarks/run_network.py BUILD [--rounds 5]

BUILD: a CMake folder with -DJAX_EP_BUILD_BENCHMARKS=ON. Three parts: `jax_ep bench --wire` (put and
signal against a raw libfabric writer and fi_pingpong), what reordering costs, and HT round trips
between two hosts (tests/netns) over ofi against gloo's collectives. The package must be installed.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile

from run_cpu import HERE, run, stamp

PROVIDER = "tcp"
WINDOW_MESSAGES, WINDOW_BYTES = 256, 256 << 20
REORDERED_BYTES = 14336
REORDERINGS = {"off": "seed=1", "8": "seed=1,reorder=8", "64": "seed=1,reorder=64"}
PORT = 7712


def wire(build):
    with tempfile.TemporaryDirectory() as scratch:
        run([sys.executable, "-m", "jax_ep", "bench", "--wire", build, "--transport", "ofi",
             "--provider", PROVIDER, "--out", scratch])  # fmt: skip
        results = json.loads(pathlib.Path(scratch, "wire.json").read_text())["results"]
    medians = {}
    for row in results:
        unit = "us" if row["what"] == "latency" else "gigabytes_per_s"
        sizes = medians.setdefault(f"{row['what']} ({unit})", {})
        values = sizes.setdefault(str(row["bytes"]), {})
        values[row["program"]] = {"median": statistics.median(row["values"]), "all": row["values"]}
    return medians


def reordering(build, rounds):
    """GB/s of ours behind the faulty wrapper, the settings in turn."""
    command = [pathlib.Path(build, "benchmarks", "bench_wire"), "ofi", WINDOW_MESSAGES]
    speeds = {name: [] for name in REORDERINGS}
    for _ in range(rounds):
        for name, spec in REORDERINGS.items():
            text = run([*command, WINDOW_BYTES, spec], {"JAX_EP_OFI_PROVIDER": PROVIDER})
            line = next(
                words
                for words in map(str.split, text.splitlines())
                if words[1:3] == ["bandwidth", str(REORDERED_BYTES)]
            )
            speeds[name].append(float(line[4]))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "bytes": REORDERED_BYTES,
        "gigabytes_per_s": speeds,
        "cost": {name: 1 - medians[name] / medians["off"] for name in ("8", "64")},
    }


def two_hosts(rounds):
    hosts = HERE.parent / "tests" / "netns" / "hosts.py"
    worker = [sys.executable, HERE / "exchange_worker.py", "--repeats", rounds, "--calls", 8]
    text = run([sys.executable, hosts, "-n", 2, "--timeout", 500, "--job", PORT, "--", *worker])
    return json.loads(text.split("RESULT ", 1)[1].splitlines()[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("network namespaces need root")
    record = stamp() | {
        "network": f"{PROVIDER};ofi_rxm on lo, window {WINDOW_MESSAGES} messages",
        "wire": wire(args.build),
        "reordering": reordering(args.build, args.rounds),
        "two hosts, ht, train shape": two_hosts(args.rounds),
    }
    args.out.mkdir(exist_ok=True)
    (args.out / "network_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
