"""overlap: says which work lies beside which exchange, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_ep import _jax_compat

A = TypeVar("A")
B = TypeVar("B")


def overlap(received: A, other: B) -> tuple[A, B]:
    """Both, tied: neither is used before both are there, in the forward and in the backward pass.

    XLA starts an exchange as soon as it can and waits for it where its result is first used, but it
    moves nothing in between. What `other` is computed from does not depend on `received`, so that
    work comes before the wait: the exchange runs beside it. In the backward pass the same holds
    of the cotangents. Nothing is computed here, and no value changes. What are no arrays of floats
    is given back as it is.

    Args:
        received: a pytree, such as what `dispatch` or `combine` returned.
        other: a pytree, what was computed meanwhile.

    Returns:
        (received, other).

    Example:
        >>> recv = jax_ep.dispatch(group, x, topk_idx, topk_weights)
        >>> recv, shared = jax_ep.overlap(recv, shared_expert(x))
        >>> y = jax.lax.ragged_dot(recv.x, kernels, recv.group_sizes)
        >>> out = jax_ep.combine(group, y, recv) + shared
    """
    return _through(_tie, received, other)


def overlap_gradients(sent: A, params: B) -> tuple[A, B]:
    """Both, with their gradients tied as `overlap` ties; in the forward pass nothing is tied.

    The gradient of what is dispatched is an exchange, and those of the experts' weights do not wait
    for it: with this they are computed beside it. `moe` and the Flax layers do it themselves.

    Args:
        sent: a pytree, what is dispatched.
        params: a pytree, the experts' weights.

    Returns:
        (sent, params).

    Example:
        >>> x, kernels = jax_ep.overlap_gradients(x, kernels)
        >>> recv = jax_ep.dispatch(group, x, topk_idx, topk_weights)
        >>> y = jax.lax.ragged_dot(recv.x, kernels, recv.group_sizes)
    """
    return _through(_tie_gradients, sent, params)


def _through(tie: Callable[..., tuple[jax.Array, ...]], first: A, second: B) -> tuple[A, B]:
    """Both, whose arrays of floats went through `tie`.

    Others have no gradient, and through a custom VJP they would seem to have one.
    """
    leaves, structure = jax.tree.flatten((first, second))
    places = [
        i
        for i, leaf in enumerate(leaves)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    for place, leaf in zip(places, tie(*(leaves[i] for i in places)), strict=True):
        leaves[place] = leaf
    both: tuple[A, B] = jax.tree.unflatten(structure, leaves)
    return both


def _backward(_: None, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return _jax_compat.tie(*cotangents)


@jax.custom_vjp
def _tie(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return _jax_compat.tie(*arrays)


_tie.defvjp(lambda *arrays: (_tie(*arrays), None), _backward)


@jax.custom_vjp
def _tie_gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


_tie_gradients.defvjp(lambda *arrays: (arrays, None), _backward)
