"""The Pallas kernels of grouped products: written for the Triton backend, interpreted on CPU.

Both take whole arrays and split them into tiles themselves, because groups start at any row. In a
tile, rows outside of its group are masked, whatever they hold. Accumulation is in f32; f32 inputs
are multiplied in full f32 precision. JAX 0.11 warns that its Triton backend is deprecated in favour
of Mosaic GPU, which refuses ROCm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_ep import _jax_compat
from jax_ep.pallas import _opaque, _units

MIN_TILE = 16  # the smallest side of a tensor-core product
MIN_FP8_DEPTH = 32  # and along K in FP8: Triton would hand the tensor cores less as if it were 32
MAX_TILE = 128
# Columns of a tile whose only product is of 2-byte elements: it reads a quarter less of operands
# for each sum than one of 128, which is time and, at a GPU's power limit, clock.
MAX_COLUMNS = 256
_REDUCTION_TILE_BYTES = 128  # of one row of a tile along the reduced axis: one cache line


class Term(NamedTuple):
    """acc[out] += lhs[lhs] @ rhs[rhs][group]: indices into a kernel's operands."""

    lhs: int
    rhs: int
    out: int


class Scales(NamedTuple):
    """Factors of FP8 operands, f32: of a row in each block of K, and of a column in each.

    lhs: per lhs [R, K / block]; rhs: per rhs [G, K / block, N]. Blocks are powers of two of at
    least MIN_FP8_DEPTH.
    """

    lhs: tuple[jax.Array, ...]
    rhs: tuple[jax.Array, ...]
    block: int


class Tiles(NamedTuple):
    """Sides of a tile, powers of two from 16: rows, reduced elements, output columns.

    stages: tiles of operands that a program has in flight.
    """

    rows: int
    reduced: int
    columns: int
    stages: int = 3


def default_tiles(
    num_rows: int, num_groups: int, reduced: int, columns: int, dtype: Any, num_products: int = 1
) -> Tiles:
    """Tiles whose stages, of one lhs and `num_products` rhs, fit in the shared memory of an A100.

    Chosen by time on an H200 (docs/performance.md).
    """
    average = num_rows // max(1, num_groups)
    along = _REDUCTION_TILE_BYTES // jnp.dtype(dtype).itemsize
    return Tiles(
        rows=_side(average, MAX_TILE),
        reduced=_side(reduced, along),
        columns=_side(columns, _most_columns(dtype, num_products)),
    )


def _most_columns(dtype: Any, num_products: int) -> int:
    return MAX_COLUMNS if num_products == 1 and jnp.dtype(dtype).itemsize == 2 else MAX_TILE


def rows_product(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    terms: tuple[Term, ...],
    epilogue: Callable[..., tuple[jax.Array, ...]],
    num_results: int,
    transpose_rhs: bool = False,
    scales: Scales | None = None,
    out_dtype: Any = None,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, ...]:
    """Per row r of group g: epilogue of the accumulators sum over terms of lhs[r] @ rhs[g].

    Args:
        lhs: arrays [R, K].
        rhs: arrays [G, K, N], or [G, N, K] with `transpose_rhs`.
        group_sizes: i32[G].
        terms: what is multiplied with what, into which accumulator. Terms of one lhs are computed
            together, and those of the next lhs are added when they are done.
        epilogue: takes the accumulators, f32 [rows, N], gives `num_results` arrays of their shape;
            of zeros it must give zeros.
        num_results: arrays that the epilogue gives.
        transpose_rhs: the layout of rhs.
        scales: multiply the sums of each block along K; rhs is not transposed then.
        out_dtype: of the results; None: that of lhs.
        tiles: sides of a tile; None: `default_tiles`.

    Returns:
        Arrays [R, N] in out_dtype; rows beyond the groups are zero.
    """
    num_rows, reduced = lhs[0].shape
    num_groups = rhs[0].shape[0]
    columns = rhs[0].shape[1 if transpose_rhs else 2]
    dtype = lhs[0].dtype
    out_dtype = out_dtype or dtype
    if 0 in (num_rows, reduced, columns, num_groups):
        zero = jnp.zeros((num_rows, columns), out_dtype)
        return (_opaque.vary(zero, *lhs, *rhs, group_sizes)[0],) * num_results
    if tiles is None:
        # Scaled sums are kept beside the sums: as many registers as a second product.
        most = max(len(each) for each in _passes(terms)) if scales is None else 2
        tiles = default_tiles(num_rows, num_groups, reduced, columns, dtype, most)
    if scales is not None:  # a step stays inside of a block
        depth = max(tiles.reduced, MIN_FP8_DEPTH)
        tiles = tiles._replace(reduced=min(depth, scales.block))
    units = _units.make_units(group_sizes, num_rows, tiles.rows)
    factors = () if scales is None else (*scales.lhs, *scales.rhs)
    kernel = functools.partial(
        _rows_kernel,
        terms=terms,
        epilogue=epilogue,
        num_lhs=len(lhs),
        num_rhs=len(rhs),
        num_outputs=1 + max(term.out for term in terms),
        transpose_rhs=transpose_rhs,
        block=None if scales is None else scales.block,
        tiles=tiles,
    )
    grid = (pl.cdiv(columns, tiles.columns), units.group.shape[0])
    shapes = [((num_rows, columns), out_dtype)] * num_results
    operands = [_bits(array) for array in (*lhs, *rhs)]
    return _call(kernel, grid, shapes, [*units, *operands, *factors], tiles)


def _rows_kernel(
    group_ref: Any,
    start_ref: Any,
    end_ref: Any,
    *refs: Any,
    terms: tuple[Term, ...],
    epilogue: Callable[..., tuple[jax.Array, ...]],
    num_lhs: int,
    num_rhs: int,
    num_outputs: int,
    transpose_rhs: bool,
    block: int | None,
    tiles: Tiles,
    interpret: bool,
) -> None:
    """One unit of rows, one tile of columns; grid (column tiles, units)."""
    lhs, rhs, refs = refs[:num_lhs], refs[num_lhs : num_lhs + num_rhs], refs[num_lhs + num_rhs :]
    num_factors = 0 if block is None else num_lhs + num_rhs
    lhs_factors, rhs_factors = refs[:num_lhs], refs[num_lhs:num_factors]
    results = refs[num_factors:]
    reduced = lhs[0].shape[1]
    num_groups = rhs[0].shape[0]
    columns = results[0].shape[1]
    unit = pl.program_id(1)
    first_column = pl.program_id(0) * tiles.columns
    group, start, end = group_ref[unit], start_ref[unit], end_ref[unit]
    rows = pl.ds(start, tiles.rows)
    own_columns = pl.ds(first_column, tiles.columns)
    is_row = start + jnp.arange(tiles.rows) < end
    is_column = _below(first_column, tiles.columns, columns)
    contract = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    def step(
        own_terms: list[Term], i: jax.Array, accumulators: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        first = i * tiles.reduced
        slab = pl.ds(first, tiles.reduced)
        is_reduced = _below(first, tiles.reduced, reduced)
        if transpose_rhs:
            place, mask = (own_columns, slab), _both(is_column, is_reduced)
        else:
            place, mask = (slab, own_columns), _both(is_reduced, is_column)
        left = _load(lhs[own_terms[0].lhs].at[rows, slab], _both(is_row, is_reduced))
        right = [_load(rhs[term.rhs].at[group, *place], mask) for term in own_terms]
        sums = list(accumulators)
        for term, weights in zip(own_terms, right, strict=True):
            product = _dot(left, weights, contract, interpret)
            if block is not None:
                of_rows = _load(lhs_factors[term.lhs].at[rows, first // block], is_row)
                factors = rhs_factors[term.rhs].at[group, first // block, own_columns]
                of_columns = _load(factors, is_column)
                product = product * of_rows[:, None] * of_columns[None, :]
            sums[term.out] += product
        return tuple(sums)

    # Rows of no group, and left-over units, multiply nothing: their accumulators stay zero.
    # (A select between two literals would be simpler; Triton's lowering types it wrongly.)
    is_used = (group < num_groups) & (start < end)
    steps = is_used.astype(jnp.int32) * pl.cdiv(reduced, tiles.reduced)
    zeros = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    accumulators = (zeros,) * num_outputs
    for own_terms in _passes(terms):
        accumulators = lax.fori_loop(0, steps, functools.partial(step, own_terms), accumulators)
    for ref, value in zip(results, epilogue(*accumulators), strict=True):
        mask = _both(is_row, is_column)
        plgpu.store(ref.at[rows, own_columns], value.astype(ref.dtype), mask=mask)


def _passes(terms: tuple[Term, ...]) -> list[list[Term]]:
    """The terms of each lhs, which share its loads."""
    return [[term for term in terms if term.lhs == lhs] for lhs in sorted({t.lhs for t in terms})]


def weight_product(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tiles: Tiles | None = None
) -> jax.Array:
    """Per group g: lhs[rows of g]^T @ rhs[rows of g].

    Args:
        lhs: [R, K].
        rhs: [R, N].
        group_sizes: i32[G].
        tiles: sides of a tile: rows summed in a step, K and N of the output; None: a default.

    Returns:
        [G, K, N] in the dtype of lhs; zero for an empty group.
    """
    (num_rows, left_columns), columns = lhs.shape, rhs.shape[1]
    num_groups = group_sizes.shape[0]
    if 0 in (num_rows, left_columns, columns, num_groups):
        zero = jnp.zeros((num_groups, left_columns, columns), lhs.dtype)
        return _opaque.vary(zero, lhs, rhs, group_sizes)[0]
    if tiles is None:
        along = _REDUCTION_TILE_BYTES // jnp.dtype(lhs.dtype).itemsize
        most_columns = _most_columns(lhs.dtype, 1)
        tiles = Tiles(
            rows=_side(num_rows, along),
            reduced=_side(left_columns, MAX_TILE),
            columns=_side(columns, most_columns),
        )
    begins = _units.offsets(group_sizes, num_rows)
    # Two axes, not three: the Triton backend has three, and vmap takes one.
    grid = (pl.cdiv(columns, tiles.columns) * pl.cdiv(left_columns, tiles.reduced), num_groups)
    shapes = [((num_groups, left_columns, columns), lhs.dtype)]
    kernel = functools.partial(_weight_kernel, tiles=tiles)
    return _call(kernel, grid, shapes, [begins, lhs, rhs], tiles)[0]


def _weight_kernel(
    begin_ref: Any, lhs: Any, rhs: Any, result: Any, *, tiles: Tiles, interpret: bool
) -> None:
    """One tile of one group's weights; grid (K tiles * N tiles, groups)."""
    tile, group = pl.program_id(0), pl.program_id(1)
    column_tiles = pl.cdiv(rhs.shape[1], tiles.columns)
    first_left = tile // column_tiles * tiles.reduced
    first_column = tile % column_tiles * tiles.columns
    own_left, own_columns = pl.ds(first_left, tiles.reduced), pl.ds(first_column, tiles.columns)
    is_left = _below(first_left, tiles.reduced, lhs.shape[1])
    is_column = _below(first_column, tiles.columns, rhs.shape[1])
    begin, end = begin_ref[group], begin_ref[group + 1]

    def step(i: jax.Array, accumulator: jax.Array) -> jax.Array:
        first = begin + i * tiles.rows
        rows = pl.ds(first, tiles.rows)
        is_row = first + jnp.arange(tiles.rows) < end
        left = _load(lhs.at[rows, own_left], _both(is_row, is_left))
        right = _load(rhs.at[rows, own_columns], _both(is_row, is_column))
        return accumulator + _dot(left, right, (((0,), (0,)), ((), ())), interpret)

    zeros = jnp.zeros((tiles.reduced, tiles.columns), jnp.float32)
    accumulator = lax.fori_loop(0, pl.cdiv(end - begin, tiles.rows), step, zeros)
    place = result.at[group, own_left, own_columns]
    plgpu.store(place, accumulator.astype(result.dtype), mask=_both(is_left, is_column))


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    operands: Sequence[jax.Array],
    tiles: Tiles,
) -> tuple[jax.Array, ...]:
    """Runs `kernel`: interpreted where lowered for CPU, compiled by Triton for CUDA and ROCm."""
    operands = _opaque.vary(*operands)
    results = [_jax_compat.result_type(operands[0], shape, dtype) for shape, dtype in shapes]
    is_large = tiles.rows * tiles.columns >= MAX_TILE * MAX_TILE

    def run(*arrays: jax.Array, interpret: bool) -> tuple[jax.Array, ...]:
        out = pl.pallas_call(
            functools.partial(kernel, interpret=interpret),
            out_shape=results,
            grid=grid,
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                num_warps=8 if is_large else 4, num_stages=tiles.stages
            ),
        )(*arrays)
        return tuple(out)

    compiled = functools.partial(run, interpret=False)

    def choose(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        chosen: tuple[jax.Array, ...] = lax.platform_dependent(
            *arrays, cpu=functools.partial(run, interpret=True), cuda=compiled, rocm=compiled
        )
        return chosen

    return _opaque.call(choose, results, operands)


def _dot(left: jax.Array, right: jax.Array, contract: Any, interpret: bool) -> jax.Array:
    """f32 product of two tiles; HIGHEST keeps Triton from rounding f32 operands to TF32."""
    if interpret and left.dtype.itemsize == 1:  # CPUs have no products of FP8; f32 holds it exactly
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return lax.dot_general(
        left,
        right,
        contract,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _bits(array: jax.Array) -> jax.Array:
    """FP8 as bytes: Triton's lowering cannot fill masked elements of a load in FP8."""
    if array.dtype.itemsize > 1:
        return array
    return lax.bitcast_convert_type(array, jnp.uint8)


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Elements, 0 where they are masked; bytes are e4m3fn."""
    loaded: jax.Array = plgpu.load(ref, mask=mask, other=None if mask is None else 0)
    if loaded.dtype == jnp.uint8:
        loaded = lax.bitcast_convert_type(loaded, jnp.float8_e4m3fn)
    return loaded


def _below(first: jax.Array, size: int, limit: int) -> jax.Array | None:
    """Which of `size` indices from `first` are below `limit`; None where all always are."""
    return None if limit % size == 0 else first + jnp.arange(size) < limit


def _both(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """The mask of a tile; None if nothing is masked."""
    if rows is None:
        return None if columns is None else columns[None, :]
    return rows[:, None] if columns is None else rows[:, None] & columns[None, :]


def _side(size: int, limit: int) -> int:
    """The smallest power of two that covers `size`, from 16 up to `limit`."""
    return min(limit, max(MIN_TILE, 1 << max(0, size - 1).bit_length()))
