"""Every warning points at the first line that is neither jax_ep's nor JAX's nor Flax's."""

from __future__ import annotations

import _thread
import ast
import linecache
import pathlib
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest
from harness import Case, mesh_of

import jax_ep
from jax_ep import _warn
from jax_ep._runtime import cpu

PACKAGE = pathlib.Path(jax_ep.__file__).parent


def caught(action) -> warnings.WarningMessage:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        action()
    ours = [entry for entry in record if re.search("jax_ep|dropped", str(entry.message))]
    assert len(ours) == 1, [str(entry.message) for entry in record]
    return ours[0]


def is_here(entry: warnings.WarningMessage, *texts: str) -> bool:
    """Whether `entry` points at a line of this file that has one of `texts`."""
    line = linecache.getline(entry.filename, entry.lineno)
    return entry.filename == __file__ and any(text in line for text in texts)


def test_only_one_module_warns() -> None:
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("warnings", "warn"), ("warnings", "warn_explicit")}
    }
    assert callers == {"_warn.py"}


def test_the_old_name_of_wait_works_and_names_the_new_one() -> None:
    results = []
    entry = caught(lambda: results.append(jax_ep.block_until_ready({"a": jnp.ones(3)})))
    assert entry.category is DeprecationWarning and is_here(entry, "block_until_ready")
    assert "jax_ep.wait" in str(entry.message)
    assert results[0]["a"].shape == (3,)


def test_an_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EP_ZERO_COPIES", "1")
    entry = caught(lambda: jax_ep.create_group(mesh_of(2), "ep", Case(ranks=2).config(), "xla"))
    assert is_here(entry, "create_group") and "ZERO_COPIES" in str(entry.message)


def test_a_small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "1")
    entry = caught(cpu.warn_about_small_pool)
    assert is_here(entry, "action()") and entry.category is RuntimeWarning


def test_a_dropped_group(native: str) -> None:
    group = jax_ep.create_group(mesh_of(2), "ep", Case(ranks=2).config(), native)
    entry = caught(group.__del__)
    assert is_here(entry, "action()") and entry.category is ResourceWarning
    group.close()


def test_a_warning_while_jax_traces() -> None:
    names = {"__name__": "jax_ep.fake", "_warn": _warn}
    exec("def layer(x): _warn.warn('jax_ep: in a layer', UserWarning); return x", names)
    entry = caught(lambda: jax.jit(names["layer"])(jnp.ones(1)))
    assert is_here(entry, "jax.jit(")


def test_it_is_said_once_per_line() -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        for _ in range(3):
            jax_ep.block_until_ready(())
    assert len(record) == 1


def test_code_without_a_users_frame_is_taken_as_its_outermost() -> None:
    names = {"__name__": "jax_ep.fake", "_warn": _warn}
    code = "def run(): _warn.warn('jax_ep: here', UserWarning)"
    exec(compile(code, "inside.py", "exec"), names)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        done = threading.Event()
        names["done"] = done
        exec(compile("def all(): run(); done.set()", "inside.py", "exec"), names)
        _thread.start_new_thread(names["all"], ())  # without threading's own frames
        assert done.wait(20)
    assert [entry.filename for entry in record] == ["inside.py"]
