"""Compares four ways to run the same Mixture-of-Experts layer, in time and memory.

    python -m jax_ep launch -n 4 examples/compare.py

The ways: jax_ep, `lax.ragged_all_to_all` (where XLA has it: not on CPU), dense `lax.all_to_all`
with a capacity, and `lax.all_gather` + `lax.psum_scatter`. Each is checked against all experts on
all tokens on one device: outputs and gradients. Buffers are as large as the routing of the case
needs, which only an oracle knows beforehand; so nothing is dropped. Experts are ragged_dot on
grouped rows, which XLA:CPU does with one dense product per expert, or with all_to_all an einsum on
its padded buffers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ModuleNotFoundError:
    sys.exit("matplotlib is missing; this example needs: pip install '.[examples]'")
from moe_compare import layers

ALIGN = 8
TOLERANCE = 2e-4  # of the largest element: sums in another order, in float32
OURS = "jax_ep"
COLOURS = {
    OURS: "tab:green",
    "lax.ragged_all_to_all": "tab:red",
    "lax.all_to_all": "tab:blue",
    "all_gather + psum_scatter": "tab:orange",
}
COLUMNS = ("forward_ms", "step_ms", "peak_mib")
SPEC = P(layers.AXIS)


class Arrays(NamedTuple):
    """Inputs of a case, global, in NumPy."""

    kernels: tuple[np.ndarray, ...]
    x: np.ndarray
    ids: np.ndarray
    gates: np.ndarray
    cotangent: np.ndarray


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument

    def numbers(kind: Any) -> Any:
        return lambda text: [kind(part) for part in text.split(",")]

    add("--tokens", type=numbers(int), default=[64, 128, 256, 512], help="per rank: 64,128,...")
    add("--skews", type=numbers(float), default=[0.0, 0.5, 1.0, 1.5], help="Zipf exponents")
    add("--hidden", type=int, default=256)
    add("--width", type=int, default=256, help="of an expert")
    add("--experts-per-rank", type=int, default=2)
    add("--top-k", type=int, default=2)
    add("--implementation", choices=("native", "xla"), help="of jax_ep; default: the best one")
    add("--repeats", type=int, default=7, help="the median of so many runs counts")
    add("--out", type=Path, default=Path("compare_out"), help="folder for compare.json and .png")
    return parser.parse_args()


def make_case(options: argparse.Namespace, ranks: int, tokens: int, skew: float) -> Any:
    """(Sizes, Arrays) of one case: expert e is chosen with a chance of about (1 + e)^-skew."""
    rng = np.random.default_rng(0)
    experts, rows = ranks * options.experts_per_rank, ranks * tokens
    chance = (1.0 + np.arange(experts)) ** -skew
    # Gumbel top-k draws without replacement. Popular experts are spread over the ranks' blocks.
    scores = np.log(rng.permutation(chance)) + rng.gumbel(size=(rows, experts))
    ids = np.argsort(-scores, axis=1)[:, : options.top_k].astype(np.int32)
    sent = np.stack([np.bincount(part.ravel(), minlength=experts) for part in np.split(ids, ranks)])
    rank_load = sent.sum(axis=0).reshape(ranks, -1).sum(axis=1)
    aligned = -(-sent.sum(axis=0) // ALIGN) * ALIGN
    sizes = layers.Sizes(
        ranks=ranks,
        tokens=tokens,
        hidden=options.hidden,
        width=options.width,
        experts=experts,
        top_k=options.top_k,
        rank_rows=int(aligned.reshape(ranks, -1).sum(axis=1).max()),
        expert_rows=int(sent.max()),
    )

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    wide, narrow = (experts, sizes.hidden, sizes.width), (experts, sizes.width, sizes.hidden)
    gates = rng.dirichlet(np.ones(options.top_k), size=rows).astype(np.float32)
    x, cotangent = (rng.standard_normal((rows, sizes.hidden)).astype(np.float32) for _ in range(2))
    arrays = Arrays((normal(*wide), normal(*wide), normal(*narrow)), x, ids, gates, cotangent)
    return sizes, arrays, float(rank_load.max() / rank_load.mean())


def forward_and_step(layer: layers.Layer) -> Any:
    """The layer alone, and with the gradients of <layer, cotangent>."""

    def step(arrays: Arrays) -> Any:
        def inner(kernels: Any, x: jax.Array, gates: jax.Array) -> Any:
            out = layer(kernels, x, arrays.ids, gates)
            return jnp.sum(out * arrays.cotangent), out

        gradient = jax.grad(inner, argnums=(0, 1, 2), has_aux=True)
        return gradient(arrays.kernels, arrays.x, arrays.gates)

    return lambda a: layer(a.kernels, a.x, a.ids, a.gates), step


class Measured(NamedTuple):
    """One method, compiled for one case."""

    forward: Any
    step: Any
    heap_mib: float

    def peak_mib(self) -> float:
        """What XLA reserves for a step on one device, and the exchange's own memory."""
        memory = self.step.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return (held + memory.temp_size_in_bytes) / 2**20 + self.heap_mib


def compile_method(mesh: Mesh, layer: layers.Layer, arrays: Arrays, heap_bytes: int) -> Measured:
    """Both programs, ahead of time."""

    def compiled(function: Any) -> Any:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
        return jax.jit(mapped).lower(arrays).compile()

    forward, step = (compiled(function) for function in forward_and_step(layer))
    return Measured(forward, step, heap_bytes / 2**20)


def largest_difference(got: Any, expected: Any) -> float:
    """Over this process' shards of all leaves, relative to the largest element of the leaf."""
    worst = 0.0
    for leaf, oracle in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        for shard in leaf.addressable_shards:
            error = np.abs(np.asarray(shard.data) - oracle[shard.index]).max()
            worst = max(worst, float(error / np.abs(oracle).max()))
    return worst


def seconds(program: Any, arrays: Arrays) -> float:
    """One run, all processes starting together."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("compare")
    start = time.perf_counter()
    jax.block_until_ready(program(arrays))
    return time.perf_counter() - start


def slowest(values: Any) -> np.ndarray:
    """Elementwise maximum over the processes."""
    gathered = multihost_utils.process_allgather(np.asarray(values, np.float32))
    return np.asarray(gathered).reshape(jax.process_count(), *np.shape(values)).max(axis=0)


def run_case(options: argparse.Namespace, mesh: Mesh, tokens: int, skew: float) -> list[dict]:
    """One row of results per method."""
    sizes, host, busiest = make_case(options, mesh.size, tokens, skew)
    sharding = NamedSharding(mesh, SPEC)
    arrays = jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), host
    )
    oracle = jax.device_get(jax.jit(forward_and_step(layers.dense(sizes))[1])(host))
    config = jax_ep.Config(
        num_experts=sizes.experts,
        top_k=sizes.top_k,
        hidden=sizes.hidden,
        max_tokens=sizes.tokens,
        recv_rows=sizes.rank_rows,
        align=ALIGN,
        dtype=jnp.float32,
    )
    with jax_ep.create_group(mesh, layers.AXIS, config, options.implementation) as group:
        heap = group.heap_bytes // max(1, len(group.local_ranks))
        candidates = {
            OURS: (layers.with_jax_ep(sizes, group), heap),
            "lax.ragged_all_to_all": (layers.with_ragged_all_to_all(sizes), 0),
            "lax.all_to_all": (layers.with_all_to_all(sizes), 0),
            "all_gather + psum_scatter": (layers.with_all_gather(sizes), 0),
        }
        methods, results = {}, []
        for name, (layer, heap_bytes) in candidates.items():
            try:
                methods[name] = compile_method(mesh, layer, arrays, heap_bytes)
            except jax.errors.JaxRuntimeError as error:
                if "UNIMPLEMENTED" not in str(error):
                    raise
                results.append({"method": name, "left_out": "XLA has none on this platform"})
        # The differences first, which also warms up; then the methods take turns.
        differences = [largest_difference(m.step(arrays), oracle) for m in methods.values()]
        for method in methods.values():
            method.forward(arrays)
        times = [
            [(seconds(m.forward, arrays), seconds(m.step, arrays)) for m in methods.values()]
            for _ in range(options.repeats)
        ]
        medians = np.median(slowest(times), axis=0)
        worst = slowest(differences)
        group.check()
    for i, (name, method) in enumerate(methods.items()):
        results.append(
            {
                "method": name,
                "forward_ms": float(medians[i, 0]) * 1e3,
                "step_ms": float(medians[i, 1]) * 1e3,
                "peak_mib": method.peak_mib(),
                "difference": float(worst[i]),
                "equal": bool(worst[i] <= TOLERANCE),
            }
        )
    return [{"tokens": tokens, "skew": skew, "busiest": busiest, **row} for row in results]


def print_rows(rows: list[dict]) -> None:
    """The table's lines of one case."""
    for row in rows:
        start = f"{row['tokens']:6d} {row['skew']:5.2f} {row['busiest']:7.2f}  {row['method']:26s}"
        if "left_out" in row:
            print(f"{start} left out: {row['left_out']}")
            continue
        verdict = "equal" if row["equal"] else f"DIFFERS by {row['difference']:.1e}"
        values = "".join(f"{row[column]:12.2f}" for column in COLUMNS)
        print(f"{start}{values}  {verdict}", flush=True)


def draw(rows: list[dict], sweeps: dict[str, list], path: Path) -> None:
    """Step time and peak memory against tokens and against skew."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    titles = {"step_ms": "forward + backward, ms", "peak_mib": "peak memory of a rank, MiB"}
    for column, (variable, cases) in enumerate(sweeps.items()):
        for line, (value, title) in enumerate(titles.items()):
            axis = axes[line, column]
            shown = [r for r in rows if (r["tokens"], r["skew"]) in cases and value in r]
            for method in dict.fromkeys(r["method"] for r in shown):
                own = sorted((r[variable], r[value]) for r in shown if r["method"] == method)
                style = {"color": COLOURS[method], "linewidth": 2.5 if method == OURS else 1.5}
                axis.plot(*zip(*own, strict=True), marker="o", label=method, **style)
            axis.set_ylim(bottom=0)
            axis.set_xlabel("tokens per rank" if variable == "tokens" else "skew (Zipf exponent)")
            axis.set_ylabel(title)
    axes[0, 0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    """Runs the comparison; the exit code is 1 if jax_ep's results differ from the oracle's."""
    options = parse_options()
    if not jax.distributed.is_initialized():
        jax_ep.initialize()
    jax.config.update("jax_default_matmul_precision", "highest")  # TF32 would hide differences
    mesh = Mesh(np.array(jax.devices()), (layers.AXIS,))
    sweeps = {
        "tokens": [(tokens, options.skews[0]) for tokens in options.tokens],
        "skew": [(options.tokens[-1], skew) for skew in options.skews],
    }
    is_first = jax.process_index() == 0
    if is_first:
        print(
            f"{mesh.size} ranks in {jax.process_count()} processes, "
            f"{mesh.devices.flat[0].platform}; hidden {options.hidden}, expert width "
            f"{options.width}, {options.experts_per_rank} experts per rank, top {options.top_k}\n"
            "tokens  skew busiest  method                      forward ms     step ms    peak MiB"
        )
    rows: list[dict] = []
    for case in dict.fromkeys([*sweeps["tokens"], *sweeps["skew"]]):
        rows += run_case(options, mesh, *case)
        if is_first:
            print_rows(rows[-sum((r["tokens"], r["skew"]) == case for r in rows) :])
    if is_first:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "compare.json").write_text(json.dumps(rows, indent=1) + "\n")
        draw(rows, sweeps, options.out / "compare.png")
        print(f"compare.json and compare.png are in {options.out}")
    return 0 if all(r["equal"] for r in rows if r["method"] == OURS) else 1


if __name__ == "__main__":
    sys.exit(main())
