"""grouped_matmul and grouped_ffn against jax.lax.ragged_dot, on CPU through Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

from jax_ep.pallas import _kernels, grouped_ffn, grouped_matmul

# Neither side is a multiple of a tile; 150 rows of 5 groups are cut into tiles of 32.
ROWS, GROUPS, HIDDEN, WIDTH = 150, 5, 72, 136
SIZES = {
    "odd": [31, 7, 65, 1, 46],
    "empty groups": [0, 33, 0, 117, 0],
    "rows beyond": [5, 0, 17, 0, 1],
    "one group": [0, 0, 150, 0, 0],
    "nothing": [0, 0, 0, 0, 0],
    "aligned": [32, 0, 64, 0, 32],
}


@pytest.fixture(autouse=True)
def _full_precision():
    """The oracles' default on GPUs is TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def ragged_ffn(x, sizes, w_gate, w_up, w_down):
    dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    return dot(jax.nn.silu(dot(x, w_gate)) * dot(x, w_up), w_down)


def random(shape, seed, dtype="float32"):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values / np.sqrt(shape[-1]), dtype)


def weights(dtype="float32"):
    wide, narrow = (GROUPS, HIDDEN, WIDTH), (GROUPS, WIDTH, HIDDEN)
    return random(wide, 1, dtype), random(wide, 2, dtype), random(narrow, 3, dtype)


def close(got, expected, tolerance):
    """Within `tolerance` of the largest expected element."""
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    scale = max(np.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale)


@functools.partial(jax.jit, static_argnums=0)
def value_and_vjp(function, cotangent, sizes, x, *kernels):
    out, pull = jax.vjp(lambda x, *kernels: function(x, sizes, *kernels), x, *kernels)
    return out, *pull(cotangent)


def kernel_matmul(x, sizes, w):
    return grouped_matmul(x, w, sizes)


def ragged_matmul(x, sizes, w):
    return jax.lax.ragged_dot(x, w, sizes)


# float32 sums of up to 150 terms in another order; bfloat16 rounds to 8 bits, some values twice.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", ["matmul", "ffn"])
def test_values_and_gradients_are_those_of_ragged_dot(op, dtype):
    ours, theirs = {
        "matmul": (kernel_matmul, ragged_matmul),
        "ffn": (grouped_ffn, ragged_ffn),
    }[op]
    kernels = weights(dtype)[: 1 if op == "matmul" else 3]
    x = random((ROWS, HIDDEN), 4, dtype)
    g = random((ROWS, kernels[-1].shape[2]), 5, dtype)
    exact = tuple(k.astype(jnp.float32) for k in kernels)
    for name, values in SIZES.items():
        sizes = jnp.array(values, jnp.int32)
        used = np.arange(ROWS)[:, None] < sum(values)
        # What lies beyond the groups must not matter, neither forward nor backward.
        dirty_x, dirty_g = (jnp.where(used, a, jnp.nan).astype(dtype) for a in (x, g))
        got = value_and_vjp(ours, dirty_g, sizes, dirty_x, *kernels)
        clean_x, clean_g = (jnp.where(used, a, 0).astype(jnp.float32) for a in (x, g))
        expected = value_and_vjp(theirs, clean_g, sizes, clean_x, *exact)
        for what, a, b in zip(["y", "x", "w", "w_up", "w_down"], got, expected, strict=False):
            assert a.dtype == jnp.dtype(dtype)
            close(a, b, TOLERANCE[dtype])
            if what in ("y", "x"):
                assert not np.any(np.asarray(a)[~used[:, 0]]), (name, what)
            else:
                assert not np.any(np.asarray(a)[np.array(values) == 0]), (name, what)


def test_the_value_has_the_same_bits_with_and_without_gradient():
    x, sizes = random((ROWS, HIDDEN), 4), jnp.array(SIZES["odd"], jnp.int32)
    alone = jax.jit(grouped_ffn)(x, sizes, *weights())
    both = value_and_vjp(grouped_ffn, x, sizes, x, *weights())[0]
    np.testing.assert_array_equal(alone, both)


def test_a_side_of_several_wide_tiles():
    """One product of 2-byte elements has tiles of 256 columns; 520 columns are three of them."""
    x, g = random((24, 40), 13, "bfloat16"), random((24, 520), 14, "bfloat16")
    w, sizes = random((2, 40, 520), 15, "bfloat16"), jnp.array([17, 6], jnp.int32)
    got = value_and_vjp(kernel_matmul, g, sizes, x, w)
    wide = [a.astype(jnp.float32) for a in (g, x, w)]
    expected = value_and_vjp(ragged_matmul, wide[0], sizes, *wide[1:])
    for a, b in zip(got, expected, strict=True):
        close(a, b, TOLERANCE["bfloat16"])


@pytest.mark.parametrize(
    ("dtype", "products", "columns", "stages_bytes"),
    [("bfloat16", 1, 256, 144), ("bfloat16", 2, 128, 144), ("float32", 1, 128, 96)],
)
def test_stages_of_tiles_fit_in_the_shared_memory_of_an_a100(
    dtype, products, columns, stages_bytes
):
    tiles = _kernels.default_tiles(65536, 64, 7168, 2048, dtype, products)
    assert tiles.columns == columns
    elements = tiles.rows * tiles.reduced + products * tiles.reduced * tiles.columns
    stages = tiles.stages * elements * jnp.dtype(dtype).itemsize
    assert stages == stages_bytes << 10 <= 163 << 10  # CUDA C++ Programming Guide, 8.0


def test_gradients_of_gradients():
    # ragged_dot has none (jax 0.10), so the oracle multiplies every row with every group.
    def dense(x, sizes, *kernels):
        ids = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")
        mine = jax.nn.one_hot(ids, sizes.shape[0], dtype=x.dtype)
        gate, up, down = kernels
        dot = functools.partial(jnp.einsum, "rg,rk,gkn->rn", mine)
        return dot(jax.nn.silu(dot(x, gate)) * dot(x, up), down)

    sizes = jnp.array([3, 0, 8], jnp.int32)
    x, g = random((13, 8), 6), random((13, 8), 7)
    kernels = random((3, 8, 16), 8), random((3, 8, 16), 9), random((3, 16, 8), 10)

    def norm(function, x, *kernels):
        out, pull = jax.vjp(lambda *args: function(args[0], sizes, *args[1:]), x, *kernels)
        return sum(jnp.sum(leaf**2) for leaf in pull(g * out))

    got, expected = (
        jax.jit(jax.grad(functools.partial(norm, function), (0, 1, 3)))(x, *kernels)
        for function in (grouped_ffn, dense)
    )
    for a, b in zip(got, expected, strict=True):
        close(a, b, 1e-5)


def test_vmap_is_a_batch_of_products():
    x, w = random((2, 24, 8), 11), random((3, 8, 16), 12)
    sizes = jnp.array([[5, 0, 11], [0, 24, 0]], jnp.int32)

    def both(x, sizes):
        out, pull = jax.vjp(lambda x: grouped_matmul(x, w, sizes), x)
        return out, pull(out)[0]

    batched = jax.jit(jax.vmap(both))(x, sizes)
    for i in range(2):
        for got, expected in zip(batched, jax.jit(both)(x[i], sizes[i]), strict=True):
            np.testing.assert_array_equal(got[i], expected)


@pytest.mark.parametrize("shape", [(0, 2, 8, 8), (4, 2, 0, 8), (4, 2, 8, 0), (4, 0, 8, 8)])
def test_empty_shapes_give_zeros(shape):
    rows, groups, hidden, width = shape
    x, w = jnp.ones((rows, hidden)), jnp.ones((groups, hidden, width))
    sizes = jnp.full((groups,), rows // 2, jnp.int32)
    out, dx, dw = value_and_vjp(kernel_matmul, jnp.ones((rows, width)), sizes, x, w)
    assert (out.shape, dx.shape, dw.shape) == ((rows, width), x.shape, w.shape)
    assert not np.any(out) and not np.any(dx) and not np.any(dw)


def triton_modules(operation):
    """The Triton modules (MLIR bytecode) that a lowered program hands to XLA."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                target = inner.operation.attributes
                if "triton" in str(target.get("call_target_name", "")):
                    config = target["mhlo.backend_config"]
                    yield ir.StringAttr(config["ir"]).value_bytes
                yield from triton_modules(inner.operation)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 10, 3), reason="newer JAX compiles Triton itself: needs a GPU"
)
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_it_lowers_to_valid_triton_kernels(platform):
    """Forward: 2 kernels. Backward: hidden, x and three weights, one each."""
    x, sizes = random((ROWS, HIDDEN), 4, "bfloat16"), jnp.array(SIZES["odd"], jnp.int32)

    def step(x, *kernels):
        return value_and_vjp(grouped_ffn, x, sizes, x, *kernels)

    traced = jax.jit(step).trace(x, *weights("bfloat16"))
    lowered = traced.lower(lowering_platforms=(platform,)).compiler_ir()
    modules = list(triton_modules(lowered.operation))
    assert len(modules) == 2 + 5
    for bytecode in modules:
        with ir.Context() as context:
            triton_dialect.register_dialect(context)
            context.load_all_available_dialects()
            assert ir.Module.parse(bytecode).operation.verify()


def test_another_platform_is_refused():
    x, sizes = random((ROWS, HIDDEN), 4), jnp.array(SIZES["odd"], jnp.int32)
    traced = jax.jit(grouped_matmul).trace(x, weights()[0], sizes)
    with pytest.raises(NotImplementedError, match="tpu"):
        traced.lower(lowering_platforms=("tpu",))


def test_mistakes_are_named():
    x, sizes = random((ROWS, HIDDEN), 4), jnp.array(SIZES["odd"], jnp.int32)
    gate, up, down = weights()
    with pytest.raises(ValueError, match=r"got w float32\[5, 136, 72\], expected float32\[5, 72"):
        grouped_matmul(x, down, sizes)
    with pytest.raises(ValueError, match=r"got w bfloat16"):
        grouped_matmul(x, gate.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match=r"got x int32\[150, 72\]"):
        grouped_matmul(x.astype(jnp.int32), gate, sizes)
    with pytest.raises(ValueError, match=r"got group_sizes float32\[5\]"):
        grouped_matmul(x, gate, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"w_down float32\[5, 72, 136\]"):
        grouped_ffn(x, sizes, gate, up, jnp.swapaxes(down, 1, 2))
