"""A class that JAX registers keeps this module, and so the group, to the very end."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep

mesh = Mesh(np.array(jax.devices()), ("ep",))
config = jax_ep.Config(num_experts=4, top_k=2, hidden=16, max_tokens=8, dtype=jnp.float32)
group = jax_ep.create_group(mesh, "ep", config)


@jax.tree_util.register_pytree_node_class
class Model:
    def __init__(self):
        self.group = group

    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, static, leaves):
        return cls()


group.close()
print(f"closed {'is closed' in group.health().message}", flush=True)
