"""The kernels as the experts of a layer: fed by recv.x and recv.group_sizes, inside shard_map."""

import functools
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.pallas import grouped_ffn, tokamax_ffn
from jax_ep.testing import make_routing

RANKS = min(4, len(jax.devices()))
TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 24, 16, 24, 8, 2
HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None


def ragged_ffn(x, sizes, w_gate, w_up, w_down):
    dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    return dot(jax.nn.silu(dot(x, w_gate)) * dot(x, w_up), w_down)


def layer_gradients(group, ffn, align):
    """Jitted: output and gradients of a layer whose experts are `ffn`."""

    def local(x, ids, gates, *kernels):
        def experts(kernels, rows, sizes):
            assert rows.shape[0] % align == 0
            return ffn(rows, sizes, *kernels)

        def loss(x, gates, kernels):
            out = jax_ep.moe(group, x, ids, gates, experts, kernels)
            return jax.lax.psum(jnp.sum(jnp.sin(out)), "ep"), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, gates, kernels)

    spec = P("ep")
    return jax.jit(jax.shard_map(local, mesh=group.mesh, in_specs=spec, out_specs=spec))


def inputs(kind):
    rng = np.random.default_rng(0)
    routing = dict(num_ranks=RANKS, num_tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS)
    x = rng.standard_normal((RANKS * TOKENS, HIDDEN)).astype(np.float32)
    gates = rng.uniform(0.1, 1, (RANKS * TOKENS, TOP_K)).astype(np.float32)
    wide, narrow = (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    kernels = [rng.standard_normal(s).astype(np.float32) * 0.2 for s in (wide, wide, narrow)]
    return x, make_routing(kind, **routing), gates, *kernels


def compare(ffn, implementation, align, capacity_factor):
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("ep",))
    config = jax_ep.Config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=TOKENS,
        align=align,
        capacity_factor=capacity_factor,
        dtype=jnp.float32,
    )
    with jax_ep.create_group(mesh, "ep", config, implementation) as group:
        ours, theirs = (layer_gradients(group, f, align) for f in (ffn, ragged_ffn))
        for kind in ("zipf", "idle_rank", "holes"):
            arguments = inputs(kind)
            got, expected = ours(*arguments), theirs(*arguments)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())


def test_grouped_ffn_gives_the_layer_of_ragged_dot(implementation):
    compare(grouped_ffn, implementation, align=8, capacity_factor=1.25)


@pytest.mark.skipif(not HAS_TOKAMAX, reason="tokamax is not installed: pip install '.[tokamax]'")
def test_tokamax_gives_the_layer_of_ragged_dot(implementation):
    compare(tokamax_ffn, implementation, align=1, capacity_factor=None)


def test_without_tokamax_the_fix_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    w = jnp.ones((1, 8, 8))
    with pytest.raises(ImportError, match=r"jax_ep\[tokamax\]"):
        tokamax_ffn(jnp.ones((4, 8)), jnp.array([4]), w, w, w)


def test_import_jax_ep_does_not_import_pallas():
    code = "import sys, jax_ep; print(any('pallas' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout == "False\n", done.stdout + done.stderr
