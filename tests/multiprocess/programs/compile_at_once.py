"""Programs compiled by several threads, other ones on each process, beside unrelated jits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from arrays import place
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

LAYERS, REPEATS = 6, 3
if not jax.distributed.is_initialized():
    jax_ep.initialize()
N, T, H, K = jax.device_count(), 4, 8, 2
mesh = Mesh(np.array(jax.devices()), ("ep",))
config = jax_ep.Config(
    num_experts=2 * N, top_k=K, hidden=H, max_tokens=T, dtype=jnp.float32, align=1, timeout_s=30.0
)
group = jax_ep.create_group(mesh, "ep", config)
random = np.random.default_rng(0)
values = random.integers(-8, 8, (N * T, H)).astype(np.float32)
experts = random.integers(0, 2 * N, (N * T, K)).astype(np.int32)


x, ids = place(values, mesh, P("ep")), place(experts, mesh, P("ep"))


def lowered(first):
    """Independent layers (XLA may run them in any order); both programs have one name."""

    def step(x, ids):
        outs = []
        for i in range(LAYERS):
            recv = jax_ep.dispatch(group, x * (first + i), (ids + i) % (2 * N), mode="ht")
            outs.append(jax_ep.combine(group, recv.x, recv))
        return tuple(outs)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P("ep"), P("ep")), out_specs=P("ep"), check_vma=False
    )
    return jax.jit(mapped).lower(x, ids)


def compiled(first):
    return lowered(first).compile()


def check(program, first):
    for i, out in enumerate(program(x, ids)):
        for shard in out.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data), values[shard.index] * K * (first + i)
            )


stop = threading.Event()


def compile_trifles():
    number = 0
    while not stop.is_set():
        number += 1
        jax.block_until_ready(jax.jit(lambda a, n=number: a * n + 1)(jnp.ones(3)))


noise = threading.Thread(target=compile_trifles)
if jax.process_index() == 1:
    noise.start()
try:
    for repeat in range(REPEATS):
        firsts = [100 * repeat + 1, 100 * repeat + 50]
        order = firsts[::-1] if jax.process_index() == 1 else firsts
        with ThreadPoolExecutor(2) as pool:
            programs = dict(zip(order, pool.map(compiled, order), strict=True))
        for first in firsts:
            check(programs[first], first)
    # One program, compiled several times at once here and once there.
    copies = 1 if jax.process_index() == 0 else 4
    with ThreadPoolExecutor(copies) as pool:
        equal = [lowered(7) for _ in range(copies)]
        check(list(pool.map(lambda program: program.compile(), equal))[-1], 7)

    # The line that calls a function first is part of what JAX lowers.
    if jax.process_index() == 0:
        check(compiled(8), 8)
    else:
        check(compiled(8), 8)
finally:
    stop.set()
    if noise.is_alive():
        noise.join()
print("programs", 2 * REPEATS + 2, flush=True)
group.close()
