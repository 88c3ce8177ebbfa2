"""value_and_grad of one MoE layer on this machine's GPUs, one process; prints one JSON line a case.

Every method of moe_layers.py runs the same layer with the same experts (a gated FFN) on the same
weights, tokens, routing and gates. Losses and gradients are compared before anything is timed, with
jax_ep's and with each other, so that a wrong method ends the run. In each round every program runs
once, behind one run of the experts' products, so that clocks and temperature are alike; a time is
the median over rounds of one whole call.

"gemms_us" is the experts alone, forward and backward, on exactly the rows that the routing gives
each expert; "outside_us" of a method is its time minus that. "without_experts_us" is the layer with
y = rows for experts: what the exchange costs, without the difference of two large times.
"""

import argparse
import concurrent.futures
import functools
import json
import math
import sys
import time

import jax
import jax.numpy as jnp
import moe_layers
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from specs import SPECS, machine

import jax_ep
import jax_ep.pallas
from jax_ep.testing import make_routing

OURS = "jax_ep"
LOSS_TOLERANCE = 2e-3  # of a sum over all outputs: bf16's roundings average out
GRADIENT_TOLERANCE = 2e-2  # Frobenius, relative: several roundings to bf16, in another order
SLOW_S, SLOW_ROUNDS = 0.2, 3  # calls that take longer, and in how many rounds they run
WEIGHT_ROWS_COMPARED = 8  # of each expert's gradient, to hold no second copy of all of them


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--spec", default="deepseek-v3", choices=sorted(SPECS))
    add("--tokens", type=int, default=8192, help="per rank")
    add("--routing", default="uniform", choices=["uniform", "zipf"])
    add("--methods", nargs="+", choices=[OURS, *moe_layers.BASELINES])
    add("--experts", default="grouped_ffn", choices=["grouped_ffn", "ragged_dot"])
    add("--align", type=int, default=16, help="of jax_ep's expert zones")
    add("--rounds", type=int, default=10)
    add("--ranks", type=int, default=0, help="0: every device")
    options = parser.parse_args()
    options.methods = options.methods or [OURS, *moe_layers.BASELINES]
    return options


def ragged_dot_ffn(rows, group_sizes, w_gate, w_up, w_down):
    dot = functools.partial(lax.ragged_dot, group_sizes=group_sizes)
    return dot(jax.nn.silu(dot(rows, w_gate)) * dot(rows, w_up), w_down)


FFN = {"grouped_ffn": jax_ep.pallas.grouped_ffn, "ragged_dot": ragged_dot_ffn}


class Case:
    """Arrays and programs of one case; arrays lead with the rank axis, kernels with experts."""

    def __init__(self, options):
        spec = SPECS[options.spec]
        self.ranks = options.ranks or jax.device_count()
        self.mesh = Mesh(np.array(jax.devices()[: self.ranks]), (moe_layers.AXIS,))
        self.sharding = NamedSharding(self.mesh, P(moe_layers.AXIS))
        self.dtype = jnp.dtype(spec.dtype)
        self.ids = make_routing(
            options.routing,
            num_ranks=self.ranks,
            num_tokens=options.tokens,
            top_k=spec.top_k,
            num_experts=spec.num_experts,
        ).reshape(self.ranks, options.tokens, spec.top_k)
        self.sizes = moe_layers.sizes_of(self.ids, spec.num_experts, spec.hidden)
        counts = np.bincount(self.ids.ravel(), minlength=spec.num_experts)
        self.counts = counts.reshape(self.ranks, -1).astype(np.int32)
        aligned = -(-self.counts // options.align) * options.align
        self.config = jax_ep.Config(
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            hidden=spec.hidden,
            max_tokens=options.tokens,
            recv_rows=int(aligned.sum(axis=1).max()),
            align=options.align,
            dtype=self.dtype,
            mode="ht",
        )
        hidden, width = spec.hidden, spec.expert_hidden
        wide, narrow = (hidden, width), (width, hidden)
        self.kernels = tuple(
            self.normal(i, spec.num_experts, *shape, scale=shape[0] ** -0.5)
            for i, shape in enumerate((wide, wide, narrow))
        )
        self.x = self.normal(3, *self.ids.shape[:2], hidden)
        gates = np.random.default_rng(1).random(self.ids.shape).astype(np.float32)
        gates /= gates.sum(axis=2, keepdims=True)
        self.routing = [jax.device_put(a, self.sharding) for a in (self.ids, gates)]

    def normal(self, seed, *shape, scale=1.0):
        """Random elements on all ranks, each rank's drawn there."""
        local = (shape[0] // self.ranks, *shape[1:])

        def draw():
            key = jax.random.fold_in(jax.random.key(seed), lax.axis_index(moe_layers.AXIS))
            scaled = jnp.asarray(scale, self.dtype)
            # One after the other: the generator's temporaries are larger than what it draws.
            return lax.map(
                lambda key: jax.random.normal(key, local[1:], self.dtype) * scaled,
                jax.random.split(key, local[0]),
            )

        return self.mapped(draw)()

    def mapped(self, function):
        """`function` of local arrays as it is, jitted over all ranks."""
        spec = P(moe_layers.AXIS)
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    def step(self, layer):
        """The layer's loss, and its gradients by x, gates and kernels (none if there are none)."""

        def loss(x, gates, kernels, ids):
            out = layer(kernels, x, ids, gates)
            return 0.5 * jnp.sum(out.astype(jnp.float32) ** 2)

        def local(kernels, x, ids, gates):
            # Without experts the kernels' gradients would be 11 GB of zeros, written every time.
            by = (0, 1, 2) if kernels else (0, 1)
            value, (d_x, d_gates, *d_kernels) = jax.value_and_grad(loss, argnums=by)(
                x[0], gates[0], kernels, ids[0]
            )
            return value[None], d_x[None], d_gates[None], *d_kernels

        return self.mapped(local)

    def gemms(self, ffn):
        """(program, arguments): the experts alone, forward and backward, on the routing's rows."""
        s = self.sizes

        def local(kernels, rows, g, counts):
            run = functools.partial(experts_of(ffn), group_sizes=counts[0])
            y, backward = jax.vjp(run, kernels, rows[0])
            d_kernels, d_rows = backward(g[0])
            return y[None], d_kernels, d_rows[None]

        rows, g = (self.normal(i, s.ranks, s.rank_rows, s.hidden) for i in (4, 5))
        return self.mapped(local), (
            self.kernels,
            rows,
            g,
            jax.device_put(self.counts, self.sharding),
        )


def experts_of(ffn):
    """expert_fn(params, rows, group_sizes) of a gated FFN."""
    return lambda params, rows, group_sizes: ffn(rows, group_sizes, *params)


def layer_of(method, case, group, experts):
    if method == OURS:
        return moe_layers.with_jax_ep(group, experts)
    return moe_layers.BASELINES[method](case.sizes, experts)


def compile_all(programs):
    """{name: (program, arguments)} -> {name: a call}; compiled side by side."""
    lowered = [program.lower(*arrays) for program, arrays in programs.values()]
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        compiled = list(pool.map(lambda low: low.compile(), lowered))
    return {
        name: functools.partial(run, *arrays)
        for run, (name, (_, arrays)) in zip(compiled, programs.items(), strict=True)
    }


@jax.jit
def distance(got, wanted):
    """|got - wanted| / |wanted|, over everything."""

    def norm(a):
        return jnp.sqrt(jnp.sum(a.astype(jnp.float32) ** 2))

    return norm(got.astype(jnp.float32) - wanted.astype(jnp.float32)) / norm(wanted)


def summary(results):
    """(loss, parts of the gradients), without the bulk of the kernels' gradients."""
    loss, d_x, d_gates, d_kernels = results
    parts = {f"kernel {i}": d[:, :WEIGHT_ROWS_COMPARED] for i, d in enumerate(d_kernels)}
    return float(np.sum(jax.device_get(loss))), {**parts, "x": d_x, "gates": d_gates}


def check_equal(calls):
    """Largest distances of every method from the first; raises where one is another layer."""
    (first, expected), *others = ((name, summary(call())) for name, call in calls.items())
    assert math.isfinite(expected[0]) and expected[0] > 0, f"{first}: loss {expected[0]}"
    found = {first: {"loss": expected[0]}}
    for name, (loss, parts) in others:
        off = {part: float(distance(parts[part], wanted)) for part, wanted in expected[1].items()}
        found[name] = {"loss": loss, **off}
        is_equal = abs(loss / expected[0] - 1) <= LOSS_TOLERANCE
        is_equal &= all(value <= GRADIENT_TOLERANCE for value in off.values())
        assert is_equal, f"{name} is not the layer of {first} (loss {expected[0]}): {found[name]}"
    return found


def rounds_of(calls, rounds):
    """{name: median microseconds}; every call once per round, slow ones not in all.

    Before each, the experts' products run once: GPUs that rested are faster for a while.
    """
    seconds = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            is_slow = seconds[name] and min(seconds[name]) > SLOW_S
            if is_slow and number > SLOW_ROUNDS:
                continue
            jax.block_until_ready(calls["gemms"]())
            start = time.perf_counter()
            jax.block_until_ready(call())
            if number > 0:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) * 1e6 for name, values in seconds.items()}


def peak_gib(case):
    """The most memory that any rank's arrays took so far, without jax_ep's heap; 0: unknown."""
    stats = [device.memory_stats() or {} for device in case.mesh.devices.flat]
    return max(stat.get("peak_bytes_in_use", 0) for stat in stats) / 2**30


def report(options, case, group):
    ffn = FFN[options.experts]
    start = time.perf_counter()
    arrays = (case.x, *case.routing)
    programs = {"gemms": case.gemms(ffn)}
    for method in options.methods:
        whole = layer_of(method, case, group, experts_of(ffn))
        bare = layer_of(method, case, group, lambda params, rows, group_sizes: rows)
        programs[method] = case.step(whole), (case.kernels, *arrays)
        programs[f"{method} without experts"] = case.step(bare), ((), *arrays)
    calls = compile_all(programs)
    compiled_s = time.perf_counter() - start
    print(f"compiled {len(calls)} programs in {compiled_s:.1f} s", file=sys.stderr, flush=True)
    differences = check_equal({method: calls[method] for method in options.methods})
    print(f"all methods are the same layer: {differences}", file=sys.stderr, flush=True)
    us = rounds_of(calls, options.rounds)
    group.check()
    sizes = case.sizes
    flops = 3 * 3 * 2 * int(case.counts.sum(axis=1).max()) * math.prod(case.kernels[0].shape[1:])
    return {
        "machine": machine(sizes.ranks),
        "spec": options.spec,
        "routing": options.routing,
        "tokens": options.tokens,
        "ranks": sizes.ranks,
        "experts": options.experts,
        "recv_rows": case.config.recv_rows,
        "rank_rows": sizes.rank_rows,
        "pair_rows": sizes.pair_rows,
        "compile_s": round(compiled_s, 1),
        "rounds": options.rounds,
        "gemms_us": us["gemms"],
        "gemms_tflop_s": flops / us["gemms"] / 1e6,
        "us": {method: us[method] for method in options.methods},
        "outside_us": {method: us[method] - us["gemms"] for method in options.methods},
        "without_experts_us": {
            method: us[f"{method} without experts"] for method in options.methods
        },
        "peak_gib": peak_gib(case),
        "differences": differences,
    }


def main():
    options = parse_options()
    case = Case(options)
    with jax_ep.create_group(case.mesh, moe_layers.AXIS, case.config) as group:
        print("RESULT " + json.dumps(report(options, case, group)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
