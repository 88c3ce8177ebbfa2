"""How calls between nodes of GPUs are cut where their areas have no room for all tokens.

The rules are those of kernels/gpu/protocol/ht_rounds.h and kernels/rounds.h.
"""

from __future__ import annotations

import dataclasses

# kernels/gpu/protocol/ht_rounds.h
CHUNK_TOKENS = 32
REDUCE_BLOCKS = 16
STAGE_BLOCKS = 4
AHEAD = 2  # so many rounds are sent before the first of them is used
# kernels/rounds.h
LL_ROWS = 8192


@dataclasses.dataclass(frozen=True)
class Cut:
    """A call: `number` rounds of at most `tokens` tokens of every rank."""

    tokens: int
    number: int


def _cut(call_tokens: int, tokens: int) -> Cut:
    tokens = min(tokens, call_tokens)
    return Cut(tokens, -(-call_tokens // tokens))


def ht(ranks: int, nodes: int, tokens: int, limit: int = 0) -> Cut:
    """Of mode ht. `limit`: of a round's tokens, 0 for none."""
    room = min(REDUCE_BLOCKS * tokens // ranks, STAGE_BLOCKS * tokens // nodes)
    if nodes == 1 or (room >= tokens and not 0 < limit < tokens):
        return _cut(tokens, tokens)
    room //= AHEAD
    if limit:
        room = min(room, limit)
    return _cut(tokens, max(room // CHUNK_TOKENS, 1) * CHUNK_TOKENS)


def ll(ranks: int, nodes: int, tokens: int, limit: int = 0) -> Cut:
    """Of mode ll. `limit`: of a round's tokens, 0 for none."""
    room = tokens if nodes == 1 else max(LL_ROWS // ranks, 1)
    return _cut(tokens, min(room, limit or room))
