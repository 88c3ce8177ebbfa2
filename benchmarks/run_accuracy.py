"""What FP8 changes in results: of rows, of a layer, and of the README's training.

    NPROC=32 python benchmarks/run_accuracy.py [--steps 500]

Writes results/accuracy_cpu.json. The package must be installed with the extra `examples`.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from run_cpu import HERE, stamp
from run_example import trained

import jax_ep
from jax_ep import flax as ep_flax

WIRES = {"fp8": jax_ep.FP8(), "fp8-ue8m0": jax_ep.FP8(scale="ue8m0")}
ROWS, HIDDEN = 1024, 7168
LAYER = dataclasses.replace(
    ep_flax.presets.MIXTRAL_8X7B, num_experts=8, top_k=2, hidden=256, expert_width=256
)
RANKS, TOKENS, DRAWS = 4, 16, 3  # tokens of a rank


def cosine(a, b):
    a, b = (np.asarray(each, np.float64).ravel() for each in (a, b))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def rows_there_and_back():
    """Of normal random numbers, by the kind of scales."""
    x = np.random.default_rng(0).standard_normal((ROWS, HIDDEN), np.float32)
    found = {}
    for name, fmt in WIRES.items():
        back = np.asarray(jax_ep.fp8.dequantize(*jax_ep.fp8.quantize(jnp.asarray(x), fmt)))
        error = np.sqrt(np.mean((back - x) ** 2) / np.mean(x**2))
        found[name] = {"cosine": cosine(back, x), "rms_error_percent": 100 * float(error)}
    return found


def pulled(moe, x, cotangent):
    """(out, gradients of the weights, gradient of x) for this cotangent of out."""
    graph, weights = nnx.split(moe)

    @jax.jit
    def pull(weights, x):
        out, back = jax.vjp(lambda weights, x: nnx.merge(graph, weights)(x)[0], weights, x)
        return out, *back(cotangent.astype(out.dtype))

    return pull(weights, x)


def layer_in_fp8():
    """Cosines of the layer with precision="fp8" and that in bfloat16, the least of all draws."""
    mesh = jax.make_mesh((RANKS,), ("ep",))
    config = LAYER.group_config(max_tokens=TOKENS, dtype=jnp.bfloat16, align=4)
    least = {}
    with jax_ep.create_group(mesh, "ep", config) as group:
        for draw in range(DRAWS):
            rng = np.random.default_rng(draw)
            x, g = rng.standard_normal((2, RANKS * TOKENS, LAYER.hidden), np.float32)
            (out, grads, d_x), (wanted_out, wanted, wanted_x) = (
                pulled(ep_flax.MoE(LAYER, group, precision=p, rngs=nnx.Rngs(draw)), x, g)
                for p in ("fp8", None)
            )
            pairs = {"out": (out, wanted_out), "gradient of x": (d_x, wanted_x)}
            for name in ("w_gate", "w_up", "w_down", "router"):
                mine, theirs = (each[name][...] for each in (grads, wanted))
                pairs[f"gradient of {name}"] = (mine, theirs)
            for name, pair in pairs.items():
                least[name] = min(cosine(*pair), least.get(name, 1.0))
    return least


def training(steps):
    """The README's training with each wire."""
    found = {}
    for wire in ("dtype", *WIRES):
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            result, _ = trained(folder, "--steps", steps, "--wire", wire)
        found[wire] = result["held_out_nats_per_byte"]
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "accuracy_cpu.json")
    options = parser.parse_args()
    record = stamp()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    record["rows, there and back"] = rows_there_and_back()
    record["layer in fp8, cosines with bfloat16"] = layer_in_fp8()
    record[f"held-out nats per byte after {options.steps} steps"] = training(options.steps)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
