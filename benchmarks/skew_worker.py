"""Times dispatch, combine and a layer under skews.py's workloads; prints one JSON line for each.

Without EPLB expert e lives on rank e // E_l. With it, redundant slots are filled, and all experts
placed, by the load of the steps before, every few steps: what a server would do. Both take turns in
every step, so a noisy machine is noisy for both. Start it by run_skew.py.
"""

import argparse
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from skews import WORKLOADS, busiest_rank, load_of, routing
from specs import SPECS, machine

import jax_ep
from jax_ep import eplb

AXIS = "ep"
BY_RANK, EVERYWHERE = P(AXIS), P()


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--spec", default="skew", choices=sorted(SPECS))
    add("--tokens", type=int, help="per rank, in place of the spec's")
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    add("--redundant", type=float, default=1 / 8, help="slots beyond E, as a share of E")
    add("--every", type=int, default=4, help="steps of a placement")
    add("--steps", type=int, default=8)
    add("--repeats", type=int, default=3, help="of every step")
    add("--seed", type=int, default=0)
    add("--align", type=int, default=16)
    return parser.parse_args()


def ffn_by_blocks(align):
    """Experts whose work follows the rows that came: XLA:CPU's ragged_dot takes all rows E_l times.

    A block of `align` rows belongs to one expert; blocks behind the last zone are not computed.
    """

    def ffn(kernels, rows, group_sizes):
        w_up, w_down = kernels
        ends = jnp.cumsum(group_sizes) // align

        def block(i, y):
            expert = jnp.searchsorted(ends, i, side="right")
            x = lax.dynamic_slice_in_dim(rows, i * align, align)
            out = jax.nn.silu(x @ w_up[expert]) @ w_down[expert]
            return lax.dynamic_update_slice_in_dim(y, out, i * align, axis=0)

        return lax.fori_loop(0, ends[-1], block, jnp.zeros_like(rows))

    return ffn


def grouped_ffn(kernels, rows, group_sizes):
    import jax_ep.pallas

    return jax_ep.pallas.grouped_ffn(rows, group_sizes, *kernels)


class Side:
    """Without or with EPLB: a group, its programs and the experts in their slots."""

    def __init__(self, options, spec, mesh, tokens, slots):
        self.spec, self.mesh, self.slots = spec, mesh, slots
        self.has_placement = slots > spec.num_experts
        config = jax_ep.Config(
            num_experts=spec.num_experts,
            physical_experts=slots,
            top_k=spec.top_k,
            hidden=spec.hidden,
            max_tokens=tokens,
            align=options.align,
            dtype=jnp.dtype(spec.dtype),
        )
        self.group = jax_ep.create_group(mesh, AXIS, config)
        on_cpu = jax.default_backend() == "cpu"
        self.ffn = ffn_by_blocks(options.align) if on_cpu else grouped_ffn
        self.dispatch = self.program(self._dispatch, 4)
        self.combine = self.program(self._combine, 1)
        self.layer = self.program(self._layer, 5)
        self.place(np.arange(slots) % spec.num_experts)

    def program(self, function, num_arguments):
        specs = (EVERYWHERE, *[BY_RANK] * (num_arguments - 1)) if num_arguments > 1 else BY_RANK
        options = {"mesh": self.mesh, "in_specs": specs, "out_specs": BY_RANK, "check_vma": False}
        return jax.jit(jax.shard_map(function, **options))

    def place(self, slots):
        """Fills the slots; the maps are an argument of every program, and live on the devices."""
        placement = jax_ep.Placement.from_physical(slots, self.spec.num_experts)
        self.placement = jax.device_put(placement, NamedSharding(self.mesh, EVERYWHERE))
        self.kernels = kernels_of(self, slots)

    def _received(self, placement, x, ids, gates):
        given = placement if self.has_placement else None
        return jax_ep.dispatch(self.group, x, ids, gates, placement=given, pad="undefined")

    def _dispatch(self, placement, x, ids, gates):
        return jax.tree.map(lambda leaf: leaf[None], self._received(placement, x, ids, gates))

    def _combine(self, received):
        recv = jax.tree.map(lambda leaf: leaf[0], received)
        return jax_ep.combine(self.group, recv.x, recv)

    def _layer(self, placement, kernels, x, ids, gates):
        recv = self._received(placement, x, ids, gates)
        return jax_ep.combine(self.group, self.ffn(kernels, recv.x, recv.group_sizes), recv)


def sharded(mesh, array):
    sharding = NamedSharding(mesh, BY_RANK)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def kernels_of(side, slots):
    """Each slot's expert: one matrix, scaled by the expert's number, so a misplaced one shows."""
    spec = side.spec
    up, down = (spec.hidden, spec.expert_hidden), (spec.expert_hidden, spec.hidden)
    shapes = (up, down) if jax.default_backend() == "cpu" else (up, up, down)
    scale = np.float32(1) + (slots / spec.num_experts).astype(np.float32)

    def make(shape, number):
        rng = np.random.default_rng(number)
        one = rng.standard_normal(shape, np.float32) * np.float32(shape[0] ** -0.5)
        return scaled(one, scale, spec.dtype, NamedSharding(side.mesh, BY_RANK))

    return tuple(make(shape, number) for number, shape in enumerate(shapes))


@functools.partial(jax.jit, static_argnums=(2, 3))
def scaled(one, scale, dtype, sharding):
    all_of_them = (one[None] * scale[:, None, None]).astype(dtype)
    return lax.with_sharding_constraint(all_of_them, sharding)


def timed(call):
    """(seconds, result) between a barrier and the result."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("skew")
    begin = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - begin, result


def measure_step(sides, arrays, repeats):
    """{(side, operation): seconds of each repeat}, of this process; checks that outputs agree."""
    seconds, outs = {}, {}
    for number in range(repeats + 1):  # the first one warms up
        for name, side in sides.items():
            given = (side.placement, *arrays)
            took, received = timed(lambda side=side, given=given: side.dispatch(*given))
            times = {"dispatch": took}
            times["combine"], _ = timed(lambda side=side, r=received: side.combine(r))
            given = (side.placement, side.kernels, *arrays)
            times["layer"], out = timed(lambda side=side, given=given: side.layer(*given))
            outs[name] = np.asarray(out.addressable_shards[0].data, np.float32)
            for operation, value in times.items():
                if number:
                    seconds.setdefault((name, operation), []).append(value)
    first, *others = outs.values()
    for other in others:  # replicas compute the same rows, perhaps in other blocks
        np.testing.assert_allclose(other, first, rtol=2e-2, atol=2e-2 * np.abs(first).max())
    return seconds


def measure(options, name, sides, spec, mesh, tokens):
    """The figures of one workload."""
    ranks, experts, top_k = mesh.size, spec.num_experts, spec.top_k

    def ids_of(step):
        return routing(name, options.seed, step, ranks, tokens, top_k, experts)

    rng = np.random.default_rng(options.seed)
    x = rng.standard_normal((ranks * tokens, spec.hidden), np.float32).astype(spec.dtype)
    gates = rng.random((ranks * tokens, top_k), np.float32)
    us, busiest = {}, {side: [] for side in sides}
    first = options.every  # steps before it are only looked at
    for step in range(first, first + options.steps):
        if (step - first) % options.every == 0:
            seen = sum(load_of(ids_of(s), experts) for s in range(step - options.every, step))
            slots = sides["eplb"].slots
            placement = eplb.rebalance(
                seen[None], slots, num_groups=1, num_nodes=1, num_gpus=ranks
            )[0]
            sides["eplb"].place(np.asarray(placement.physical_to_logical))
        ids = ids_of(step)
        arrays = [sharded(mesh, a) for a in (x, ids.reshape(-1, top_k), gates)]
        for key, seconds in measure_step(sides, arrays, options.repeats).items():
            everyone = multihost_utils.process_allgather(np.array(seconds))
            slowest = everyone.reshape(-1, options.repeats).max(axis=0)
            us.setdefault(key, []).append(float(np.median(slowest)) * 1e6)
        for side, of in sides.items():
            of.group.check()
            busiest[side].append(busiest_of(of, ids, ranks))
    return {
        "workload": name,
        "us": {side: mean_of(us, side) for side in sides},
        "busiest_rank": {side: float(np.mean(values)) for side, values in busiest.items()},
    }


def mean_of(us, side):
    return {operation: float(np.mean(us[side, operation])) for s, operation in us if s == side}


def busiest_of(side, ids, ranks):
    """Rows of the busiest rank over the mean, by the documented choice of replicas."""
    tokens = ids.shape[1]
    number = np.arange(ranks * tokens).reshape(ranks, tokens, 1)
    expert = np.maximum(ids, 0)
    replica = number % np.asarray(side.placement.replica_counts)[expert]
    slots = np.where(ids < 0, -1, np.asarray(side.placement.logical_to_physical)[expert, replica])
    return busiest_rank(load_of(slots, side.slots), ranks)


def main():
    options = parse_options()
    if not jax.distributed.is_initialized():
        jax_ep.initialize()
    spec = SPECS[options.spec]
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    tokens = options.tokens or spec.tokens
    ranks, experts = mesh.size, spec.num_experts
    slots = -(-round(experts * (1 + options.redundant)) // ranks) * ranks
    sides = {
        "plain": Side(options, spec, mesh, tokens, experts),
        "eplb": Side(options, spec, mesh, tokens, slots),
    }
    for name in options.workloads:
        result = measure(options, name, sides, spec, mesh, tokens)
        if jax.process_index() == 0:
            sizes = {"ranks": ranks, "tokens": tokens, "experts": experts, "slots": slots}
            result |= {"spec": options.spec, **sizes, "machine": machine(ranks)}
            print("RESULT " + json.dumps(result), flush=True)
    for side in sides.values():
        side.group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
