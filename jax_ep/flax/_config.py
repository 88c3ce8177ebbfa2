"""MoEConfig: the shape of one MoE layer, independent of the mesh it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

import jax_ep
from jax_ep._config import is_count

Router = Literal["softmax", "sigmoid_bias", "group_limited"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """What fixes a layer's parameters and its math; frozen, hashable, validated.

    Args:
        num_experts: routed experts E.
        top_k: experts K of a token.
        hidden: elements H of a token.
        expert_width: elements F between the two matrices of a routed expert.
        router: "softmax" (`routing.topk_softmax`), "sigmoid_bias" (`routing.topk_sigmoid_bias`) or
            "group_limited" (`routing.group_limited_topk` with the bias). The last two have a
            balancing bias f32[E], which no gradient trains: see `updated_bias`.
        normalize: softmax only: make the K weights of a token add up to 1.
        scale: factor on the routed experts' weights.
        num_groups: group_limited only: equal groups that the experts are split into.
        top_groups: group_limited only: groups that a token may use.
        shared_width: width of the shared expert, which every token visits; n shared experts of
            width F are one of width n * F. 0: none.
        gated: experts compute down(activation(gate(x)) * up(x)); without it down(activation(up(x)))
            and there is no gate matrix.
        activation: elementwise function of the experts.

    Raises:
        ValueError: a field is out of range; says got, expected and the fix.

    Example:
        >>> config = jax_ep.flax.MoEConfig(
        ...     num_experts=8, top_k=2, hidden=64, expert_width=128, router="sigmoid_bias"
        ... )
    """

    num_experts: int
    top_k: int
    hidden: int
    expert_width: int
    router: Router = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    shared_width: int = 0
    gated: bool = True
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu

    def __post_init__(self) -> None:
        """Validates what needs no mesh."""
        for name in ("num_experts", "top_k", "hidden", "expert_width", "num_groups", "top_groups"):
            if not is_count(getattr(self, name)):
                raise _bad(name, getattr(self, name), "an int of at least 1")
        if self.top_k > self.num_experts:
            raise _bad("top_k", self.top_k, f"at most {self.num_experts} experts")
        if not is_count(self.shared_width, minimum=0):
            expected = "an int of at least 0; 0 means no shared expert"
            raise _bad("shared_width", self.shared_width, expected)
        if self.router not in get_args(Router):
            raise _bad("router", self.router, f"one of {get_args(Router)}")
        if self.router != "group_limited" and (self.num_groups, self.top_groups) != (1, 1):
            groups = (self.num_groups, self.top_groups)
            raise _bad(
                "(num_groups, top_groups)",
                groups,
                f"(1, 1) with router={self.router!r}; use router='group_limited'",
            )
        if self.num_experts % self.num_groups:
            raise _bad("num_groups", self.num_groups, f"a divisor of {self.num_experts}")
        in_reach = self.num_experts // self.num_groups * self.top_groups
        if self.top_groups > self.num_groups or in_reach < self.top_k:
            raise _bad(
                "top_groups",
                self.top_groups,
                f"groups that hold top_k={self.top_k} experts, of {self.num_groups}",
            )

    @property
    def has_bias(self) -> bool:
        """Whether the router chooses with a balancing bias."""
        return self.router != "softmax"

    def group_config(self, *, max_tokens: int, **options: Any) -> jax_ep.Config:
        """The `jax_ep.Config` of a group for this layer.

        Args:
            max_tokens: largest number of tokens per rank and call.
            **options: further fields of `jax_ep.Config`, such as dtype or capacity_factor.

        Returns:
            The Config.

        Raises:
            ValueError: as `jax_ep.Config`.

        Example:
            >>> group = jax_ep.create_group(mesh, "ep", config.group_config(max_tokens=4096))
        """
        return jax_ep.Config(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=max_tokens,
            **options,
        )


def _bad(name: str, got: object, expected: str) -> ValueError:
    return ValueError(f"MoEConfig.{name}: got {got!r}, expected {expected}")
