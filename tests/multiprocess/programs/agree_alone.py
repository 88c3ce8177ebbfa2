"""Process 0 calls agree where the others call the group once more; then they agree, too.

Prints what the others were told. Any wrong number ends it.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

T, H = 4, 16
TIMEOUT_S = 60.0
me, ranks = jax.process_index(), jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("ep",))
ep = P("ep")
x = np.arange(ranks * T * H, dtype=np.float32).reshape(-1, H)
ids = np.stack([np.arange(ranks * T), np.arange(ranks * T) + 1], 1).astype(np.int32) % ranks


def place(array):
    sharding = NamedSharding(mesh, ep)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


for mode, node_size in (("ht", ranks), ("ht", 1), ("ht", 2), ("ll", 1)):
    config = jax_ep.Config(
        num_experts=ranks,
        top_k=2,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        mode=mode,
        elastic=True,
        node_size=node_size,
        transport="shm",
        timeout_s=TIMEOUT_S,
        peer_timeout_s=5.0,
    )
    group = jax_ep.create_group(mesh, "ep", config)

    def layer(x, ids, group=group):
        recv = jax_ep.dispatch(group, x, ids, jnp.full(ids.shape, 0.5))
        return jax_ep.combine(group, recv.x, recv)

    step = jax.jit(
        jax.shard_map(layer, mesh=mesh, in_specs=(ep, ep), out_specs=ep, check_vma=False)
    )

    def check(step=step):
        out = jax_ep.wait(step(place(x), place(ids)))
        got = np.asarray(out.addressable_shards[0].data)
        assert np.array_equal(got, x[me * T : (me + 1) * T]), got

    for _ in range(3):
        check()
    began = time.monotonic()
    if me != 0:
        try:
            check()
        except (RuntimeError, ValueError) as error:
            print(mode, node_size, "was told:", error, flush=True)
        else:
            raise AssertionError("a call without rank 0")
    active = group.agree()
    assert time.monotonic() - began < TIMEOUT_S / 4
    assert active.tolist() == [1] * ranks, active
    check()
    group.close()
print("done", flush=True)
