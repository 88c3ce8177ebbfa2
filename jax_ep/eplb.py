"""Experts placed by their loads, and what moves when the placement does (docs/placement.md)."""

from jax_ep._rebalance import rebalance as rebalance
from jax_ep._replicas import move as move
from jax_ep._replicas import reduce_gradients as reduce_gradients
from jax_ep._replicas import to_logical as to_logical
from jax_ep._replicas import to_physical as to_physical

__all__ = ["move", "rebalance", "reduce_gradients", "to_logical", "to_physical"]
