"""Eight workloads: which experts the tokens of every rank choose, from (name, seed, step) alone."""

import zlib

import numpy as np

HOT_SHARE = 16  # one in so many experts is hot
HOT_WEIGHT = 400.0  # of a hot expert, beside 1 of another
PERIOD = 4  # steps that a rotating hot set stays, and between bursts


def _even(experts, ranks, rng, step):
    return np.ones(experts)


def _with_hot(experts, hot):
    weights = np.ones(experts)
    weights[hot] = HOT_WEIGHT
    return weights


def _hot_count(experts, top_k=8):
    return max(top_k, experts // HOT_SHARE)


def _hot_set(experts, ranks, rng, step):
    """Neighbours, all on one rank."""
    local = experts // ranks
    count = min(_hot_count(experts), local)
    begin = rng.integers(ranks) * local + rng.integers(local - count + 1)
    return _with_hot(experts, np.arange(begin, begin + count))


def _hot_rank(experts, ranks, rng, step):
    """All experts of one rank."""
    local = experts // ranks
    begin = rng.integers(ranks) * local
    return _with_hot(experts, np.arange(begin, begin + local))


def _hot_spread(experts, ranks, rng, step):
    """As many hot experts as in the hot set, equally many on every rank."""
    count = _hot_count(experts)
    return _with_hot(experts, np.arange(count) * experts // count)


def _burst(experts, ranks, rng, step):
    """Even, but every fourth step goes to a hot set."""
    is_burst = step % PERIOD == PERIOD - 1
    return (_hot_set if is_burst else _even)(experts, ranks, rng, step)


# name -> (weights of the experts, steps that draw them anew, share of real tokens by rank)
WORKLOADS = {
    "balanced": (_even, 0, lambda rank, ranks: 1.0),
    "hot set": (_hot_set, 0, lambda rank, ranks: 1.0),
    "hot rank": (_hot_rank, 0, lambda rank, ranks: 1.0),
    "hot experts spread out": (_hot_spread, 0, lambda rank, ranks: 1.0),
    "ragged sources": (_even, 0, lambda rank, ranks: (rank + 1) / ranks),
    "a rank without tokens": (_even, 0, lambda rank, ranks: float(rank > 0)),
    "rotating hot set": (_hot_set, PERIOD, lambda rank, ranks: 1.0),
    "bursts": (_burst, 1, lambda rank, ranks: 1.0),
}


def routing(name, seed, step, ranks, tokens, top_k, experts):
    """i32[ranks, tokens, top_k]: different experts of each token; -1 where a rank has fewer.

    The weights are drawn once per workload, or anew every few steps; tokens in every step.
    """
    weights_of, lasts, share_of = WORKLOADS[name]
    own = zlib.crc32(name.encode())
    era = step // lasts if lasts else 0
    weights = weights_of(experts, ranks, np.random.default_rng((own, seed, 0, era)), step)
    rng = np.random.default_rng((own, seed, 1, step))
    scores = np.log(weights) + rng.gumbel(size=(ranks, tokens, experts))
    ids = np.argsort(-scores, axis=-1)[..., :top_k].astype(np.int32)
    for rank in range(ranks):
        ids[rank, round(tokens * share_of(rank, ranks)) :] = -1
    return ids


def load_of(ids, experts):
    """i64[experts]: the pairs that chose each."""
    return np.bincount(ids[ids >= 0], minlength=experts)


def busiest_rank(load_of_slots, ranks):
    """Rows of the busiest rank over the mean."""
    by_rank = load_of_slots.reshape(ranks, -1).sum(axis=1)
    return float(by_rank.max() / max(1.0, by_rank.mean()))
