"""JAX_EP_GPU=auto: CUDA where a driver is, and one line on what was left out and how to get it."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DRIVER_FILES = (
    "dev/nvidiactl",
    "proc/driver/nvidia/version",
    "usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "usr/lib64/libcuda.so.1",
    "usr/lib/wsl/lib/libcuda.so.1",
)

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


def run_cmake(*arguments: object, **env: str) -> str:
    done = subprocess.run(
        ["cmake", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env=env or None,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def evaluate(tmp_path: pathlib.Path, call: str) -> list[str]:
    """The values that a call of one of choose.cmake's functions gives `a` and `b`."""
    script = tmp_path / "script.cmake"
    script.write_text(
        f'cmake_minimum_required(VERSION 3.24)\ninclude("{ROOT}/kernels/gpu/choose.cmake")\n'
        f'{call}\nfile(WRITE "{tmp_path}/out" "${{a}}|${{b}}")\n'
    )
    run_cmake("-P", script)
    return (tmp_path / "out").read_text().split("|")


@pytest.mark.parametrize(
    ("file", "driver"),
    [
        *((name, "NVIDIA") for name in DRIVER_FILES),
        ("dev/kfd", "AMD"),
        ("usr/local/cuda/lib64/stubs/libcuda.so", ""),
        ("usr/bin/nvcc", ""),
    ],
)
def test_a_driver_is_known_by_its_files(tmp_path: pathlib.Path, file: str, driver: str) -> None:
    root = tmp_path / "root"
    (root / file).parent.mkdir(parents=True)
    (root / file).touch()
    assert evaluate(tmp_path, f'jax_ep_gpu_driver(a "{root}")')[0] == driver


@pytest.mark.parametrize(
    ("driver", "compiler", "setting", "choice", "words"),
    [
        ("NVIDIA", "/x/nvcc", "", "cuda", ()),
        ("NVIDIA", "", "", "none", ("no nvcc", "left out", "JAX_EP_GPU=cuda")),
        ("NVIDIA", "/x/nvcc", "JAX_EP_SANITIZE thread", "none", ("SANITIZE", "JAX_EP_GPU=cuda")),
        ("NVIDIA", "/x/nvcc", "CMAKE_VERSION 3.25.1", "none", ("3.25.1", "JAX_EP_GPU=cuda")),
        ("", "/x/nvcc", "", "none", ("/x/nvcc", "no NVIDIA driver", "JAX_EP_GPU=cuda")),
        ("AMD", "/x/nvcc", "", "none", ("AMD", "JAX_EP_GPU=hip")),
        ("", "", "", "none", ()),
        ("", "NOTFOUND", "", "none", ()),
    ],
)
def test_what_auto_chooses_and_says(
    tmp_path: pathlib.Path,
    driver: str,
    compiler: str,
    setting: str,
    choice: str,
    words: tuple[str, ...],
) -> None:
    found, said = evaluate(
        tmp_path,
        f"set(CMAKE_VERSION 3.28.0)\nset({setting or 'JAX_EP_SANITIZE'})\n"
        f'jax_ep_auto_gpu(a b "{driver}" "{compiler}")',
    )
    assert found == choice
    assert bool(said) == bool(words)
    assert all(word in said for word in words) and "\n" not in said


def test_the_build_says_it_in_one_line(tmp_path: pathlib.Path) -> None:
    if evaluate(tmp_path, 'jax_ep_gpu_driver(a "")')[0]:
        pytest.skip("this machine has a GPU driver")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    path = f"{nvcc.parent}:{pathlib.Path(shutil.which('cmake') or '').parent}:/usr/bin:/bin"
    out = run_cmake(
        "-S", ROOT, "-B", tmp_path / "build", "-DJAX_EP_BUILD_PYTHON=OFF", PATH=path, HOME="/tmp"
    )
    lines = [line for line in out.splitlines() if "JAX_EP_GPU" in line]
    assert len(lines) == 1 and "auto: none" in lines[0] and str(nvcc) in lines[0], lines
