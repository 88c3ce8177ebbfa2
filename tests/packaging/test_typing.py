"""Types as a user sees them: py.typed, what mypy says of a strict program, the extension's stub."""

from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import jax_ep

ROOT = pathlib.Path(__file__).resolve().parents[2]
INSTALLED = pathlib.Path(jax_ep.__file__).parent
STUB_IS_OLD = (
    "jax_ep/_core.pyi is not what the extension has; write it anew: "
    "python -m nanobind.stubgen -m jax_ep._core -O jax_ep && ruff format jax_ep/_core.pyi"
)


@pytest.mark.ci
def test_a_strict_program_has_no_errors(tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed (jax_ep[dev])")
    # Where the checkout is what Python imports (an editable install, by a hook that mypy does not
    # know) mypy is shown the way; else it finds the package as it does at a user's, by py.typed.
    env = dict(os.environ)
    if INSTALLED.parent == ROOT:
        env["MYPYPATH"] = str(ROOT)
    # JAX's own functions are partly without types, P(...) for one.
    command = [sys.executable, "-m", "mypy", "--strict", "--untyped-calls-exclude=jax"]
    done = subprocess.run(
        [*command, "--cache-dir", tmp_path / "cache", ROOT / "tests/packaging/strict_program.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Success: no issues found in 1 source file" in done.stdout


def test_the_package_says_that_it_is_typed() -> None:
    assert (INSTALLED / "py.typed").exists()
    assert (INSTALLED / "_core.pyi").exists()


def _declarations(path: pathlib.Path) -> list[str]:
    """Every statement, without the layout of texts."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())
    return [ast.unparse(statement) for statement in tree.body]


def test_the_stub_is_what_the_extension_has(native: str, tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind, which writes stubs, is not installed (jax_ep[dev])")
    generated = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "jax_ep._core"]
    subprocess.run([*command, "-o", generated], check=True)
    assert _declarations(generated) == _declarations(ROOT / "jax_ep/_core.pyi"), STUB_IS_OLD
