"""Two processes train a small MoE layer over verbs; then one is killed. One process of the two.

The losses of every step must be those of numpy with gradients by hand, so forward and backward are
right; the group's counters must show that the bytes went through RDMA queue pairs.
Then process 1 ends by SIGKILL, and process 0 must get an error that names rank 1, in time.
jax.distributed is told by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _jax_compat

STEPS, REPEATS = 3, 10
TOKENS, WIDTH, TOP_K, EXPERTS = 32, 64, 2, 4
LEARNING_RATE = 20.0
PEER_TIMEOUT_S = 6.0
MARGIN_S = 4.0  # of an emulated machine
MEETING_MS = 60_000

begin = time.monotonic()
jax_ep.initialize()
me, ranks = jax.process_index(), jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("ep",))
spec = P("ep")


def say(text):
    print(f"[{me}] {time.monotonic() - begin:5.1f} s: {text}", flush=True)


group = jax_ep.create_group(
    mesh,
    "ep",
    jax_ep.Config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=WIDTH,
        max_tokens=TOKENS,
        dtype=jnp.float32,
        align=1,
        mode="ht",
        transport="verbs",
        node_size=1,
        timeout_s=60.0,
        peer_timeout_s=PEER_TIMEOUT_S,
    ),
)
say("the group is made")


def expert_fn(kernels, rows, sizes):
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows.shape[0])
    is_mine = (row >= (ends - sizes)[:, None]) & (row < ends[:, None])
    return jnp.tanh(jnp.einsum("er,rh,ehk->rk", is_mine.astype(rows.dtype), rows, kernels))


def make_step():
    """One step of gradient descent on a projection, gates and experts; also this rank's loss."""

    def loss(params, x, idx, wanted):
        project, gates, experts = params
        weights = jax.nn.sigmoid(jnp.take_along_axis(x @ gates[0], idx, axis=1))
        out = jax_ep.moe(group, x @ project[0], idx, weights, expert_fn, experts)
        return jnp.mean((out - wanted) ** 2)

    def step(params, x, idx, wanted):
        value, slope = jax.value_and_grad(loss)(params, x, idx, wanted)
        return value[None], jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, slope)

    return jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, spec), check_vma=False
        )
    )


def reference(params, x, idx, wanted):
    """The same steps in numpy, in float64, all ranks at once; returns the losses [STEPS, ranks]."""
    project, gates, experts = (np.array(param, np.float64) for param in params)
    losses = []
    for _ in range(STEPS):
        values, change = [], [np.zeros_like(param) for param in (project, gates, experts)]
        for rank in range(ranks):
            own = slice(rank * TOKENS, (rank + 1) * TOKENS)
            xs, chosen = x[own], idx[own]
            h = xs @ project[rank]
            weights = 1 / (1 + np.exp(-np.take_along_axis(xs @ gates[rank], chosen, axis=1)))
            z = np.tanh(np.einsum("th,tkhj->tkj", h, experts[chosen]))
            missed = np.einsum("tk,tkj->tj", weights, z) - wanted[own]
            values.append(np.mean(missed**2))
            d_out = 2 * missed / missed.size
            d_u = weights[..., None] * d_out[:, None] * (1 - z**2)
            d_logit = np.einsum("tj,tkj->tk", d_out, z) * weights * (1 - weights)
            change[0][rank] = xs.T @ np.einsum("tkj,tkhj->th", d_u, experts[chosen])
            for k in range(TOP_K):
                np.add.at(change[1][rank].T, chosen[:, k], d_logit[:, k, None] * xs)
                np.add.at(change[2], chosen[:, k], np.einsum("th,tj->thj", h, d_u[:, k]))
        losses.append(values)
        for param, slope in zip((project, gates, experts), change, strict=True):
            param -= LEARNING_RATE * slope
    return np.array(losses)


def place(array):
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape).astype(np.float32) / 8  # noqa: E731
start = (draw(ranks, WIDTH, WIDTH), draw(ranks, WIDTH, EXPERTS), draw(EXPERTS, WIDTH, WIDTH))
x, wanted = draw(ranks * TOKENS, WIDTH), draw(ranks * TOKENS, WIDTH)
idx = np.argsort(rng.random((ranks * TOKENS, EXPERTS)))[:, :TOP_K].astype(np.int32)
expected = reference(start, x, idx, wanted)[:, me]
first_params = tuple(map(place, start))
inputs = tuple(map(place, (x, idx, wanted)))
run = make_step().lower(first_params, *inputs).compile()
say("compiled")


def train():
    params, losses = first_params, []
    for _ in range(STEPS):
        value, params = run(params, *inputs)
        losses.append(float(np.asarray(value.addressable_shards[0].data)[0]))
    return losses


losses = train()
say(f"trained {STEPS} steps over verbs: losses {losses}")
np.testing.assert_allclose(losses, expected, rtol=1e-5)
assert losses[-1] < 0.95 * losses[0], losses
for _ in range(REPEATS):
    assert train() == losses, "the same steps again gave other bits"
say(f"the losses are numpy's; {REPEATS * STEPS} steps more gave the same bits")
flows = [flow for flow in group.stats()["flows"] if flow["messages"]]
num_bytes = sum(flow["bytes"] for flow in flows)
rows = (REPEATS + 1) * STEPS * TOKENS * WIDTH * 4
assert num_bytes > rows, (num_bytes, rows)
state = group.dump_state()
assert "verbs: 1 queue pairs" in state and "rail rxe0" in state, state
say(f"{sum(flow['messages'] for flow in flows)} messages, {num_bytes} bytes through rxe0")

# Process 0 has its results before its peer dies: what that wrote last may still lie in its proxy.
_jax_compat.distributed_client().wait_at_barrier("trained", MEETING_MS)
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
last = time.monotonic()
error = None
try:
    while error is None and time.monotonic() < last + PEER_TIMEOUT_S + MARGIN_S:
        train()
except (jax.errors.JaxRuntimeError, ValueError) as caught:
    error = " ".join(str(caught).split())
seconds = time.monotonic() - last
assert error is not None, "the loss of rank 1 went unnoticed"
assert "rank 1" in error and seconds < PEER_TIMEOUT_S + MARGIN_S, (seconds, error)
say(f"rank 1 was killed; {seconds:.1f} s later: {error}")
os._exit(0)  # JAX's own exit would wait for the process that is gone
