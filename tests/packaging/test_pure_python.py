"""An installation without the native extension: JAX's collectives serve, after one warning."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import warnings

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _extension

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


def test_the_default_moves_rows(mesh: jax.sharding.Mesh) -> None:
    mesh = jax.sharding.Mesh(mesh.devices, ("ep",))  # its axis is Auto, as in the README
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = jax_ep.create_group(mesh, "ep", CONFIG)

    def exchange(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        recv = jax_ep.dispatch(group, x, ids, weights)
        return jax_ep.combine(group, recv.x, recv)

    x = jax.random.normal(jax.random.key(0), (32, 8), CONFIG.dtype)
    ids = jnp.arange(64, dtype=jnp.int32).reshape(32, 2) % 8
    run = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    with group:
        np.testing.assert_array_equal(run(x, ids, jnp.full((32, 2), 0.5)), x)


def test_xla_by_name_needs_no_warning(mesh: jax.sharding.Mesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax_ep.create_group(mesh, "ep", CONFIG, implementation="xla").close()


def test_native_by_name_is_refused(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(NotImplementedError, match="is pure Python, without the native extension"):
        jax_ep.create_group(mesh, "ep", CONFIG, implementation="native")


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A venv with what jax_ep needs, and jax_ep as JAX_EP_PURE_PYTHON installs it."""
    for module in ("scikit_build_core", "pip"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module}, which builds the package, is not installed (jax_ep[dev])")
    folder = tmp_path_factory.mktemp("pure")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    env = {**os.environ, "JAX_EP_PURE_PYTHON": "1", "CXX": "/nowhere/g++"}
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", site, ROOT], env=env, check=True)
    # The packages of this environment but jax_ep, whose extension would be found.
    for packages in map(pathlib.Path, sys.path):
        for entry in packages.glob("*") if packages.name == "site-packages" else ():
            if "jax_ep" not in entry.name and entry.suffix != ".pth":
                with contextlib.suppress(FileExistsError):
                    (site / entry.name).symlink_to(entry)
    return folder


def run(venv: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in children.quick().items() if key != "PYTHONPATH"}
    python = venv / "bin/python"
    return subprocess.run([python, *arguments], cwd=venv, env=env, capture_output=True, text=True)


def test_nothing_is_compiled(venv: pathlib.Path) -> None:
    (package,) = venv.glob("lib/python*/site-packages/jax_ep")
    assert (package / "__init__.py").exists() and not [*package.rglob("*.so")]
    (wheel,) = package.parent.glob("jax_ep-*.dist-info/WHEEL")
    assert "Tag: py3-none-any" in wheel.read_text()


@pytest.mark.ci
def test_selftest_passes_and_info_says_what_is_left_out(venv: pathlib.Path) -> None:
    tested = run(venv, "-m", "jax_ep", "selftest")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "2 of 2 checks passed" in tested.stdout
    said = run(venv, "-m", "jax_ep", "info").stdout
    assert "left out, as JAX_EP_PURE_PYTHON asked" in said
