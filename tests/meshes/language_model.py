"""A transformer with MoE layers, its training step on a mesh, and the same on one device.

Written as a user would: global arrays under nnx.jit, XLA splits the dense part by the annotations.
The oracle is the same transformer around tests/flax/dense.py, on one device.
"""

from __future__ import annotations

import dataclasses
import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import DEEPSEEK, assert_close, group_of

from jax_ep import flax as ep_flax

CONFIG = dataclasses.replace(DEEPSEEK, num_experts=8, top_k=2, num_groups=4, top_groups=2)
VOCABULARY, LAYERS, HEADS = 32, 1, 2
BATCH, LENGTH = 8, 8
STEPS = 2
BALANCE = 0.02


@dataclasses.dataclass(frozen=True)
class MeshCase:
    """A mesh of 8 devices and what its axes do; `axes` are those of the group."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    axes: str | tuple[str, ...] = "ep"

    def __str__(self) -> str:
        return "-".join(f"{n}{s}" for n, s in zip(self.names, self.shape, strict=True))

    @property
    def placement(self):
        present = {name: name for name in ("fsdp", "tp") if name in self.names}
        return ep_flax.Placement(**present)


CASES = [
    MeshCase((2, 4), ("dp", "ep")),
    MeshCase((2, 2, 2), ("dp", "fsdp", "ep")),
    MeshCase((2, 2, 2), ("ep", "fsdp", "tp")),
    MeshCase((4, 2), ("ep", "tp")),
    MeshCase((2, 4), ("node", "gpu"), ("node", "gpu")),
]


class DenseMoE(nnx.Module):
    """The oracle with the weights and the interface of jax_ep.flax.MoE."""

    def __init__(self, weights):
        for name, value in weights.items():
            kind = ep_flax.RouterBias if name == "router_bias" else nnx.Param
            setattr(self, name, kind(value))

    def __call__(self, x):
        weights = weights_of_variables(self)
        out, balance, load = dense.moe(CONFIG, weights, x.reshape(-1, x.shape[-1]))
        return out.reshape(x.shape), ep_flax.MoEStats(balance, load, jnp.int32(0))

    def update_bias(self, load):
        mean = load.sum() / CONFIG.num_experts
        step = jnp.sign(mean - load.astype(jnp.float32))
        self.router_bias[...] = self.router_bias[...] + 1e-3 * step


def weights_of_variables(module):
    names = ("router", "router_bias", "w_gate", "w_up", "w_down")
    names += ("shared_gate", "shared_up", "shared_down")
    return {name: getattr(module, name)[...] for name in names}


class Block(nnx.Module):
    """Attention and MoE, each normalised and added."""

    def __init__(self, moe, param):
        width = CONFIG.hidden
        self.attention_norm = param(None, scale=np.ones(width, np.float32))
        self.qkv = param(("fsdp", None, "tp", None), width, 3, HEADS, width // HEADS)
        self.out = param(("tp", None, "fsdp"), HEADS, width // HEADS, width)
        self.moe_norm = param(None, scale=np.ones(width, np.float32))
        self.moe = moe

    def __call__(self, x):
        query, key, value = jnp.einsum(
            "bsh,hind->ibsnd", normed(x, self.attention_norm[...]), self.qkv[...]
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + jnp.einsum("bsnd,ndh->bsh", mixed, self.out[...])
        out, stats = self.moe(normed(x, self.moe_norm[...]))
        return x + out, stats


def normed(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


class LanguageModel(nnx.Module):
    """Tokens [B, S] to logits [B, S, V] and the layers' stats."""

    def __init__(self, make_moe, param):
        width = CONFIG.hidden
        self.embedding = param((None, "fsdp"), VOCABULARY, width)
        self.blocks = nnx.List([Block(make_moe(), param) for _ in range(LAYERS)])
        self.head = param(("fsdp", "tp"), width, VOCABULARY)

    def __call__(self, tokens):
        x = self.embedding[...][tokens]
        collected = []
        for block in self.blocks:
            x, stats = block(x)
            collected.append(stats)
        return x @ self.head[...], collected


def parameters(rng, mesh=None, case=None):
    """Makes nnx.Params from a NumPy generator, placed on the mesh if there is one."""

    def param(dims, *shape, scale=None):
        value = rng.normal(0, 0.3, shape).astype(np.float32) if scale is None else scale
        if mesh is None:
            return nnx.Param(value)
        axes = [dim if dim in case.names else None for dim in dims or ()]
        return nnx.Param(
            place(value, NamedSharding(mesh, P(*axes))), out_sharding=tuple(axes), mesh=mesh
        )

    return param


def place(value, sharding):
    """A host array, equal on all processes, as a global one."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def moe_weights(rng):
    """Weights of one layer by name."""
    config = CONFIG
    e, h, f, s = config.num_experts, config.hidden, config.expert_width, config.shared_width
    shapes = {"router": (h, e), "w_gate": (e, h, f), "w_up": (e, h, f), "w_down": (e, f, h)}
    shapes |= {"shared_gate": (h, s), "shared_up": (h, s), "shared_down": (s, h)}
    weights = {
        name: rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    return weights | {"router_bias": rng.normal(0, 0.05, e).astype(np.float32)}


def batch(step):
    return np.random.default_rng([step, 9]).integers(0, VOCABULARY, (BATCH, LENGTH + 1))


def loss(model, tokens):
    logits, stats = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean() + BALANCE * sum(s.balance_loss for s in stats), stats


@nnx.jit
def train_step(model, optimizer, tokens):
    (value, stats), gradients = nnx.value_and_grad(loss, has_aux=True)(model, tokens)
    with jax.numpy_dtype_promotion("standard"):  # which Optax relies on
        optimizer.update(model, gradients)
    for block, layer in zip(model.blocks, stats, strict=True):
        block.moe.update_bias(layer.load)
    return value, gradients, [layer.load for layer in stats]


def train(model, to_device, to_host, replicated=None):
    """STEPS training steps; what each gave: loss, loads, gradients, and the variables after it."""
    # The large epsilon keeps Adam from turning rounding of tiny gradients into whole steps.
    optimizer = nnx.Optimizer(model, optax.adamw(0.02, eps=1e-2), wrt=nnx.Param)
    if replicated is not None:  # the counters too, or the second step would be compiled anew
        state = nnx.state(optimizer)
        counters = lambda leaf: place(np.asarray(leaf), replicated) if leaf.ndim == 0 else leaf  # noqa: E731
        nnx.update(optimizer, jax.tree.map(counters, state))
    history = []
    for step in range(STEPS):
        value, gradients, loads = train_step(model, optimizer, to_device(batch(step)))
        after = nnx.state(model, (nnx.Param, ep_flax.RouterBias))
        history.append(
            to_host((value, nnx.to_pure_dict(gradients), loads, nnx.to_pure_dict(after)))
        )
    return history


@functools.cache
def oracle_history():
    """Training on one device, without any rank."""
    rng = np.random.default_rng(3)
    model = LanguageModel(lambda: DenseMoE(moe_weights(rng)), parameters(rng))
    return train(model, jnp.asarray, jax.device_get)


def mesh_history(case, mesh, to_host=jax.device_get):
    """The same training on a mesh: every array split as annotated."""
    group = group_of(CONFIG, mesh, case.axes)
    rng = np.random.default_rng(3)

    def make_moe():
        weights = moe_weights(rng)
        # The initializer sees no name, so the values are put in afterwards.
        moe = ep_flax.MoE(
            CONFIG,
            group,
            placement=case.placement,
            kernel_init=lambda key, shape, dtype: np.zeros(shape, dtype),
            rngs=nnx.Rngs(0),
        )
        for name, value in weights.items():
            variable = getattr(moe, name)
            variable[...] = place(value, variable[...].sharding)
        return moe

    model = LanguageModel(make_moe, parameters(rng, mesh, case))
    axes = case.placement.token_axes(group)
    sharding = NamedSharding(mesh, P(axes))
    replicated = NamedSharding(mesh, P())
    return train(model, lambda tokens: place(tokens, sharding), to_host, replicated)


def assert_same_training(got, wanted):
    jax.tree_util.tree_map_with_path(
        lambda path, mine, theirs: assert_close(mine, theirs, jax.tree_util.keystr(path)),
        got,
        wanted,
    )
