"""grouped_ffn_fp8 against a loop over groups in NumPy, and its gradients against those of dtype."""

import dataclasses
import re

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect
from test_grouped import close, random, triton_modules

import jax_ep
from jax_ep import _fp8_format
from jax_ep.pallas import _kernels, grouped_ffn, grouped_ffn_fp8

ROWS, GROUPS, HIDDEN, WIDTH = 70, 4, 64, 40  # the last block of the width is a part
SIZES = {"odd": [21, 7, 0, 35], "rows beyond": [5, 0, 17, 0], "nothing": [0, 0, 0, 0]}
FORMATS = {
    "f32": jax_ep.FP8(block=32),
    "ue8m0": jax_ep.FP8(block=64, scale="ue8m0"),
}


def received(rows, fmt, layout="rows"):
    values, scales = jax_ep.fp8.quantize(rows, fmt)
    if layout == "columns":
        scales = scales.T
    return jax_ep.Quantized(values, scales, jnp.zeros_like(rows), layout)


GOOD = received(jnp.ones((8, HIDDEN)), FORMATS["f32"])


def weights(dtype="float32", hidden=HIDDEN, width=WIDTH, groups=GROUPS):
    wide, narrow = (groups, hidden, width), (groups, width, hidden)
    return random(wide, 1, dtype), random(wide, 2, dtype), random(narrow, 3, dtype)


def blocks_of(matrix, fmt):
    """What is left of a matrix [K, N] after quantize_weights: each square block as one row."""
    matrix, block = np.asarray(matrix), fmt.block
    (rows, columns), missing = matrix.shape, [(0, -size % block) for size in matrix.shape]
    padded = np.pad(matrix, missing)
    grid = (padded.shape[0] // block, block, padded.shape[1] // block, block)
    flat = padded.reshape(grid).swapaxes(1, 2).reshape(-1, block * block)
    back = fp8_oracle.travelled(flat, block * block, fmt.scale)
    back = back.reshape(grid[0], grid[2], block, block).swapaxes(1, 2)
    return back.reshape(padded.shape)[:rows, :columns]


def expected_ffn(rows, sizes, w_gate, w_up, w_down, fmt):
    x = fp8_oracle.travelled(np.asarray(rows), fmt.block, fmt.scale)
    out = np.zeros(rows.shape, np.float32)
    begin = 0
    for g, size in enumerate(sizes):
        mine = x[begin : begin + size]
        gate, up = mine @ blocks_of(w_gate[g], fmt), mine @ blocks_of(w_up[g], fmt)
        hidden = gate / (1 + np.exp(-gate)) * up
        padded = np.pad(hidden, ((0, 0), (0, -WIDTH % fmt.block)))
        hidden = fp8_oracle.travelled(padded, fmt.block, fmt.scale)[:, :WIDTH]
        out[begin : begin + size] = hidden @ blocks_of(w_down[g], fmt)
        begin += size
    return out


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_in_fp8(sizes, fmt):
    rows = random((ROWS, HIDDEN), 0) * 8
    rows = rows.at[sum(sizes) :].set(jnp.nan)  # rows of no group
    layout = "columns" if fmt.scale == "ue8m0" else "rows"
    got = jax.jit(grouped_ffn_fp8)(received(rows, fmt, layout), jnp.array(sizes), *weights())
    wanted = expected_ffn(jnp.nan_to_num(rows), sizes, *weights(), fmt)
    # The hidden activation is rounded to FP8: a sum in another order may round to the next value.
    close(got, wanted, 0.01)
    error = np.abs(np.asarray(got) - wanted)
    assert np.median(error) <= 1e-6 * max(np.abs(wanted).max(), 1)
    assert not np.asarray(got)[sum(sizes) :].any()


class OldGpu:
    platform = "gpu"
    compute_capability = "8.0"


def test_gpus_without_fp8_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [OldGpu()])
    with pytest.raises(NotImplementedError, match=r"capability 8.0, expected at least 8.9"):
        grouped_ffn_fp8(received(jnp.ones((8, HIDDEN)), FORMATS["f32"]), jnp.array([8]), *weights())


def cosine(a, b):
    a, b = (np.asarray(each, np.float64).ravel() for each in (a, b))
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_layer_in_dtype(dtype):
    hidden, width, sizes = 128, 128, jnp.array([40, 0, 24])
    rows = random((64, hidden), 5, dtype) * 8
    kernels = weights(dtype, hidden, width, 3)
    g = random((64, hidden), 6, dtype) * jnp.asarray(1e-5, dtype)  # float8 would flush it

    def in_fp8(carrier, *kernels):
        x = received(rows, jax_ep.FP8())
        x = jax_ep.Quantized(x.values, x.scales, carrier, "rows")
        return grouped_ffn_fp8(x, sizes, *kernels)

    def plain(rows, *kernels):
        return grouped_ffn(rows, sizes, *kernels)

    out, pull = jax.vjp(jax.jit(in_fp8), jnp.zeros_like(rows), *kernels)
    wanted_out, wanted_pull = jax.vjp(jax.jit(plain), rows, *kernels)
    assert out.dtype == dtype and cosine(out, wanted_out) >= 0.998
    for mine, theirs in zip(pull(g), wanted_pull(g), strict=True):
        assert mine.dtype == dtype and cosine(mine, theirs) >= 0.999


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 10, 3), reason="newer JAX compiles Triton itself: needs a GPU"
)
@pytest.mark.parametrize("width", [WIDTH, 8])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_it_lowers_for_cuda_to_products_of_fp8_tiles(fmt, width):
    """One kernel per layer. The tensor cores' FP8 products are 32 deep: less would be padded."""
    x = received(random((ROWS, HIDDEN), 0, "bfloat16"), fmt)
    kernels = weights("bfloat16", width=width)
    traced = jax.jit(grouped_ffn_fp8).trace(x, jnp.array(SIZES["odd"]), *kernels)
    lowered = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    depths = []
    for bytecode in triton_modules(lowered.operation):
        with ir.Context() as context:
            triton_dialect.register_dialect(context)
            context.load_all_available_dialects()
            module = ir.Module.parse(bytecode)
            assert module.operation.verify()
            products = re.findall(r"tt\.dot .*", str(module))
        tiles = [re.search(r"x(\d+)xf8E4M3FN> \* tensor<\1x\d+xf8E4M3FN>", p) for p in products]
        depths.append([int(tile[1]) for tile in tiles])
    assert [len(each) for each in depths] == [2, 1]
    assert min(min(each) for each in depths) >= 32


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (jnp.ones((8, HIDDEN)), "got x of type .*expected a jax_ep.Quantized"),
        (received(jnp.ones((8, 96)), jax_ep.FP8(block=48)), "got blocks of 48, expected"),
        (received(jnp.ones((8, HIDDEN)), jax_ep.FP8(block=16)), "got blocks of 16, expected .* 32"),
        (GOOD, r"grouped_ffn_fp8: got w_gate"),
        (dataclasses.replace(GOOD, scales=GOOD.scales[:4]), r"scales \[4, 2\] in rows, expected"),
        (dataclasses.replace(GOOD, values=GOOD.values[:4]), r"got values float8_e4m3fn\[4, 64\]"),
        (dataclasses.replace(GOOD, scales_layout="columns"), r"scales \[8, 2\] in columns"),
        (
            jax.tree.map(lambda leaf: leaf[None], GOOD),
            r"got x float32\[1, 8, 64\], expected \[R, H\]",
        ),
    ],
)
def test_misuse(x, message):
    hidden = x.carrier.shape[-1] if isinstance(x, jax_ep.Quantized) and x is not GOOD else 32
    with pytest.raises(ValueError, match=message):
        grouped_ffn_fp8(x, jnp.array(SIZES["odd"]), *weights(hidden=hidden))


def test_the_least_block_of_products_is_their_least_depth():
    assert _fp8_format.MIN_PRODUCT_BLOCK == _kernels.MIN_FP8_DEPTH
