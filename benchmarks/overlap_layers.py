"""The layers of run_overlap.py, by name and variant: each runs per rank, in shard_map over "ep".

Every layer takes (params, x [T, H], ids [T, K], gates [T, K]) and gives [T, H].
"""

import jax
import moe_layers

import jax_ep

LHS = {"xla_gpu_enable_latency_hiding_scheduler": True}
LAYERS = ("plain", "shared", "chunks=2")


def plain(group, experts):
    def layer(params, x, ids, gates):
        return jax_ep.moe(group, x, ids, gates, experts, params["routed"])

    return layer


def in_chunks(group, experts):
    def layer(params, x, ids, gates):
        return jax_ep.moe(group, x, ids, gates, experts, params["routed"], chunks=2, overlap=True)

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


def gathered(sizes, experts, is_shared):
    routed = moe_layers.with_all_gather(sizes, experts)

    def layer(params, x, ids, gates):
        out = routed(params["routed"], x, ids, gates)
        if not is_shared:
            return out
        gate, up, down = params["shared"]
        return out + (jax.nn.silu(x @ gate) * (x @ up)) @ down

    return layer


def variants_of(name, sizes, groups, experts):
    """{variant: (layer, XLA's options)} of the layer `name`."""
    one, beside = groups["synchronous"], groups["overlap"]
    whole = shared if name == "shared" else plain
    found = {"synchronous": (whole(one, experts), {})}
    if name == "chunks=2":
        found["in order"] = in_chunks(one, experts), {}
        whole = in_chunks
    found["overlap"] = whole(beside, experts), {}
    if name != "chunks=2" and "copy engines" in groups:
        found["copy engines"] = whole(groups["copy engines"], experts), {}
    native = gathered(sizes, experts, name == "shared")
    return found | {"all_gather": (native, {}), "all_gather, LHS": (native, LHS)}
