"""The experts' products on one GPU: grouped_ffn, forward and backward, beside one dense product.

    python benchmarks/run_products.py

Writes results/products_1xh200.json. Shape: DeepSeek-V3's experts (hidden 7,168, width 2,048) and
65,536 rows, as one of two ranks has them with 8,192 tokens. The programs take turns; times are
medians on the host's clock of executions of several milliseconds. The clock and the power of the
GPU are read while each program runs for a second, as its rate follows them.
"""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
from run_cpu import HERE, stamp
from specs import file_name_of, machine

from jax_ep.pallas import grouped_ffn

ROWS, HIDDEN, WIDTH = 65_536, 7_168, 2_048
FLOPS = 9 * 2 * ROWS * HIDDEN * WIDTH  # three products forward, six backward
ALIGN = 16  # of a group's size, as Config.align


def group_sizes(num_groups, kind):
    if kind == "equal":
        return np.full(num_groups, ROWS // num_groups, np.int32)
    rng = np.random.default_rng(1)
    return (rng.multinomial(ROWS, np.ones(num_groups) / num_groups) // ALIGN * ALIGN).astype("i4")


@functools.partial(jax.jit, static_argnums=(0, 1))
def random(shape, seed):
    """bf16, a slice at a time: float32 copies of all weights would not fit beside them."""
    keys = jax.random.split(jax.random.key(seed), shape[0])
    draw = functools.partial(jax.random.normal, shape=shape[1:], dtype=jnp.bfloat16)
    return jax.lax.map(lambda key: draw(key) * shape[1] ** -0.5, keys)


def grouped(x, g, w_gate, w_up, w_down, sizes):
    ffn = functools.partial(lambda sizes, x, *w: grouped_ffn(x, sizes, *w), sizes)
    y, pull = jax.vjp(ffn, x, w_gate, w_up, w_down)
    return y, pull(g)


def seconds(program, arguments):
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start


def busy(program, arguments):
    """Clock in MHz and power in W after a second of `program`."""
    end = time.perf_counter() + 1
    while time.perf_counter() < end:
        jax.block_until_ready(program(*arguments))
    pending = [program(*arguments) for _ in range(4)]
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    first = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    jax.block_until_ready(pending)
    clock, power = first.split(",")
    return {"mhz": int(clock), "watts": float(power)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--commit", help="where there is no repository")
    options = parser.parse_args()
    x, g = random((ROWS, HIDDEN), 0), random((ROWS, HIDDEN), 1)
    times, clocks = {}, {}

    def measure(name, program, arguments, turn):
        taken = seconds(program, arguments)
        if turn:  # the first compiles
            times.setdefault(name, []).append(taken)

    # As many operations in one product that every library has: what the GPU can do.
    dense, wide = jax.jit(jnp.matmul), random((HIDDEN, 9 * WIDTH), 5)
    for turn in range(options.repeats + 1):
        measure("one dense product", dense, (x, wide), turn)
    clocks["one dense product"] = busy(dense, (x, wide))
    del wide
    for num_groups in (64, 128):
        wide, narrow = (num_groups, HIDDEN, WIDTH), (num_groups, WIDTH, HIDDEN)
        weights = random(wide, 2), random(wide, 3), random(narrow, 4)
        kinds = ("random", "equal")
        sizes = {kind: jnp.asarray(group_sizes(num_groups, kind)) for kind in kinds}
        program = jax.jit(grouped)
        for turn in range(options.repeats + 1):
            for kind in kinds:
                name = f"{num_groups} groups, {kind}"
                measure(name, program, (x, g, *weights, sizes[kind]), turn)
        clocks[f"{num_groups} groups, random"] = busy(program, (x, g, *weights, sizes["random"]))
        del weights
    report = stamp(options.commit) | {
        "machine": machine(1)["machine"],
        "program": "run_products.py",
        "rows, hidden, width": [ROWS, HIDDEN, WIDTH],
        "forward and backward": {
            name: {
                "ms": round(statistics.median(taken) * 1e3, 2),
                "tflops": round(FLOPS / statistics.median(taken) / 1e12),
            }
            for name, taken in times.items()
        },
        "while it runs": clocks,
    }
    print(json.dumps(report, indent=1))
    name = file_name_of(report["machine"])
    (options.out / f"products_{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
