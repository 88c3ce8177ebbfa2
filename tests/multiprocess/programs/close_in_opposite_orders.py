"""Two groups that process 0 closes in the order of their creation, and process 1 in the other.

Prints what each process's first group to be closed says after a while of whom it waits for.
"""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep

mesh = Mesh(np.array(jax.devices()), ("ep",))
config = jax_ep.Config(
    num_experts=2, top_k=1, hidden=16, max_tokens=4, dtype=jnp.float32, timeout_s=8.0
)
groups = [jax_ep.create_group(mesh, "ep", config) for _ in range(2)]
if jax.process_index() == 1:
    groups.reverse()


def look():
    time.sleep(3.0)
    print("page", groups[0].report().splitlines()[0], flush=True)


looker = threading.Thread(target=look)
looker.start()
for group in groups:
    group.close()
looker.join()
