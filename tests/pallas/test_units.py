"""The cut of rows into work units: every row once, within the bound."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_ep.pallas import _units

_make = jax.jit(_units.make_units, static_argnums=(1, 2))
# Few shapes, so that few compile; sizes are data.
SHAPES = [(1, 1, 16), (40, 3, 16), (64, 5, 32), (37, 8, 16), (5, 9, 16)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SHAPES), st.data())
def test_every_row_is_in_one_unit_of_its_group(shape, data):
    num_rows, num_groups, tile = shape
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=num_groups, max_size=num_groups))
    units = jax.device_get(_make(jnp.array(sizes, jnp.int32), num_rows, tile))
    owner = np.full(num_rows, -1)
    for group, start, end in zip(*units, strict=True):
        assert 0 <= end - start <= tile and 0 <= group <= num_groups
        assert np.all(owner[start:end] == -1), "a row is in two units"
        owner[start:end] = group
    # Sizes that add up to more than the rows are cut off.
    expected = np.repeat(np.arange(num_groups + 1), [*sizes, num_rows])[:num_rows]
    np.testing.assert_array_equal(owner, expected)
