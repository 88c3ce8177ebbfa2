"""Small layers on virtual devices, and what the dense oracle says about them."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jax_ep
from jax_ep import flax as ep_flax

SMALL = dict(num_experts=8, top_k=2, hidden=16, expert_width=24)
MIXTRAL = dataclasses.replace(ep_flax.presets.MIXTRAL_8X7B, **SMALL)
QWEN3 = dataclasses.replace(ep_flax.presets.QWEN3_30B_A3B, **SMALL | dict(num_experts=16, top_k=4))
DEEPSEEK = dataclasses.replace(
    ep_flax.presets.DEEPSEEK_V3,
    **SMALL | dict(num_experts=16, top_k=4, shared_width=8),
)
MAX_TOKENS = 64


def mesh_of(shape, names=("ep",), **options) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, **options)


def random_init(key, shape, dtype):
    """Drawn by NumPy: JAX's own generator is compiled for every shape."""
    seed = np.asarray(jax.random.key_data(key)).ravel()
    return np.random.default_rng(seed).normal(0, shape[-2] ** -0.5, shape).astype(dtype)


_groups: list[jax_ep.Group] = []


def group_of(config, mesh, axis="ep", implementation=None, **options) -> jax_ep.Group:
    """A group that lives until the end of the test module; native where it is built."""
    options = {"dtype": jnp.float32, "align": 4, "timeout_s": 60.0} | options
    if implementation is None and importlib.util.find_spec("jax_ep._core") is None:
        implementation = "xla"
    settings = config.group_config(max_tokens=MAX_TOKENS, **options)
    return keep(jax_ep.create_group(mesh, axis, settings, implementation))


def keep(group: jax_ep.Group) -> jax_ep.Group:
    """Closes `group` at the end of the test module."""
    _groups.append(group)
    return group


def close_groups() -> None:
    while _groups:
        _groups.pop().close()


@pytest.fixture(autouse=True, scope="module")
def cheap_compiles_and_closed_groups() -> Iterator[None]:
    """For conftest.py: most of the time is compilation, of code that runs once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    close_groups()


def moe_of(config, group, seed=0, **options) -> ep_flax.MoE:
    moe = ep_flax.MoE(config, group, kernel_init=random_init, rngs=nnx.Rngs(seed), **options)
    if config.has_bias:  # as balancing leaves it: not zero
        spread = np.linspace(-0.1, 0.1, config.num_experts, dtype=np.float32)
        moe.router_bias[...] = jax.device_put(spread, moe.router_bias[...].sharding)
    return moe


def tokens_of(shape, seed=0):
    return np.random.default_rng([seed, 5]).standard_normal(shape).astype(np.float32)


def weights_of(module) -> dict[str, np.ndarray]:
    """The layer's weights by name, on the host."""
    flat = nnx.to_flat_state(nnx.state(module, (nnx.Param, ep_flax.RouterBias)))
    return {path[-1]: jax.device_get(variable[...]) for path, variable in flat}


def dense_loss(config, weights, x):
    """What `loss` gives, by the oracle; x [..., H]."""
    out, balance, load = dense.moe(config, weights, x.reshape(-1, x.shape[-1]))
    return jnp.sum(jnp.sin(out)) + balance, (out.reshape(x.shape), load)


def loss(moe, x):
    out, stats = moe(x)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))) + stats.balance_loss, (out, stats)


def assert_close(got, wanted, what=""):
    """Equal up to the rounding of sums taken in another order, at the scale of the array."""
    wanted = np.asarray(wanted)
    bound = 3e-6 * max(1.0, float(np.abs(wanted).max(initial=0.0)))
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=2e-5, atol=bound, err_msg=what)
