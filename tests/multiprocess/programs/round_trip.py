"""A compiled dispatch and combine, for programs that need nothing else of a layer."""

import jax
from arrays import place
from jax.sharding import PartitionSpec as P

import jax_ep


def round_trip(mesh, group, mode="ht"):
    """A function of NumPy arrays of all ranks, x and i32 idx, that gives combine's result."""

    def step(x, idx):
        recv = jax_ep.dispatch(group, x, idx, mode=mode)
        return jax_ep.combine(group, recv.x, recv)

    spec = P("ep")
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    )

    return lambda x, idx: run(place(x, mesh, spec), place(idx, mesh, spec))
