"""Process 1 calls agree some seconds after process 0, which prints what is said meanwhile."""

import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from meeting import meet

import jax_ep
from jax_ep._cli import report

mesh = Mesh(np.array(jax.devices()), ("ep",))
config = jax_ep.Config(
    num_experts=2,
    top_k=1,
    hidden=16,
    max_tokens=4,
    dtype=jnp.float32,
    elastic=True,
    timeout_s=20.0,
)
group = jax_ep.create_group(mesh, "ep", config)


def look():
    time.sleep(3.0)
    print("page", group.report().splitlines()[0], flush=True)
    pages = [report.Page(os.getpid(), text) for text in report.ask(os.getpid()).split("\f")]
    kept = report.newest_of_each(pages)
    print("asked", kept[0].text.splitlines()[0], flush=True)
    print("others", sum("  rank " in page.text for page in kept), flush=True)


meet("agree")
if jax.process_index() == 0:
    looker = threading.Thread(target=look)
    looker.start()
else:
    time.sleep(8.0)
group.agree()
if jax.process_index() == 0:
    looker.join()
    print("after", group.report().splitlines()[0], flush=True)
meet("looked")
group.close()
