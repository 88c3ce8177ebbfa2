"""Which GPU library jax_ep takes: its own, else that of jax_ep_cuda13 if the versions agree."""

from __future__ import annotations

import pathlib
import types

import pytest

import jax_ep
from jax_ep import _gpu_library


@pytest.fixture
def extension(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of an extension that was built without the GPU library."""
    folder = tmp_path / "jax_ep"
    folder.mkdir()
    core = types.SimpleNamespace(
        __file__=str(folder / "_core.so"), GroupShape=dict, gpu_memory_bytes=None
    )
    monkeypatch.setattr(_gpu_library._extension, "load", lambda: core)
    return folder


def install(site: pathlib.Path, version: str, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A jax_ep_cuda13 as pip would install it; returns its library."""
    package, metadata = site / "jax_ep_cuda13", site / f"jax_ep_cuda13-{version}.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").touch()
    (metadata / "METADATA").write_text(f"Name: jax_ep_cuda13\nVersion: {version}\n")
    monkeypatch.syspath_prepend(site)
    return package / "libjax_ep_gpu.so"


def test_without_the_package_the_place_beside_the_extension_is_named(
    extension: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gpu_library, "PACKAGE", "jax_ep_cuda_of_nobody")
    assert _gpu_library.path() == str(extension / "libjax_ep_gpu.so")


def test_the_package_is_taken(
    extension: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = install(tmp_path / "site", jax_ep.__version__, monkeypatch)
    assert _gpu_library.path() == str(library)


def test_what_was_built_from_source_comes_first(
    extension: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "0.0.1", monkeypatch)  # its version is of no interest then
    (extension / "libjax_ep_gpu.so").touch()
    assert _gpu_library.path() == str(extension / "libjax_ep_gpu.so")


def test_another_version_is_refused(
    extension: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "0.0.1", monkeypatch)
    with pytest.raises(NotImplementedError) as caught:
        _gpu_library.path()
    assert str(caught.value) == (
        f"the GPU library: got jax_ep_cuda13 0.0.1, expected {jax_ep.__version__}, as jax_ep is; "
        f"run `pip install jax_ep_cuda13=={jax_ep.__version__}`, or pass implementation='xla'"
    )
    memory = jax_ep.Config(num_experts=8, top_k=1, hidden=8, max_tokens=4).memory(2, platform="gpu")
    assert memory.unknown == str(caught.value)
