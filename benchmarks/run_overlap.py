"""What overlap hides: value_and_grad of MoE layers with Config.overlap off and on.

    python benchmarks/run_overlap.py [--ranks N] [--tokens T] [--rounds R] [--seconds S]

Writes results/overlap_MACHINE.json. One process, all GPUs or the first N. The layers, with 128
experts for each rank at most, are

    plain     moe(): dispatch, grouped_ffn, combine
    shared    the same and a shared expert of 4 experts' width, tied by jax_ep.overlap
    chunks=2  moe(chunks=2, overlap=True)

and each runs as

    synchronous      in order; chunks=2: without chunks
    in order         chunks=2 alone: its chunks without asynchronous calls
    overlap          Config.overlap=True
    copy engines     the same over transport="cuda", each GPU a node of its own: copy engines move
                     the rows, kernels put them into place
    all_gather       of all tokens, and psum_scatter of the sums, which XLA may overlap as it can
    all_gather, LHS  the same under XLA's latency-hiding scheduler

"outside" is the synchronous layer's time less that of its products alone, which run on as many rows
in the same round; "saved" what overlap takes less than each of the others in the same round, and
"hidden" what it saves of outside. Medians of these over rounds. The variants with jax_ep must give
the same bits (chunks: their gradients are other sums), the others the same layer. Spans of a traced
step of the shared layers are kept and drawn. No round begins after --seconds, but for three.
"""

import argparse
import concurrent.futures
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
from overlap_layers import LAYERS, variants_of
from run_cpu import HERE, stamp
from specs import SPECS, file_name_of, machine

import jax_ep

MOST_EXPERTS = 128  # of a rank
FEWEST_ROUNDS = 3


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


def times_of(calls, rounds, deadline):
    """{name: us of each round}; every call once a round, in changing order.

    Compared round by round: a GPU at its power limit changes its clock from second to second.
    """
    names, us = list(calls), {name: [] for name in calls}
    for number in range(rounds + 1):
        if number > FEWEST_ROUNDS and time.perf_counter() > deadline:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            if number:  # the first warms up
                us[name].append((time.perf_counter() - start) * 1e6)
    return {name: np.array(values) for name, values in us.items()}


def distance(got, wanted):
    """|got - wanted| / |wanted|; what a layer does not use has gradients of zero."""
    if not (jnp.any(got) or jnp.any(wanted)):
        return 0.0
    return float(worker.distance(got, wanted))


def check_same(name, calls):
    """Raises unless all variants are one layer; how far each is from the first.

    The loss, the first result, is compared as a number only: XLA fuses its sum with what makes the
    layer's output, so variants may add in other orders.
    """
    # The sum of a node of several ranks is rounded, so other nodes may give other bits.
    others = ("all_gather", "all_gather, LHS", "copy engines")
    digests = {variant: digest(calls[variant]())[1:] for variant in calls if variant not in others}
    exact = {v: d for v, d in digests.items() if name != "chunks=2" or v != "synchronous"}
    assert len(set(map(tuple, exact.values()))) == 1, f"{name}: variants differ: {exact}"
    expected, far = jax.tree.leaves(calls["synchronous"]()), {}
    for variant in calls:
        if variant == "synchronous":
            continue
        both = zip(jax.tree.leaves(calls[variant]()), expected, strict=True)
        far[variant] = max(distance(got, wanted) for got, wanted in both)
        assert far[variant] <= worker.GRADIENT_TOLERANCE, f"{name}: {variant} is off by {far}"
    return far


def summary_of(times):
    """What the report says of the times of one layer."""
    overlap, synchronous = times["overlap"], times["synchronous"]
    outside = float(np.median(synchronous - times["products"]))
    others = times.keys() - {"overlap", "products"}
    saved = {name: float(np.median(times[name] - overlap)) for name in sorted(others)}
    return {
        "us": {each: round(float(np.median(us))) for each, us in times.items()},
        "rounds": len(overlap),
        "outside_us": round(outside),
        "saved_us": {name: round(us) for name, us in saved.items()},
        "faster": {
            name: round(us / float(np.median(times[name])), 4) for name, us in saved.items()
        },
        "hidden": round(saved["synchronous"] / outside, 3),
    }


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


def report_of(spec_name, ranks, options, deadline):
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
    changes = {
        "synchronous": {"overlap": False},
        "overlap": {"overlap": True},
        "copy engines": {"overlap": True, "transport": "cuda", "node_size": 1},
    }
    if ranks == 1 or jax.default_backend() != "gpu":
        del changes["copy engines"]
    groups = {
        name: jax_ep.create_group(case.mesh, moe_layers.AXIS, dataclasses.replace(config, **change))
        for name, change in changes.items()
    }
    arrays = (params, case.x, *case.routing)
    variants = {name: variants_of(name, case.sizes, groups, experts) for name in options.layers}
    calls = compile_all(case, variants, arrays)
    layers = {}
    for name in options.layers:
        far = check_same(name, calls[name])
        products = functools.partial(products_of(case, name == "shared"), params, case.x)
        times = times_of({"products": products} | calls[name], options.rounds, deadline)
        layers[name] = summary_of(times) | {"distance": {k: round(v, 5) for k, v in far.items()}}
        print(spec_name, name, json.dumps(layers[name]), flush=True)
        if name == "shared":
            layers[name]["spans"] = {
                each: spans_of(calls[name][each]) for each in ("synchronous", "overlap")
            }
    for group in groups.values():
        group.close()
    return layers


def compile_all(case, variants, arrays):
    """{name: {variant: a call}}; compiled side by side."""
    lowered = {
        (name, variant): (step_of(case, layer).lower(*arrays), options)
        for name, of_name in variants.items()
        for variant, (layer, options) in of_name.items()
    }
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        steps = pool.map(lambda pair: pair[0].compile(compiler_options=pair[1]), lowered.values())
        calls = {name: {} for name in variants}
        for (name, variant), step in zip(lowered, steps, strict=True):
            calls[name][variant] = functools.partial(step, *arrays)
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="0: every device")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120, help="no round begins later")
    parser.add_argument("--layers", nargs="+", default=LAYERS, choices=LAYERS)
    parser.add_argument("--specs", nargs="+", default=["deepseek-v3", "qwen3-30b"])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--commit", help="where there is no repository")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    ranks = options.ranks or jax.device_count()
    report = stamp(options.commit) | {
        "machine": machine(ranks)["machine"],
        "jax": jax.__version__,
        "program": f"run_overlap.py, {options.tokens} tokens a rank",
        "specs": {name: report_of(name, ranks, options, deadline) for name in options.specs},
    }
    path = options.out / f"overlap_{file_name_of(report['machine'])}.json"
    path.write_text(json.dumps(report) + "\n")
    if "shared" in options.layers:
        plots.overlap(report, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
