"""An installation without the native extension: JAX's collectives serve, after one warning."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import warnings

import children
import jax
import pytest

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


def test_xla_by_name_needs_no_warning(mesh: jax.sharding.Mesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax_ep.create_group(mesh, "ep", CONFIG, implementation="xla").close()


def test_native_by_name_is_refused(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(NotImplementedError, match="is pure Python, without the native extension"):
        jax_ep.create_group(mesh, "ep", CONFIG, implementation="native")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder into which pip has installed jax_ep by JAX_EP_PURE_PYTHON, without a compiler."""
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core, which builds the package, is not installed (jax_ep[dev])")
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this venv has no pip")
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "JAX_EP_PURE_PYTHON": "1", "CXX": "/nowhere/g++"}
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", folder, ROOT], env=env, check=True)
    return folder


def test_nothing_is_compiled(installed: pathlib.Path) -> None:
    assert (installed / "jax_ep/__init__.py").exists()
    assert not [*installed.rglob("*.so")]
    (wheel,) = installed.glob("*.dist-info/WHEEL")
    assert "Tag: py3-none-any" in wheel.read_text()


def run(installed: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**children.quick(), "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=installed, env=env, capture_output=True, text=True
    )


def test_selftest_passes_and_info_says_what_is_left_out(installed: pathlib.Path) -> None:
    where = run(
        installed, "-c", "import jax_ep._extension as e; print(e.__file__, e.is_left_out())"
    )
    if where.stdout.split() != [str(installed / "jax_ep/_extension.py"), "True"]:
        pytest.skip(f"an editable install of jax_ep comes first: {where.stdout}{where.stderr}")
    tested = run(installed, "-m", "jax_ep", "selftest")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "2 of 2 checks passed" in tested.stdout
    said = run(installed, "-m", "jax_ep", "info").stdout
    assert "left out, as JAX_EP_PURE_PYTHON asked" in said
