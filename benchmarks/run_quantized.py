"""Dispatch through a network in FP8 against dtype: 4 processes, each a node of its own.

    python benchmarks/run_quantized.py

Writes results/quantized_cpu.json. The programs take turns; a time is that of the slowest process,
and quantising and dequantising are part of it. The rows cross libfabric on this host.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from run_cpu import HERE, run, stamp
from specs import SPECS

import jax_ep

CALLS = 4  # in one program
WIRES = {"dtype": None, "fp8": jax_ep.FP8(), "fp8-ue8m0": jax_ep.FP8(scale="ue8m0")}
KEPT = "fp8, kept"  # as dispatch_quantized delivers it


def measure(repeats):
    """What each dispatch takes and sends, as rank 0 reports it."""
    jax_ep.initialize()
    spec = SPECS["train"]
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    rng = np.random.default_rng(0)
    tokens = mesh.size * spec.tokens
    ids = np.stack([rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(tokens)])
    rows = rng.standard_normal((tokens, spec.hidden))

    def shard(array):
        sharding = NamedSharding(mesh, P("ep"))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    programs, groups = {}, {}
    for dtype in ("float32", "bfloat16"):
        x = shard(rows.astype(dtype))
        for name, wire in (*WIRES.items(), (KEPT, WIRES["fp8"])):
            config = jax_ep.Config(
                num_experts=spec.num_experts,
                top_k=spec.top_k,
                hidden=spec.hidden,
                max_tokens=spec.tokens,
                capacity_factor=spec.capacity_factor,
                align=8,
                dtype=dtype,
                mode="ht",
                node_size=1,
                transport="ofi",
                wire=wire,
            )
            group = jax_ep.create_group(mesh, "ep", config)
            kept = name == KEPT
            dispatch = jax_ep.dispatch_quantized if kept else jax_ep.dispatch

            def calls(x, ids, group=group, dispatch=dispatch, kept=kept):
                plan = jax_ep.plan(group, ids)

                def call(x, _):
                    recv = jax.lax.optimization_barrier(dispatch(group, x, plan=plan).x)
                    first = recv.values[0].astype(x.dtype) if kept else recv[0]
                    return x.at[0].set(first), None

                return jax.lax.scan(call, x, length=CALLS)[0]

            mapped = jax.shard_map(calls, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
            programs[dtype, name] = (jax.jit(mapped), x, shard(ids.astype(np.int32)))
            groups[dtype, name] = group

    times = {key: [] for key in programs}
    for repeat in range(repeats + 1):
        for key, (program, *arguments) in programs.items():
            multihost_utils.sync_global_devices("start")
            begin = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            if repeat:  # the first one compiles
                times[key].append((time.perf_counter() - begin) / CALLS * 1e3)
    results = []
    for (dtype, wire), mine in times.items():
        slowest = np.max(multihost_utils.process_allgather(np.array(mine)), axis=0)
        ranks = groups[dtype, wire].stats()["ranks"]
        sent = sum(rank["bytes_sent_internode"] for rank in ranks) / CALLS / (repeats + 1)
        results.append(
            {
                "dtype": dtype,
                "wire": wire,
                "dispatch_ms": float(np.median(slowest)),
                "times_ms": slowest.tolist(),
                "sent_mb": sent / 1e6,
            }
        )
    for result in results:
        plain = next(r for r in results if (r["dtype"], r["wire"]) == (result["dtype"], "dtype"))
        pairs = zip(result["times_ms"], plain["times_ms"], strict=True)
        result["time_ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)
        result["bytes_ratio"] = result["sent_mb"] / plain["sent_mb"]
    for group in groups.values():
        group.close()
    return results


def main():
    """Starts the processes and writes the file; as one of them, measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "quantized_cpu.json")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    if not options.measure:
        worker = [str(HERE / "run_quantized.py"), "--measure", "--out", str(out)]
        worker += ["--repeats", str(options.repeats)]
        print(run([sys.executable, "-m", "jax_ep", "launch", "-n", 4, *worker]))
        return
    results = measure(options.repeats)
    if jax.process_index():
        return
    report = stamp() | {
        "what": "dispatch of the train shape (specs.py), 4 processes as 4 nodes, transport ofi",
        "results": results,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    for result in results:
        print(
            f"{result['dtype']} {result['wire']}: {result['dispatch_ms']:.1f} ms, "
            f"{result['time_ratio']:.2f} of dtype's; {result['sent_mb']:.1f} MB, "
            f"{result['bytes_ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
