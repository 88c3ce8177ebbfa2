"""Times what JAX_EP_TRACE costs on CPUs and writes results/trace_cpu.json.

    python benchmarks/run_trace.py [--rounds 15] [--before PYTHON]

--before: a Python whose jax_ep has no trace yet (2fb4c74 brought it): what it costs when off.

A pair of dispatch and combine of 8 tokens (ll), and one of 256 (ht), of two ranks in one process.
Each round runs every setting in a process of its own, one after the other; what counts is the
median of the rounds' ratios. The bound is 2 %. The package must be installed.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

from run_cpu import HERE, run, stamp, worker_result

CALLS = 50  # in a loop on the device
BOUND = 1.02
CASES = {"ll, 8 tokens": ("ll", 8, 60), "ht, 256 tokens": ("ht", 256, 30)}


def worker(mode, tokens, repeats):
    """Prints the quartile of the times of one pair, in us."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ep

    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
    config = jax_ep.Config(
        num_experts=8, top_k=2, hidden=1024, max_tokens=tokens, dtype=jnp.float32, mode=mode
    )
    with jax_ep.create_group(mesh, "ep", config) as group:

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
        times = []
        for _ in range(repeats + 2):
            begin = time.perf_counter()
            jax.block_until_ready(step(x, ids))
            times.append((time.perf_counter() - begin) / CALLS * 1e6)
    print("RESULT " + json.dumps({"us": statistics.quantiles(times[2:], n=4)[0]}))


def measure(name, rounds, before):
    mode, tokens, repeats = CASES[name]
    pythons = ({"before": before} if before else {}) | dict.fromkeys(("off", "on"), sys.executable)
    times = {setting: [] for setting in pythons}
    for _ in range(rounds):
        for setting, python in pythons.items():
            command = [python, __file__, "--worker", mode, str(tokens), str(repeats)]
            with tempfile.TemporaryDirectory() as scratch:
                trace = {"JAX_EP_TRACE": f"{scratch}/run"} if setting == "on" else {}
                text = run(command, {"JAX_PLATFORMS": "cpu", "NPROC": "32"} | trace)
            times[setting].append(worker_result(text)["us"])
    case = {"us": {setting: statistics.median(values) for setting, values in times.items()}}
    case |= _ratio("on over off", times["on"], times["off"])
    return case | (_ratio("off over before", times["off"], times["before"]) if before else {})


def _ratio(name, times, references):
    ratios = [time / reference for time, reference in zip(times, references, strict=True)]
    return {name: statistics.median(ratios), f"{name}, of each round": ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", metavar="PYTHON")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker[0], *map(int, args.worker[1:]))
    cases = {name: measure(name, args.rounds, args.before) for name in CASES}
    record = stamp() | {"bound": BOUND, "cases": cases}
    (args.out / "trace_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, case in record["cases"].items():
        ratios = [f"{key} {value:.4f}" for key, value in case.items() if isinstance(value, float)]
        print(f"{name}: {case['us']['off']:.1f} us off, {', '.join(ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
