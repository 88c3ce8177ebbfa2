"""docs/flax.md: its snippets, one behind the other, are a program that runs."""

from __future__ import annotations

import pathlib
import re

import jax
import pytest

pytest.importorskip("optax", reason="Optax is not installed")
pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "flax.md"


def test_the_snippets_run(tmp_path, native):
    if len(jax.devices()) < 8:
        pytest.skip(f"the page has a mesh of 2 by 4 devices, JAX sees {len(jax.devices())}")
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 7
    names = {"folder": tmp_path}
    with jax.numpy_dtype_promotion("standard"):
        for number, snippet in enumerate(snippets):
            exec(compile(snippet, f"docs/flax.md snippet {number}", "exec"), names)
    for group in (names["group"], names["other_group"]):
        group.close()
