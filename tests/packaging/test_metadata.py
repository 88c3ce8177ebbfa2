"""What the distributions say of themselves: one version, the licence, the public modules."""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
import re
import tomllib

import pytest

import jax_ep

ROOT = pathlib.Path(__file__).resolve().parents[2]
PUBLIC_MODULES = (
    "jax_ep",
    "jax_ep.eplb",
    "jax_ep.flax",
    "jax_ep.flax.linen",
    "jax_ep.flax.presets",
    "jax_ep.eplb",
    "jax_ep.fp8",
    "jax_ep.pallas",
    "jax_ep.routing",
    "jax_ep.metrics",
    "jax_ep.testing",
)


def test_the_version_has_one_place() -> None:
    """Both distributions read _version.py, and no other file of either names the version."""
    for name in ("pyproject.toml", "cuda13/pyproject.toml"):
        project = tomllib.loads((ROOT / name).read_text())
        assert "version" in project["project"]["dynamic"]
        (source,) = (
            each["input"]
            for each in project["tool"]["dynamic-metadata"]
            if each["field"] == "version"
        )
        assert (ROOT / name).parent.joinpath(source).resolve() == ROOT / "jax_ep/_version.py"
        assert jax_ep.__version__ not in (ROOT / name).read_text()
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")


def test_the_installed_metadata() -> None:
    metadata = importlib.metadata.metadata("jax_ep")
    assert metadata["Version"] == jax_ep.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The jax_ep authors"
    licences = {pathlib.Path(name).name for name in metadata.get_all("License-File") or ()}
    assert licences >= {"LICENSE", "nanobind.txt", "robin-map.txt"}
    assert "cuda13" in (metadata.get_all("Provides-Extra") or ())


def test_modules_without_an_underscore_are_the_public_ones() -> None:
    """Modules in a private folder need no underscore of their own."""
    found = set()
    for path in (ROOT / "jax_ep").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not re.search(r"\._", name):
            found.add(name)
    assert found == set(PUBLIC_MODULES)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_modules_list_their_names(name: str) -> None:
    if name.startswith("jax_ep.flax"):
        pytest.importorskip("flax")
    module = importlib.import_module(name)
    assert all(hasattr(module, each) for each in module.__all__)
    page = (ROOT / "docs/stability.md").read_text()
    assert re.search(rf"`(jax_ep\.)?{name.rpartition('.')[2]}[`.]", page)
