"""An installation without the native extension: JAX's collectives serve, after one warning."""

from __future__ import annotations

import warnings

import jax
import pytest

import jax_ep
from jax_ep import _extension

CONFIG = jax_ep.Config(num_experts=8, top_k=2, hidden=8, max_tokens=16)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> jax.sharding.Mesh:
    monkeypatch.setattr(_extension, "is_built", lambda: False)
    return jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2])


def test_the_default_is_xla_and_says_so_once(mesh: jax.sharding.Mesh) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with jax_ep.create_group(mesh, "ep", CONFIG) as group:
                assert group.stats()["implementation"] == "xla"
    (warning,) = caught
    assert warning.category is RuntimeWarning and warning.filename == __file__
    for words in ("pure Python", "pip install jax_ep", "using implementation='xla'"):
        assert words in str(warning.message)


def test_xla_by_name_needs_no_warning(mesh: jax.sharding.Mesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax_ep.create_group(mesh, "ep", CONFIG, implementation="xla").close()


def test_native_by_name_is_refused(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(NotImplementedError, match="is pure Python, without the native extension"):
        jax_ep.create_group(mesh, "ep", CONFIG, implementation="native")
