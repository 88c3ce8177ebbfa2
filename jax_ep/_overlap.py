"""overlap: says which work lies beside which exchange, forward and backward."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from jax_ep import _jax_compat

A = TypeVar("A")
B = TypeVar("B")


def overlap(received: A, other: B) -> tuple[A, B]:
    """Both, tied: neither is used before both are there, in the forward and in the backward pass.

    XLA starts an exchange as soon as it can and waits for it where its result is first used, but it
    moves nothing in between. What `other` is computed from does not depend on `received`, so that
    work comes before the wait: the exchange runs beside it. In the backward pass the same holds
    of the cotangents. Nothing is computed here, and no value changes.

    Args:
        received: a pytree, such as what `dispatch` or `combine` returned.
        other: a pytree, what was computed meanwhile.

    Returns:
        (received, other).

    Example:
        >>> recv, shared = jax_ep.overlap(jax_ep.dispatch(group, x, ids, weights), shared_expert(x))
        >>> y = experts(recv.x, recv.group_sizes)
        >>> out = jax_ep.combine(group, y, recv) + shared
    """
    tied: tuple[A, B] = _tie((received, other))
    return tied


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
        >>> recv = jax_ep.dispatch(group, x, ids, weights)
        >>> y = jax.lax.ragged_dot(recv.x, kernels, recv.group_sizes)
    """
    tied: tuple[A, B] = _tie_gradients((sent, params))
    return tied


@jax.custom_vjp
def _tie(trees: Any) -> Any:
    leaves, structure = jax.tree.flatten(trees)
    return jax.tree.unflatten(structure, _jax_compat.tie(*leaves))


def _forward(trees: Any) -> tuple[Any, None]:
    return _tie(trees), None


def _backward(_: None, cotangents: Any) -> tuple[Any]:
    leaves, structure = jax.tree.flatten(cotangents)
    places = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    for place, leaf in zip(places, _jax_compat.tie(*(leaves[i] for i in places)), strict=True):
        leaves[place] = leaf
    return (jax.tree.unflatten(structure, leaves),)


_tie.defvjp(_forward, _backward)


@jax.custom_vjp
def _tie_gradients(trees: Any) -> Any:
    return trees


_tie_gradients.defvjp(lambda trees: (trees, None), _backward)
