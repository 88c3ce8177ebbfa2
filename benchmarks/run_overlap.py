"""What overlap hides: value_and_grad of MoE layers with Config.overlap off and on.

    python benchmarks/run_overlap.py [--ranks N] [--tokens T] [--rounds R]

Writes results/overlap_MACHINE.json. One process, all GPUs or the first N. The layers, of
DeepSeek-V3's shape with 128 experts for each rank at most, are

    plain     moe(): dispatch, grouped_ffn, combine
    shared    the same and a shared expert of 4 experts' width, tied by jax_ep.overlap
    chunks=N  moe(chunks=N, overlap=True)

"outside" is a layer's time less that of its products alone, which run on as many rows in the same
round; "saved" what a variant takes less than the synchronous layer in the same round, "hidden" its
share of the synchronous layer's outside. Medians of these over rounds. All variants
of a layer must give the same bits. Spans of a traced step of each are kept and drawn.
"""

import argparse
import dataclasses
import functools
import glob
import json
import pathlib
import tempfile
import time

import gpu_layer_worker as worker
import jax
import jax.numpy as jnp
import moe_layers
import numpy as np
import plots
from run_cpu import HERE, stamp
from specs import SPECS, machine

import jax_ep

MOST_EXPERTS = 128  # of a rank
VARIANTS = {"synchronous": False, "overlap": True}


def plain(group, experts):
    def layer(params, x, ids, gates):
        return jax_ep.moe(group, x, ids, gates, experts, params["routed"])

    return layer


def chunked(chunks, group, experts):
    def layer(params, x, ids, gates):
        return jax_ep.moe(
            group, x, ids, gates, experts, params["routed"], chunks=chunks, overlap=True
        )

    return layer


def shared(group, experts):
    def layer(params, x, ids, gates):
        gate, up, down = params["shared"]
        x, routed = jax_ep.overlap_gradients(x, params["routed"])
        recv = jax_ep.dispatch(group, x, ids, gates)
        recv, hidden = jax_ep.overlap(recv, jax.nn.silu(x @ gate) * (x @ up))
        y, hidden = jax_ep.overlap(experts(routed, recv.x, recv.group_sizes), hidden)
        out, beside = jax_ep.overlap(jax_ep.combine(group, y, recv), hidden @ down)
        return out + beside

    return layer


LAYERS = {
    "plain": plain,
    "shared": shared,
    "chunks=2": functools.partial(chunked, 2),
}


def step_of(case, layer):
    def local(params, x, ids, gates):
        def loss(params, x, gates):
            # What stands before a layer in a model, so that the host is ahead of the GPU.
            before = x[0] @ params["before"] @ params["before"]
            out = layer(params, before, ids[0], gates[0])
            return 0.5 * jnp.sum(out.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(params, x, gates)
        return value[None], grads

    axis = moe_layers.AXIS
    spec = jax.P(axis)
    params = {"routed": spec, "shared": jax.P(), "before": jax.P()}
    mapped = jax.shard_map(
        local,
        mesh=case.mesh,
        in_specs=(params, spec, spec, spec),
        out_specs=(spec, (params, spec, spec)),
        check_vma=False,
    )
    return jax.jit(mapped)


def products_of(case, is_shared):
    """The layer's products alone, forward and backward, on as many rows."""
    rows_program, (kernels, rows, g, counts) = case.gemms(worker.FFN["grouped_ffn"])

    def local(params, x, g):
        def ffn(params, x):
            x = x @ params["before"] @ params["before"]
            if is_shared:
                gate, up, down = params["shared"]
                x = (jax.nn.silu(x @ gate) * (x @ up)) @ down
            return x

        y, pull = jax.vjp(ffn, params, x[0])
        d_params, d_x = pull(g[0])
        return y[None], d_x[None], d_params

    spec = jax.P(moe_layers.AXIS)
    beside = jax.jit(
        jax.shard_map(
            local,
            mesh=case.mesh,
            in_specs=(jax.P(), spec, spec),
            out_specs=(spec, spec, jax.P()),
            check_vma=False,
        )
    )

    def run(params, x):
        dense = {name: params[name] for name in ("before", "shared")}
        return beside(dense, x, x), rows_program(kernels, rows, g, counts)

    return run


def digest(results):
    """A number that differs if any bit does, but for sums that agree by chance."""

    def of(array):
        words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{array.dtype.itemsize * 8}"))
        return jnp.sum(words.astype(jnp.uint32) * jnp.uint32(2654435761), dtype=jnp.uint32)

    return [
        int(value) for value in jax.device_get(jax.tree.map(jax.jit(of), jax.tree.leaves(results)))
    ]


def times_of(calls, rounds):
    """{name: us of each round}; every call once a round, in changing order.

    Compared round by round: a GPU at its power limit changes its clock from second to second.
    """
    names, us = list(calls), {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            if number:  # the first warms up
                us[name].append((time.perf_counter() - start) * 1e6)
    return {name: np.array(values) for name, values in us.items()}


def spans_of(call):
    """[[lane, start us, length us, kernel], ...] of one traced run on the first GPU."""
    folder = tempfile.mkdtemp()
    with jax.profiler.trace(folder):
        jax.block_until_ready(call())
    (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
    spans = []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        if not plane.name.endswith("GPU:0"):
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                lane = "exchange" if "jax_ep::gpu" in event.name else "rest"
                spans.append([lane, event.start_ns / 1e3, event.duration_ns / 1e3, event.name[:60]])
    first = min((span[1] for span in spans), default=0)
    return [
        [lane, round(at - first, 1), round(us, 1), name]
        for lane, at, us, name in sorted(spans, key=lambda s: s[1])
    ]


def report_of(spec_name, ranks, options):
    """One shape: {layer: times}."""
    spec = SPECS[spec_name]
    spec = dataclasses.replace(spec, num_experts=min(spec.num_experts, MOST_EXPERTS * ranks))
    SPECS[spec_name] = spec
    case = worker.Case(
        argparse.Namespace(
            spec=spec_name, ranks=ranks, routing="uniform", tokens=options.tokens, align=16
        )
    )

    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape, case.dtype) * shape[0] ** -0.5

    hidden, width = spec.hidden, 4 * spec.expert_hidden
    params = {
        "before": normal(8, hidden, hidden),
        "routed": case.kernels,
        "shared": [normal(9, hidden, width), normal(10, hidden, width), normal(11, width, hidden)],
    }
    experts = worker.experts_of(worker.FFN["grouped_ffn"])
    config = dataclasses.replace(case.config, recv_rows=None, capacity_factor=1.25)
    groups = {
        name: jax_ep.create_group(
            case.mesh, moe_layers.AXIS, dataclasses.replace(config, overlap=overlap)
        )
        for name, overlap in VARIANTS.items()
    }
    arrays = (params, case.x, *case.routing)
    layers = {}
    for name in options.layers:
        calls = {}
        for variant, group in groups.items():
            step = step_of(case, LAYERS[name](group, experts)).lower(*arrays).compile()
            calls[variant] = functools.partial(step, *arrays)
        bits = {variant: digest(call()) for variant, call in calls.items()}
        assert len(set(map(tuple, bits.values()))) == 1, f"{name}: variants differ: {bits}"
        products = functools.partial(products_of(case, name == "shared"), params, case.x)
        times = times_of({"products": products} | calls, options.rounds)
        outside = float(np.median(times["synchronous"] - times["products"]))
        saved = float(np.median(times["synchronous"] - times["overlap"]))
        layers[name] = {
            "us": {each: round(float(np.median(us))) for each, us in times.items()},
            "outside_us": round(outside),
            "saved_us": round(saved),
            "hidden": round(saved / outside, 3),
        }
        print(spec_name, name, json.dumps(layers[name]), flush=True)
        if name == "shared":
            layers[name]["spans"] = {variant: spans_of(call) for variant, call in calls.items()}
    for group in groups.values():
        group.close()
    return layers


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="0: every device")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS))
    parser.add_argument("--specs", nargs="+", default=["deepseek-v3", "qwen3-30b"])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--commit", help="where there is no repository")
    options = parser.parse_args()
    ranks = options.ranks or jax.device_count()
    report = stamp(options.commit) | {
        "machine": machine(ranks)["machine"],
        "jax": jax.__version__,
        "program": f"run_overlap.py, {options.tokens} tokens a rank, {options.rounds} rounds",
        "specs": {name: report_of(name, ranks, options) for name in options.specs},
    }
    kind = jax.devices()[0].device_kind.split()[-1].lower()
    path = options.out / f"overlap_{ranks}x{kind}.json"
    path.write_text(json.dumps(report) + "\n")
    plots.overlap(report, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
