"""2,000 steps of training with native collectives in the same program: equal bits with overlap.

The weights of the shared expert are gathered (as in FSDP) and gradients are summed by psum; the
optimiser steps by the sign of a momentum. Prints a digest of what was trained.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import overlap as programs
from jax.sharding import PartitionSpec as P

STEPS, RATE = 2000, 1e-5


def main():
    x, ids, gates, params = programs.arrays()
    x = x * 20  # of unit size
    digests = {}
    for overlap in (False, True):
        group = programs.group(overlap)
        specs = (P("ep"), P("ep"), P("ep"), {"routed": P("ep"), "shared": P()})
        layer = jax.shard_map(
            functools.partial(programs.with_collectives, group),
            mesh=programs.MESH,
            in_specs=specs,
            out_specs=P("ep"),
        )

        def loss(params, x, layer=layer):
            weights = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            out = layer(x, ids, gates, weights).astype(jnp.float32)
            return jnp.mean((out - 1) ** 2)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, momentum, x, loss=loss):
            value, gradients = jax.value_and_grad(loss)(params, x)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
            params = jax.tree.map(lambda p, m: p - RATE * jnp.sign(m), params, momentum)
            return params, momentum, value

        trained = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
        momentum = jax.tree.map(jnp.zeros_like, trained)
        values = []
        for _ in range(STEPS):
            trained, momentum, value = step(trained, momentum, x)
            values.append(value)
        group.check()
        group.close()
        values = jax.device_get(values)
        assert values[-1] < 0.9 * values[0], (values[0], values[-1])
        leaves = jax.device_get(jax.tree.leaves((trained, momentum))) + values
        digests[overlap] = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
        print(overlap, float(values[0]), float(values[-1]), digests[overlap][:16], flush=True)
    assert digests[True] == digests[False]
    print("overlap training DONE")


if __name__ == "__main__":
    main()
