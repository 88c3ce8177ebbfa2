"""What programs for two processes share, which may share one GPU: their group, and its arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep

T, H, K = 16, 64, 2
TIMEOUT_S = 20.0

jax_ep.initialize()
N = jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("ep",))
spec = jax.sharding.PartitionSpec("ep")
_sharding = jax.sharding.NamedSharding(mesh, spec)


def create_group(node_size):
    config = jax_ep.Config(
        num_experts=2 * N,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=jnp.float32,
        align=1,
        timeout_s=TIMEOUT_S,
        node_size=node_size,
    )
    return jax_ep.create_group(mesh, "ep", config, "native")


def on_all(array):
    return jax.make_array_from_callback(array.shape, _sharding, lambda index: array[index])
