"""The last process closes an elastic group of which the others agree anew, and goes on without."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meeting import meet

import jax_ep

T, H = 4, 16
TIMEOUT_S = 60.0
me, ranks = jax.process_index(), jax.device_count()
closer = ranks - 1
mask = [int(rank != closer) for rank in range(ranks)]
mesh = Mesh(np.array(jax.devices()), ("ep",))
ep = P("ep")
x = np.arange(ranks * T * H, dtype=np.float32).reshape(-1, H)
ids = np.arange(ranks * T, dtype=np.int32)[:, None] % closer

for node_size in (ranks, 1):
    config = jax_ep.Config(
        num_experts=ranks,
        top_k=1,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        mode="ll",
        elastic=True,
        node_size=node_size,
        transport="shm",
        timeout_s=TIMEOUT_S,
    )
    group = jax_ep.create_group(mesh, "ep", config)

    def layer(x, ids, active, group=group):
        recv = jax_ep.dispatch(group, x, ids, active=active)
        return jax_ep.combine(group, recv.x, recv)

    step = jax.jit(
        jax.shard_map(layer, mesh=mesh, in_specs=(ep, ep, P()), out_specs=ep, check_vma=False)
    )

    def check(group=group, step=step):
        out = step(place(x, mesh, ep), place(ids, mesh, ep), place(group.active, mesh, P()))
        got = np.asarray(out.addressable_shards[0].data)
        assert np.array_equal(got, x[me * T : (me + 1) * T]), got

    check()
    meet(f"made {node_size}")
    began = time.monotonic()
    if me != closer:
        time.sleep(0.5)  # it waits in its close for the others
        assert group.agree().tolist() == mask, group.active
        check()
        meet(f"went on {node_size}", range(closer))
    group.close()
    print(f"took_{node_size} {time.monotonic() - began}", flush=True)
    try:
        group.check()
    except RuntimeError as error:
        print(f"told_{node_size} {error}", flush=True)
meet("done")
