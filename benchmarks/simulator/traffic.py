"""Who sends how many rows to whom: counted from drawn expert ids."""

from __future__ import annotations

import dataclasses

import numpy as np

DRAWN_PAIRS = 1 << 21  # tokens of all ranks are drawn up to this many pairs, and scaled
MOST_AGAIN = 0.9  # share of tokens up to which drawing them anew ends soon
RACED_ROWS = 1 << 12  # tokens of which every expert gets a number at once


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows of one call, as floats: they are scaled from a sample.

    Attributes:
        to_node: [ranks, nodes]; one for each token that has an expert in the node.
        to_rank: [ranks, ranks]; one for each token that has an expert on the rank.
        pairs: [ranks, ranks]; one for each (token, k).
    """

    node_size: int
    tokens: int
    to_node: np.ndarray
    to_rank: np.ndarray
    pairs: np.ndarray

    @property
    def ranks(self) -> int:
        return len(self.to_rank)

    @property
    def nodes(self) -> int:
        return self.ranks // self.node_size

    @property
    def received(self) -> np.ndarray:
        """Rows of each rank's experts, from everywhere: [ranks]."""
        return self.pairs.sum(0)

    def away(self, rows: np.ndarray) -> np.ndarray:
        """`rows` [ranks, nodes or ranks] without those that stay in their node."""
        per_node = rows.shape[1] // self.nodes
        own = np.arange(self.ranks)[:, None] // self.node_size
        return np.where(np.arange(rows.shape[1])[None] // per_node == own, 0.0, rows)


def draw(
    ranks: int,
    node_size: int,
    tokens: int,
    top_k: int,
    experts: int,
    zipf: float = 0.0,
    seed: int = 0,
) -> Traffic:
    """Draws `top_k` different experts for each token. `zipf` > 0: expert i has weight i**-zipf."""
    rng = np.random.default_rng(seed)
    drawn = max(8, min(tokens, DRAWN_PAIRS // (ranks * top_k)))
    ids = _different(rng, ranks * drawn, top_k, experts, zipf)
    owners = ids // (experts // ranks)  # [tokens, k]
    scale = tokens / drawn

    def count(places: np.ndarray, number: int, dedup: bool) -> np.ndarray:
        if dedup:
            places = np.sort(places, axis=1)
            first = np.ones(places.shape, bool)
            first[:, 1:] = places[:, 1:] != places[:, :-1]
        else:
            first = np.ones(places.shape, bool)
        source = np.repeat(np.arange(ranks), drawn)[:, None] * number
        flat = (source + places)[first]
        return np.bincount(flat, minlength=ranks * number).reshape(ranks, number) * scale

    return Traffic(
        node_size=node_size,
        tokens=tokens,
        to_node=count(owners // node_size, ranks // node_size, dedup=True),
        to_rank=count(owners, ranks, dedup=True),
        pairs=count(owners, ranks, dedup=False),
    )


def _different(
    rng: np.random.Generator, rows: int, top_k: int, experts: int, zipf: float
) -> np.ndarray:
    order = rng.permutation(experts)
    weights = np.arange(1, experts + 1, dtype=float) ** -zipf
    edges = np.cumsum(weights[order] / weights.sum())
    ids = np.searchsorted(edges[:-1], rng.random((rows, top_k)))
    again = _has_twice(ids)
    if again.mean() > MOST_AGAIN:
        ids[again] = _race(rng, int(again.sum()), top_k, -zipf * np.log(order + 1.0))
        return ids
    while again.any():  # an expert that a token has already is drawn anew
        ids[again] = np.searchsorted(edges[:-1], rng.random((int(again.sum()), top_k)))
        again = _has_twice(ids)
    return ids


def _has_twice(ids: np.ndarray) -> np.ndarray:
    ordered = np.sort(ids, axis=1)
    return (ordered[:, 1:] == ordered[:, :-1]).any(1)


def _race(rng: np.random.Generator, rows: int, top_k: int, log_weights: np.ndarray) -> np.ndarray:
    """The first `top_k` of all experts in each row, as if drawn one by one without putting back.

    Popular experts are chosen somewhat more often than where whole tokens are drawn anew.
    """
    parts = []
    for start in range(0, rows, RACED_ROWS):
        shape = (min(RACED_ROWS, rows - start), len(log_weights))
        times = rng.gumbel(size=shape) + log_weights
        parts.append(np.argsort(-times, axis=1)[:, :top_k])
    return np.concatenate(parts)
