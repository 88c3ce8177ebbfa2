"""A build that cannot work says why, and what to do, in a sentence before anything is compiled."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


def configure(
    tmp_path: pathlib.Path, *options: str, **env: str
) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-DJAX_EP_BUILD_PYTHON=OFF", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, **env}
    )


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one error of a build that has failed, in one line."""
    assert done.returncode != 0
    assert done.stderr.count("CMake Error") == 1, done.stderr
    return re.sub(r"\s+", " ", done.stderr)


def test_without_a_compiler(tmp_path: pathlib.Path) -> None:
    text = sentence(configure(tmp_path, CXX="/nowhere/g++"))
    assert "found no C++ compiler that works" in text
    assert "apt install g++" in text and "JAX_EP_PURE_PYTHON=1 pip install ." in text


def test_with_a_compiler_that_is_too_old(tmp_path: pathlib.Path) -> None:
    old = ("-DCMAKE_CXX_COMPILER_ID=GNU", "-DCMAKE_CXX_COMPILER_VERSION=10.2.1")
    # CMake believes what it is told of a compiler that need not be tried.
    text = sentence(configure(tmp_path, "-DCMAKE_CXX_COMPILER_FORCED=ON", *old))
    assert "got g++ 10.2.1, expected 11 or newer" in text


def test_cuda_without_nvcc(tmp_path: pathlib.Path) -> None:
    text = sentence(configure(tmp_path, "-DJAX_EP_GPU=cuda", CUDACXX="/nowhere/nvcc"))
    assert "JAX_EP_GPU=cuda: found no nvcc that works" in text
    assert "CUDACXX=" in text and "JAX_EP_GPU=none" in text


def test_cuda_tells_how_to_do_without(tmp_path: pathlib.Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    done = configure(tmp_path, "-DJAX_EP_GPU=cuda")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "compiling the CUDA kernels" in line]
    assert "80-real;90" in line and "JAX_EP_GPU=none leaves them out" in line
