"""Placement: in which slots of which ranks an expert lives, as arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_ep import _config, _jax_compat


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where the experts of one layer live: data, so that another one compiles nothing.

    A group of N ranks has P = Config.physical_experts expert slots; slot p is on rank
    p // (P / N). Each slot holds one of E = num_experts experts, and an expert that is in several
    has as many replicas, which share its pairs. A pytree, equal on all ranks of the group. Build
    one with `identity`, `from_physical` or `jax_ep.eplb.rebalance`; all of one E and P have equal
    shapes.

    Args:
        physical_to_logical: i32[P], the expert in each slot.
        logical_to_physical: i32[E, X], the slots of each expert, then -1. X is the largest number
            of replicas, at most.
        replica_counts: i32[E], how many slots each expert has, at least 1.

    Raises:
        ValueError: concrete arrays that contradict each other; an expert without a slot. Traced
            arrays are not looked at.

    Example:
        >>> placement = jax_ep.Placement.from_physical([0, 1, 2, 3, 2, 2], num_experts=4)
        >>> placement.replica_counts.tolist()
        [1, 1, 3, 1]
    """

    physical_to_logical: Any
    logical_to_physical: Any
    replica_counts: Any

    def __post_init__(self) -> None:
        """Checks arrays whose values are here, and keeps those as NumPy's i32."""
        arrays = [getattr(self, name) for name in _FIELDS]
        if all(_is_concrete(array) for array in arrays):
            checked = [_integers(name, array) for name, array in zip(_FIELDS, arrays, strict=True)]
            _check_maps(*checked)
            for name, array in zip(_FIELDS, checked, strict=True):
                object.__setattr__(self, name, array.astype(np.int32))

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.replica_counts.shape[-1])

    @property
    def physical_experts(self) -> int:
        """P."""
        return int(self.physical_to_logical.shape[-1])

    @classmethod
    def identity(cls, num_experts: int, physical_experts: int | None = None) -> Placement:
        """Expert p % E in slot p: as without a placement; slots beyond E hold replicas.

        Args:
            num_experts: E.
            physical_experts: P; None: E, no replicas.

        Returns:
            A `Placement` of NumPy arrays.

        Raises:
            ValueError: fewer slots than experts.

        Example:
            >>> jax_ep.Placement.identity(4, 6).physical_to_logical.tolist()
            [0, 1, 2, 3, 0, 1]
        """
        slots = num_experts if physical_experts is None else physical_experts
        _check_count("num_experts", num_experts)
        _check_count("physical_experts", slots)
        return cls.from_physical(np.arange(slots) % num_experts, num_experts)

    @classmethod
    def from_physical(cls, physical_to_logical: Any, num_experts: int) -> Placement:
        """The placement with expert `physical_to_logical[p]` in slot p.

        Args:
            physical_to_logical: integers [P].
            num_experts: E.

        Returns:
            A `Placement` of NumPy arrays, with X = P - E + 1.

        Raises:
            ValueError: an expert without a slot, or a slot without an expert.

        Example:
            >>> jax_ep.Placement.from_physical([2, 0, 1, 0], 3).logical_to_physical.tolist()
            [[1, 3], [2, -1], [0, -1]]
        """
        _check_count("num_experts", num_experts)
        slots = _integers("physical_to_logical", physical_to_logical)
        _check_slots(slots, num_experts)
        counts = np.bincount(slots, minlength=num_experts)
        maps = np.full((num_experts, slots.size - num_experts + 1), -1, np.int32)
        order = np.argsort(slots, kind="stable")
        replica = np.arange(slots.size) - np.repeat(np.cumsum(counts) - counts, counts)
        maps[slots[order], replica] = order
        return cls(slots, maps, counts)


def _is_concrete(array: Any) -> bool:
    if isinstance(array, jax.Array):
        return not isinstance(array, jax.core.Tracer) and array.is_fully_addressable
    return isinstance(array, (np.ndarray, list, tuple))


def require(
    who: str,
    placement: object,
    fix: str = "build one with jax_ep.Placement.from_physical",
) -> None:
    """ValueError unless it is a Placement; `who` asks, `fix` says where to get one."""
    if not isinstance(placement, Placement):
        raise ValueError(
            f"{who}: got placement of type {type(placement).__name__}, expected a "
            f"jax_ep.Placement; {fix}"
        )


def _wrong(what: str, expected: str, fix: str) -> ValueError:
    return ValueError(f"jax_ep.Placement: got {what}, expected {expected}; {fix}")


def _check_count(name: str, value: object) -> None:
    if not _config.is_count(value):
        raise _wrong(f"{name}={value!r}", "an int of at least 1", f"pass Config.{name}")


def _integers(name: str, array: Any) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = np.asarray(array)
    if not np.issubdtype(values.dtype, np.integer):
        raise _wrong(f"{name} of {values.dtype}", "integers", "cast it to int32")
    return values


def _check_slots(slots: np.ndarray[Any, Any], num_experts: int) -> None:
    """Raises unless every slot holds an expert and every expert has a slot."""
    if slots.ndim != 1 or slots.size < num_experts or num_experts < 1:
        raise _wrong(
            f"physical_to_logical of shape {list(slots.shape)}",
            f"[P], a slot or more for each of num_experts={num_experts}",
            "give every expert a slot, and each layer a placement of its own",
        )
    outside = np.flatnonzero((slots < 0) | (slots >= num_experts))
    if outside.size:
        raise _wrong(
            f"expert {slots[outside[0]]} in slot {outside[0]}",
            f"experts from 0 to {num_experts - 1} in all slots",
            "put a replica into a slot that is not needed",
        )
    missing = np.setdiff1d(np.arange(num_experts), slots)
    if missing.size:
        raise _wrong(
            f"no slot for expert {missing[0]} ({missing.size} of {num_experts} have none)",
            "a slot or more for each expert",
            f"add {missing[0]} to physical_to_logical",
        )


def _check_maps(
    slots: np.ndarray[Any, Any], maps: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]
) -> None:
    """Raises unless the three say the same."""
    fix = "build it with Placement.from_physical"
    if counts.ndim != 1 or maps.ndim != 2 or len(maps) != len(counts):
        raise _wrong(
            f"logical_to_physical of shape {list(maps.shape)} and replica_counts of shape "
            f"{list(counts.shape)}",
            "[E, X] and [E]",
            fix,
        )
    _check_slots(slots, len(counts))
    for expert, (row, count) in enumerate(zip(maps, counts, strict=True)):
        own = np.flatnonzero(slots == expert)
        if count != own.size:
            raise _wrong(
                f"replica_counts[{expert}] = {count}",
                f"{own.size}, the slots that hold expert {expert} in physical_to_logical",
                fix,
            )
        if maps.shape[1] < count or sorted(row[:count]) != list(own) or np.any(row[count:] != -1):
            raise _wrong(
                f"logical_to_physical[{expert}] = {row.tolist()}",
                f"each of the slots {own.tolist()} once, then -1",
                fix,
            )


_FIELDS = tuple(field.name for field in dataclasses.fields(Placement))


def _flatten(placement: Placement) -> tuple[tuple[Any, ...], tuple[()]]:
    return tuple(getattr(placement, name) for name in _FIELDS), ()


def _flatten_with_keys(placement: Placement) -> tuple[tuple[Any, ...], tuple[()]]:
    return tuple((jax.tree_util.GetAttrKey(n), getattr(placement, n)) for n in _FIELDS), ()


def _unflatten(_: tuple[()], leaves: Any) -> Placement:
    # Unchecked: leaves may be anything, such as those of all layers stacked.
    placement = object.__new__(Placement)
    for name, leaf in zip(_FIELDS, leaves, strict=True):
        object.__setattr__(placement, name, leaf)
    return placement


jax.tree_util.register_pytree_with_keys(Placement, _flatten_with_keys, _unflatten, _flatten)
_jax_compat.register_export_serialization(Placement, "jax_ep.Placement", lambda _: ())
