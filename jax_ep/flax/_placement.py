"""Placement: which mesh axes split a layer's tokens and weights, and what follows from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.flax._config import MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How a layer is sharded over its group's mesh; the group's axes split the experts.

    Args:
        tokens: PartitionSpec of x without its last dimension. None: the first dimension is split
            over every mesh axis but `tp`, in the mesh's order.
        fsdp: mesh axis that also splits the stored weights, along H. They are gathered before use,
            in the compute dtype, and their gradients are summed and scattered.
        tp: mesh axis that splits the widths of the experts. Its ranks see the same tokens, and the
            layer adds up their results.

    Example:
        >>> placement = jax_ep.flax.Placement(fsdp="fsdp", tp="tp")
    """

    tokens: P | None = None
    fsdp: str | None = None
    tp: str | None = None

    def token_spec(self, group: jax_ep.Group) -> P:
        """PartitionSpec of x without its last dimension."""
        if self.tokens is not None:
            return self.tokens
        return P(tuple(name for name in group.mesh.axis_names if name != self.tp))

    def token_axes(self, group: jax_ep.Group) -> tuple[str, ...]:
        """Mesh axes along which tokens differ."""
        return tuple(name for entry in self.token_spec(group) for name in axes_of(entry))

    def check(self, config: MoEConfig, group: jax_ep.Group) -> None:
        """Raises ValueError unless config, group and mesh fit."""
        for name in ("num_experts", "top_k", "hidden"):
            ours, theirs = getattr(config, name), getattr(group.config, name)
            if ours != theirs:
                raise ValueError(
                    f"jax_ep.flax: got MoEConfig.{name}={ours} with a group of {name}={theirs}, "
                    "expected equal values; make the group with MoEConfig.group_config(), or pass "
                    "the Group.view of one that has more"
                )
        mesh = dict(group.mesh.shape)
        for name, axis, sizes in (
            ("fsdp", self.fsdp, {"hidden": config.hidden}),
            (
                "tp",
                self.tp,
                {"expert_width": config.expert_width, "shared_width": config.shared_width},
            ),
        ):
            if axis is None:
                continue
            if axis not in mesh or axis in group.axes or self.fsdp == self.tp:
                raise ValueError(
                    f"jax_ep.flax: got Placement.{name}={axis!r}, expected a mesh axis of {mesh} "
                    f"that is neither the group's {group.axes} nor used twice"
                )
            for field, size in sizes.items():
                if size % mesh[axis]:
                    raise ValueError(
                        f"jax_ep.flax: got {field}={size}, expected a multiple of the "
                        f"{mesh[axis]} ranks of Placement.{name}={axis!r}; change one of them"
                    )
        axes = self.token_axes(group)
        unsplit = [name for name in group.axes if name not in axes]
        if unsplit or self.tp in axes or not set(axes) <= set(mesh):
            raise ValueError(
                f"jax_ep.flax: got tokens split over {axes}, expected axes of {mesh} with all of "
                f"the group's {group.axes} and without tp={self.tp!r}; change Placement.tokens"
            )

    def weight_spec(self, group: jax_ep.Group, dims: tuple[str | None, ...]) -> P:
        """PartitionSpec of a weight from what its dimensions are (see `_layer.DIMS`)."""
        experts: Any = group.axes if len(group.axes) > 1 else group.axes[0]
        axis_of = {"experts": experts, "hidden": self.fsdp, "width": self.tp, None: None}
        return P(*(axis_of[dim] for dim in dims))


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
