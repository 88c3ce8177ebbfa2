"""A program that XLA has captured and that runs after its group was closed, beside a new group.

XLA replays a command buffer without asking the handlers, so only kernels can notice.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

T, H, K, E, PAIRS = 64, 1024, 2, 8, 4
mesh = Mesh(np.array(jax.devices()), ("ep",))
N = mesh.size
sharding = NamedSharding(mesh, P("ep"))
rng = np.random.default_rng(0)


def program(mode):
    """A new group and a program of it that XLA captures: its call and its right result."""
    config = jax_ep.Config(
        num_experts=E * N,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=jnp.bfloat16,
        mode=mode,
        timeout_s=15.0,
    )
    group = jax_ep.create_group(mesh, "ep", config, "native")
    x = jax.device_put(jnp.ones((N * T, H), jnp.bfloat16), sharding)
    ids = np.stack([rng.permutation(E * N)[:K] for _ in range(N * T)]).astype(np.int32)
    ids = jax.device_put(ids, sharding)

    def layers(x, ids):
        for _ in range(PAIRS):
            recv = jax_ep.dispatch(group, x, ids)
            x = jax_ep.combine(group, recv.x * 0.5, recv)
        return x

    step = jax.jit(
        jax.shard_map(
            layers, mesh=mesh, in_specs=(P("ep"),) * 2, out_specs=P("ep"), check_vma=False
        )
    )
    return group, lambda: step(x, ids)


def check_right(call):
    # K copies of each row, halved, PAIRS times.
    np.testing.assert_array_equal(np.asarray(call(), np.float32), (K * 0.5) ** PAIRS)


def check_stale(call):
    """An error, or an output that nobody takes for a result."""
    try:
        out = np.asarray(call(), np.float32)
    except Exception as error:
        assert "closed" in str(error), error
        return "an error"
    assert np.isnan(out).all(), out
    return "NaN"


stale = []
for mode in ("ll", "ht"):
    group, call = program(mode)
    for _ in range(4):
        check_right(call)
    before = group.stats()
    check_right(call)
    launches = group.stats()["launches"] - before["launches"]
    group.check()
    group.close()
    try:
        group.check()
        raise SystemExit("check() of a closed group says nothing")
    except RuntimeError as error:
        assert "closed" in str(error), error
    stale.append(call)
    how = [check_stale(call) for call in stale]
    assert float((jnp.ones(3) + 1).sum()) == 6.0
    print(f"{mode}: {launches} launches by the host per run; after close: {how}", flush=True)

# Groups after them are as safe, and nothing old gets into their way.
for mode in ("ll", "ht"):
    group, call = program(mode)
    for _ in range(10):
        check_right(call)
        for old in stale:
            check_stale(old)
    check_right(call)
    group.check()
    group.close()
    print(f"{mode}: a new group beside stale programs is right", flush=True)
print("closed DONE", flush=True)
