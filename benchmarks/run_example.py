"""Times the README's main job and the self-test; writes results/example_cpu.json.

    python benchmarks/run_example.py [--steps 500] [--oracle]

The package must be installed. With --oracle the same training with jax.lax only follows, which must
agree with the main job (`--compare`), or this fails; whether the times meet their bounds is for the
reader of the file.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

from run_cpu import HERE, run, stamp

EXAMPLE = HERE.parent / "examples" / "train_moe_lm.py"


def timed(*command):
    begin = time.monotonic()
    text = run([sys.executable, "-m", "jax_ep", *command])
    return time.monotonic() - begin, text


def trained(folder, *options):
    """The example's own results, with the seconds of the whole command."""
    seconds, text = timed("launch", "-n", 4, EXAMPLE, "--out", folder, *options)
    results = json.loads((folder / "results.json").read_text())
    return {
        "command_s": seconds,
        "steps": len(results["losses"]),
        "held_out_nats_per_byte": results["held_out"][-1][1],
        "bigram_nats_per_byte": results["bigram_loss"],
        "tokens_per_s": results["tokens_per_second"],
        "dropped_pairs": sum(results["dropped"]),
    }, text


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    args = parser.parse_args()
    record = stamp()
    record["selftest_s (< 30)"], _ = timed("selftest")
    with tempfile.TemporaryDirectory() as scratch:
        native, oracle = pathlib.Path(scratch, "native"), pathlib.Path(scratch, "oracle")
        steps = ("--steps", args.steps)
        record["main job (about 3 minutes)"], _ = trained(native, *steps)
        if args.oracle:
            compare = ("--oracle", "--compare", native / "results.json")
            record["oracle"], text = trained(oracle, *steps, *compare)
            record["agreement"] = next(line for line in text.splitlines() if "same: " in line)
    args.out.mkdir(exist_ok=True)
    (args.out / "example_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
