"""What combine takes besides y: a Received, or a Plan and weights."""

from __future__ import annotations

from typing import Any

from jax_ep import _warn
from jax_ep._ops.operands import fail
from jax_ep._types import NOT_GIVEN, Plan, Received


def resolve(
    operation: str, recv: Any, weights: Any, plan: Any, return_weights: bool = False
) -> tuple[Plan, Any]:
    """The plan to follow, and the weights: the caller's, those of `recv`, or None.

    Raises:
        ValueError: there is no plan in it, or two.
    """
    if plan is not None:
        if recv is not None:
            raise fail(operation, "both", "recv and plan", "one", "pass what dispatch returned")
        recv = plan
        _warn.warn(
            f"jax_ep.{operation}: got plan=, the old name of recv; pass it as recv",
            DeprecationWarning,
        )
    if isinstance(recv, Received):
        if weights is NOT_GIVEN:  # rank_major: y is already weighted, so they can only be returned
            is_used = recv.plan.layout != "rank_major" or return_weights
            weights = recv.weights if is_used else None
        return recv.plan, weights
    if not isinstance(recv, Plan):
        raise fail(
            operation,
            "recv",
            f"of type {type(recv).__name__}",
            "jax_ep.Received or jax_ep.Plan",
            "pass what dispatch returned",
        )
    if weights is not NOT_GIVEN:
        return recv, weights
    if recv.layout != "rank_major":  # where those of a Received would not be used either
        _warn.warn(
            f"jax_ep.{operation}: got a Plan and no weights=, so that the router's weights are not "
            "used; pass recv instead of recv.plan to use them, or weights=None for a plain sum",
            DeprecationWarning,
        )
    return recv, None
