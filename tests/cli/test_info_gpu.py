"""What `python -m jax_ep info` says of the GPU kernels; no GPU is needed."""

from __future__ import annotations

import pathlib

import pytest

pytest.importorskip("jax_ep._core")

from jax_ep import _gpu_library
from jax_ep._cli import info


class _Device:
    def __init__(self, platform: str) -> None:
        self.platform = platform


def _rows(platform: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The table of devices on a machine whose JAX has two devices of `platform`."""
    monkeypatch.setattr(info.jax, "devices", lambda: [_Device(platform)] * 2)
    return dict(info._devices(has_native=True))


@pytest.fixture
def without_library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "libjax_ep_gpu.so")
    monkeypatch.setattr(_gpu_library, "path", lambda: path)
    return path


@pytest.fixture
def with_library() -> None:
    if not pathlib.Path(_gpu_library.path()).exists():
        pytest.skip("jax_ep was installed without the GPU library (JAX_EP_GPU=cuda)")


@pytest.mark.parametrize(("platform", "default"), [("gpu", "xla"), ("cpu", "native")])
def test_a_missing_library_is_the_reason(platform, default, without_library, monkeypatch):
    rows = _rows(platform, monkeypatch)
    assert rows["default implementation"] == default
    assert rows["GPU kernels"].startswith("not used: the GPU library cannot be loaded")
    assert without_library in rows["GPU kernels"]
    assert "JAX_EP_GPU=cuda pip install ." in rows["GPU kernels"]


def test_a_file_that_is_no_library_of_ours_is_the_reason(without_library, monkeypatch):
    pathlib.Path(without_library).write_bytes(b"not a library")
    rows = _rows("gpu", monkeypatch)
    assert rows["default implementation"] == "xla"
    assert "cannot be loaded" in rows["GPU kernels"]


def test_without_a_gpu_the_platform_is_the_reason(with_library, monkeypatch):
    rows = _rows("cpu", monkeypatch)
    assert rows["default implementation"] == "native"
    assert rows["GPU kernels"] == (
        "not used: the library can be loaded, but JAX's devices are of platform cpu, not gpu"
    )


def test_gpus_with_the_library_are_native(with_library, monkeypatch):
    rows = _rows("gpu", monkeypatch)
    assert rows["default implementation"] == "native"
    assert rows["GPU kernels"] == "available"


def test_without_the_extension_nothing_is_native(monkeypatch):
    monkeypatch.setattr(info.jax, "devices", lambda: [_Device("gpu")])
    rows = dict(info._devices(has_native=False))
    assert rows["default implementation"] == "xla"
    assert rows["GPU kernels"] == "not used: no native extension"
