"""The collectives of implementation="xla": every bit arrives, and none moves more than it may."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import (
    Case,
    assert_same_bits,
    group_of,
    inputs_of,
    param,
    per_rank,
    run,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_ops import check_case, compiled

import jax_ep
from jax_ep._ops import collectives
from jax_ep._ops.call import Call

DTYPES = ["float32", "bfloat16", "float16"]
MOVED = re.compile(r'"?stablehlo\.(all_gather|all_to_all)"?\(.*: \((.*)\) -> (.*)')


def patterns(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Every bit pattern of 16 bits; of 32 bits one in 16 of each special kind, else random ones."""
    count = math.prod(shape)
    if np.dtype(dtype).itemsize == 2:
        bits = (np.arange(count) % 2**16).astype(np.uint16)
    else:
        bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
        bits[0::16] &= 0x807FFFFF  # subnormals
        bits[1::16] = bits[1::16] & 0x803FFFFF | 0x7F800001  # signalling NaNs
        bits[2::16] |= 0x7FC00000  # quiet NaNs
        bits[3::16] &= 0x80000000  # both zeros
        bits[4::16] = bits[4::16] & 0x80000000 | 0x7F800000  # both infinities
    return bits.reshape(shape).view(dtype)


def moved(text: str) -> list[tuple[str, str, int]]:
    """Of each collective in a lowered program: its name, element type and bytes of its result."""
    found = []
    for name, _, result in MOVED.findall(text):
        *dims, element = re.findall(r"tensor<(.*)>", result)[0].split("x")
        size = int(re.findall(r"\d+$", element)[0]) // 8
        found.append((name, element, math.prod(map(int, dims)) * size))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_dispatch_keeps_every_bit(dtype: str, implementation: str) -> None:
    """Also of weights, which are f32 in every group."""
    case = Case(ranks=2, tokens=256, hidden=128, top_k=1, experts=2, dtype=dtype)
    group = group_of(case, implementation)
    x = patterns((2, 256, 128), dtype)
    weights = patterns((2, 256, 1), "float32")
    ids = np.arange(512, dtype=np.int32).reshape(2, 256, 1) % 3 - 1  # a third is absent

    def received(x: Any, ids: Any, w: Any) -> Any:
        got = jax_ep.dispatch(group, x, ids, w)
        return got.x, got.weights

    plans = oracle.plan(case.spec, ids, case.resolved_mode, "expert_major")
    rows, row_weights = oracle.dispatch(plans, x, weights)
    got_rows, got_weights = run(group, received, x, ids, weights)
    assert_same_bits(got_rows, np.stack(rows))
    assert_same_bits(got_weights, np.stack(row_weights or []))


@pytest.mark.parametrize("partials", ["float32", "dtype"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_one_row_is_that_row(dtype: str, partials: str, implementation: str) -> None:
    """Zeros keep their signs, subnormals and infinities their bits, and a NaN stays one."""
    case = Case(ranks=2, tokens=256, hidden=128, top_k=1, experts=2, dtype=dtype, partials=partials)
    group = group_of(case, implementation)
    x = patterns((2, 256, 128), dtype)
    ids = np.arange(512, dtype=np.int32).reshape(2, 256, 1) % 2

    def there_and_back(x: Any, ids: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids)
        return jax_ep.combine(group, recv.x, recv.plan)

    got = run(group, there_and_back, x, ids)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        is_nan = np.isnan(x)
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    assert_same_bits(np.where(is_nan, np.zeros((), x.dtype), got), np.where(is_nan, 0, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_floats_narrower_than_f32_travel_as_integers(dtype: str) -> None:
    case = Case(ranks=2, tokens=16, dtype=dtype, partials="dtype")
    group = group_of(case, "xla")
    inputs = inputs_of(case)

    def layer(x: Any, ids: Any, w: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w)
        return jax_ep.combine(group, recv.x, recv.plan, weights=recv.weights)

    text = per_rank(group, layer).lower(inputs.x, inputs.ids, inputs.weights).as_text()
    rows = {"float32": "f32"}.get(dtype, "ui16")
    types = {(name, element) for name, element, _ in moved(text)}
    wanted = {("all_gather", "i32"), ("all_gather", "f32"), ("all_to_all", rows)}
    assert types == wanted | {("all_gather", rows)}  # ids, weights, partials, x


LIMITED = [
    param(Case(ranks=4, tokens=13, hidden=24, capacity_factor=1.0, mode="ht")),
    param(Case(ranks=4, tokens=13, hidden=24, dtype="bfloat16", layout="expert_batched")),
    param(Case(ranks=3, tokens=7, hidden=40, experts=6, dtype="float16", layout="rank_major")),
    param(Case(ranks=8, tokens=5, dtype="bfloat16", partials="dtype", experts=16)),
]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets another limit; programs traced with it are not kept."""

    def limit_to(limit: int) -> None:
        monkeypatch.setattr(collectives, "MAX_BYTES", limit)
        compiled.cache_clear()

    yield limit_to
    compiled.cache_clear()


@pytest.mark.parametrize("limit", [1, 1500, 4000])
@pytest.mark.parametrize("case", LIMITED)
def test_pieces_give_what_the_oracle_does(
    case: Case, limit: int, limited: Callable[[int], None]
) -> None:
    limited(limit)
    for seed, kind in enumerate(("uniform", "holes")):
        check_case(case, "xla", inputs_of(case, kind, seed).ids, seed)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(1, 9),
    hidden=st.sampled_from([1, 5, 16]),
    dtype=st.sampled_from(DTYPES),
    limit=st.integers(1, 1500),
)
def test_pieces_of_any_size_change_no_bit(
    limited: Callable[[int], None], tokens: int, hidden: int, dtype: str, limit: int
) -> None:
    """Of an exchange and a gather of themselves, whatever the tokens and the limit."""
    call = Call(group_of(Case(), "xla"), "ht", "expert_major", tokens)
    sent = patterns((4, 4, tokens, hidden), dtype)
    limited(limit)

    def move(sent: Any) -> Any:
        return collectives.exchange(call, sent), collectives.gather(call, sent[0])

    moving = per_rank(call.group, move)
    exchanged, gathered = jax.device_get(moving(sent))
    assert_same_bits(exchanged, np.swapaxes(sent, 0, 1))
    assert_same_bits(gathered, np.broadcast_to(sent[:, 0], gathered.shape))
    row = 4 * hidden * np.dtype(dtype).itemsize
    assert all(size <= max(limit, row) for *_, size in moved(moving.lower(sent).as_text()))


def test_no_collective_of_a_large_program_has_more_than_the_limit() -> None:
    """Lowered only: the ranks' partials have 4 GiB on each device."""
    case = Case(ranks=8, tokens=2**15, hidden=4096, top_k=8, capacity_factor=1.0)
    group = group_of(case, "xla")

    def layer(x: Any, ids: Any, w: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids, w)
        return jax_ep.combine(group, recv.x, recv.plan, weights=w)

    def of_all_ranks(last: int, dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(group.mesh, P("ep"))
        return jax.ShapeDtypeStruct((8, case.tokens, last), dtype, sharding=sharding)

    arguments = [of_all_ranks(4096, jnp.float32)]
    arguments += [of_all_ranks(8, dtype) for dtype in (jnp.int32, jnp.float32)]
    collective = moved(per_rank(group, layer).lower(*arguments).as_text())
    assert {name for name, *_ in collective} == {"all_gather", "all_to_all"}
    assert max(size for *_, size in collective) == collectives.MAX_BYTES == 2**30
