"""Times what JAX_EP_TRACE costs on CPUs and writes results/trace_cpu.json.

    python benchmarks/run_trace.py [--rounds 15]

A pair of dispatch and combine of 8 tokens (ll), and one of 256 (ht), of two ranks in one process.
On and off are two groups of one process, whose calls take turns: the machine is then the same for
both. Each round is a process, and every other one makes the traced group first. What counts is the
median of the rounds' ratios; the bound is 2 %.
The package must be installed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

from run_cpu import HERE, run, stamp, worker_result

CALLS = 50  # in a loop on the device
BOUND = 1.02
CASES = {"ll, 8 tokens": ("ll", 8, 200), "ht, 256 tokens": ("ht", 256, 60)}


def worker(mode, tokens, turns, settings):
    """Prints the quartile of the times of one pair under each of the settings, in us."""
    import jax
    import numpy as np

    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
    times = {setting: [] for setting in settings}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        steps = {}
        for setting in settings:
            os.environ.pop("JAX_EP_TRACE", None)
            if setting == "on":
                os.environ["JAX_EP_TRACE"] = f"{folder}/run"
            steps[setting] = calls_of_a_group(stack, mesh, mode, tokens)
        for turn in range(turns + 2):
            for setting, step in steps.items():
                begin = time.perf_counter()
                step()
                if turn >= 2:
                    times[setting].append((time.perf_counter() - begin) / CALLS * 1e6)
    quartiles = {setting: statistics.quantiles(us, n=4)[0] for setting, us in times.items()}
    print("RESULT " + json.dumps(quartiles))


def calls_of_a_group(stack, mesh, mode, tokens):
    """A function that makes CALLS pairs of calls of a group, which lives as long as the stack."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ep

    config = jax_ep.Config(
        num_experts=8, top_k=2, hidden=1024, max_tokens=tokens, dtype=jnp.float32, mode=mode
    )
    group = stack.enter_context(jax_ep.create_group(mesh, "ep", config))

    def pair(_, x, ids):
        recv = jax_ep.dispatch(group, x, ids)
        return jax_ep.combine(group, recv.x, recv) * 0.5

    def calls(x, ids):
        return jax.lax.fori_loop(0, CALLS, lambda i, x: pair(i, x, ids), x)

    step = jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    rng = np.random.default_rng(0)
    sharding = NamedSharding(mesh, P("ep"))
    x = jax.device_put(rng.standard_normal((2 * tokens, 1024), np.float32), sharding)
    ids = jax.device_put(rng.integers(0, 8, (2 * tokens, 2)).astype(np.int32), sharding)
    return lambda: jax.block_until_ready(step(x, ids))


def quartiles(name, settings):
    """One process: {setting: us}."""
    mode, tokens, turns = CASES[name]
    worker_arguments = [mode, str(tokens), str(turns), ",".join(settings)]
    command = [sys.executable, __file__, "--worker", *worker_arguments]
    return worker_result(run(command, {"JAX_PLATFORMS": "cpu", "NPROC": "32"}))


def measure(name, rounds):
    pairs = [quartiles(name, ("on", "off") if i % 2 else ("off", "on")) for i in range(rounds)]
    ratios = [us["on"] / us["off"] for us in pairs]
    return {
        "us": {key: statistics.median(us[key] for us in pairs) for key in ("off", "on")},
        "on over off": statistics.median(ratios),
        "on over off, of each round": ratios,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        mode, tokens, turns, settings = args.worker
        return worker(mode, int(tokens), int(turns), settings.split(","))
    cases = {name: measure(name, args.rounds) for name in CASES}
    record = stamp() | {"bound": BOUND, "cases": cases}
    (args.out / "trace_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, case in record["cases"].items():
        print(f"{name}: {case['us']['off']:.1f} us off, on over off {case['on over off']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
