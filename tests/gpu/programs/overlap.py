"""Calls beside other work: the same bits as in order, and where XLA puts them in its schedule.

Prints one JSON line a program: what it is, and its schedule (schedule.py) with Config.overlap=True.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from schedule import schedule_of

import jax_ep

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 512, 1024, 512, 16, 4
MESH = Mesh(np.array(jax.devices()), ("ep",))
RANKS = MESH.size


def group(overlap):
    config = jax_ep.Config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        capacity_factor=2.0,
        mode="ht",
        overlap=overlap,
        timeout_s=30,
    )
    return jax_ep.create_group(MESH, "ep", config)


def experts(weights, x, sizes):
    del sizes  # every expert computes as many rows as there are: what is beyond them is zero
    gate, up, down = weights
    rows = x.reshape(EXPERTS // RANKS, -1, HIDDEN)
    return (jax.nn.silu(rows @ gate) * (rows @ up) @ down).reshape(x.shape)


def shared(weights, x):
    gate, up, down = weights
    return jax.nn.silu(x @ gate) * (x @ up) @ down


def plain(group, x, ids, gates, params):
    recv = jax_ep.dispatch(group, x, ids, gates, layout="expert_batched")
    rows = recv.x.reshape(-1, HIDDEN)
    y = experts(params["routed"], rows, recv.group_sizes).reshape(recv.x.shape)
    return jax_ep.combine(group, y, recv)


def tied(group, x, ids, gates, params):
    recv = jax_ep.dispatch(group, x, ids, gates, layout="expert_batched")
    recv, beside = jax_ep.overlap(recv, shared(params["shared"], x))
    rows = recv.x.reshape(-1, HIDDEN)
    y = experts(params["routed"], rows, recv.group_sizes).reshape(recv.x.shape)
    return jax_ep.combine(group, y, recv) + beside


def halves(group, x, ids, gates, params):
    flight = jax_ep.dispatch_start(group, x, ids, gates, layout="expert_batched")
    beside = shared(params["shared"], x)
    recv, beside = jax_ep.overlap(jax_ep.dispatch_done(group, flight), beside)
    rows = recv.x.reshape(-1, HIDDEN)
    y = experts(params["routed"], rows, recv.group_sizes).reshape(recv.x.shape)
    return jax_ep.combine_done(group, jax_ep.combine_start(group, y, recv)) + beside


def chunks(group, x, ids, gates, params):
    def ffn(weights, rows, sizes):
        gate, up, down = (w[0] for w in weights)
        used = jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes)
        return jnp.where(used, (jax.nn.silu(rows @ gate) * (rows @ up)) @ down, 0)

    return jax_ep.moe(group, x, ids, gates, ffn, params["routed"], chunks=2, overlap=True)


def scanned(group, x, ids, gates, params):
    def body(x, _):
        return tied(group, x, ids, gates, params), None

    return jax.lax.scan(body, x, length=3)[0]


def rematerialised(group, x, ids, gates, params):
    layer = jax.checkpoint(functools.partial(tied, group))
    return layer(layer(x, ids, gates, params), ids, gates, params)


def mapped(group, x, ids, gates, params):
    layer = functools.partial(tied, group)
    both = jnp.stack([x, 2 * x])
    return jnp.sum(jax.vmap(layer, in_axes=(0, None, None, None))(both, ids, gates, params), 0)


def microbatches(group, x, ids, gates, params):
    halves_of = [a.reshape(2, TOKENS // 2, -1) for a in (x, ids, gates)]
    outs = [tied(group, *(a[i] for a in halves_of), params) for i in range(2)]
    return jnp.concatenate(outs)


def with_collectives(group, x, ids, gates, params):
    weights = jax.lax.all_gather(params["shared"][0], "ep", axis=0, tiled=True)[:HIDDEN]
    x = jax.lax.psum(x, "ep") / RANKS + 0 * x
    both = {**params, "shared": [weights, *params["shared"][1:]]}
    return tied(group, x, ids, gates, both)


PROGRAMS = {
    each.__name__: each
    for each in (
        plain,
        tied,
        halves,
        chunks,
        scanned,
        rematerialised,
        mapped,
        microbatches,
        with_collectives,
    )
}


def arrays():
    rng = np.random.default_rng(3)

    def normal(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(jnp.bfloat16)

    tokens = RANKS * TOKENS
    params = {
        "routed": [
            normal(EXPERTS, HIDDEN, WIDTH),
            normal(EXPERTS, HIDDEN, WIDTH),
            normal(EXPERTS, WIDTH, HIDDEN),
        ],
        "shared": [normal(HIDDEN, 4 * WIDTH), normal(HIDDEN, 4 * WIDTH), normal(4 * WIDTH, HIDDEN)],
    }
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    gates = rng.random((tokens, TOP_K)).astype(np.float32)
    return normal(tokens, HIDDEN), ids, gates, params


def compiled(program, group, given, check_vma):
    specs = (P("ep"), P("ep"), P("ep"), {"routed": P("ep"), "shared": P()})
    layer = functools.partial(program, group)
    mapped = jax.shard_map(layer, mesh=MESH, in_specs=specs, out_specs=P("ep"), check_vma=check_vma)

    def step(x, ids, gates, params):
        def loss(x, gates, params):
            out = mapped(x, ids, gates, params)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gates, params)

    return jax.jit(step).lower(*given).compile()


def main():
    names = sys.argv[1:] or list(PROGRAMS)
    given = arrays()
    groups = {overlap: group(overlap) for overlap in (False, True)}
    for name in names:
        for check_vma in (True, False):
            runs = {}
            for overlap, its_group in groups.items():
                run = compiled(PROGRAMS[name], its_group, given, check_vma)
                for _ in range(3):  # replays of command buffers, too
                    results = jax.device_get(run(*given))
                runs[overlap] = results
            schedule = schedule_of(run.as_text())
            both = (jax.tree.leaves(runs[overlap]) for overlap in groups)
            for expected, got in zip(*both, strict=True):
                assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), name
            line = {"program": name, "check_vma": check_vma, "schedule": schedule}
            print(json.dumps(line), flush=True)
    for its_group in groups.values():
        its_group.check()
        its_group.close()
    print("overlap DONE")


if __name__ == "__main__":
    main()
