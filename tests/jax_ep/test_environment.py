"""Variables of jax_ep: known names, allowed values, and the line of the log."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import types
from typing import Any

import jax
import pytest
from harness import Case, mesh_of

import jax_ep
from jax_ep import _env
from jax_ep._runtime import topology

ROOT = pathlib.Path(__file__).parents[2]
BAD = {
    "JAX_EP_LOG": "verbose",
    "JAX_EP_DEBUG": "yes",
    "JAX_EP_GPU_SMS": "0",
    "JAX_EP_THREADS_PER_RANK": "99999999999999999999",
    "JAX_EP_FAULTY": "reorder=16,rumour=1",
    "JAX_EP_WINDOW_MESSAGES": "5000",
    "JAX_EP_RING_SLOTS": "17",
    "JAX_EP_VERBS_MTU": "1500",
    "JAX_EP_JOB_SECRET": "short",
    "JAX_EP_TRACE": "/tmp/",
}


def create(implementation: str, ranks: int = 2, **changes: Any) -> jax_ep.Group:
    config = dataclasses.replace(Case(ranks=ranks, tokens=8).config(), **changes)
    return jax_ep.create_group(mesh_of(ranks), "ep", config, implementation)


def names_in(path: str, pattern: str = r"JAX_EP_[A-Z_]+[A-Z]") -> set[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    # "`JAX_EP_VERBS_SL`, `_TC`, `_MTU`" in a table
    for family, rest in re.findall(r"`(JAX_EP_[A-Z]+)_[A-Z]+`((?:, `_[A-Z]+`)+)", text):
        text += " ".join(family + name for name in re.findall(r"_[A-Z]+", rest))
    return set(re.findall(pattern, text))


def test_the_table_names_what_the_docs_and_the_code_name() -> None:
    documented = names_in("docs/tuning.md") | names_in("docs/transports.md")
    families = {"JAX_EP_OFI", "JAX_EP_VERBS"}
    assert documented - families == set(_env.NAMES)
    of_tests = {"JAX_EP_TEST_STALL"}
    assert names_in("proxy/base/env.cc", r'"(JAX_EP_[A-Z_]+)"') - of_tests <= set(_env.NAMES)


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_is_not_allowed_is_an_error(
    name: str, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, BAD[name])
    with pytest.raises(ValueError, match=name) as info:
        create(native)
    assert "expected" in str(info.value)
    monkeypatch.delenv(name)
    create(native).close()


def test_a_name_that_nothing_reads_is_a_warning_with_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAX_EP_OFI_PROVIDERS", "tcp")
    monkeypatch.setenv("JAX_EP_TEST_ANYTHING", "1")
    monkeypatch.setenv("JAX_EP_GPU", "none")  # read by pip install
    with pytest.warns(RuntimeWarning) as found:
        create("xla").close()
    assert [str(warning.message) for warning in found] == [
        "jax_ep: nothing reads the environment variable JAX_EP_OFI_PROVIDERS; "
        "did you mean JAX_EP_OFI_PROVIDER?"
    ]


@pytest.mark.parametrize("level", ["info", "warning"])
def test_the_log_has_one_line_per_group(
    level: str,
    implementation: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JAX_EP_LOG", level)
    with create(implementation, ranks=4, node_size=2) as group:
        rows, size, said = group.recv_rows(8), group.heap_bytes, group.memory()
        memory = f"R = {rows} for T = 8, heap {said.heap_bytes} bytes per rank"
        if said.network_stage_bytes:  # on GPUs, where size counts it and whole granules
            memory += f", network stage {said.network_stage_bytes} bytes per rank"
        else:
            assert said.heap_bytes == size // 4
        assert str(said) == memory
    lines = [
        line
        for line in capfd.readouterr().err.splitlines()
        if re.search(r" group ep\[4\](#\d+)?: ", line)
    ]
    assert len(lines) == (level == "info")
    nodes = (
        "nodes 2, transport loopback" if implementation == "native" else "nodes 2, transport xla"
    )
    for part in (implementation, "ranks 4", nodes, memory, f"{size} bytes in this process"):
        assert all(part in line for line in lines), lines


def test_shm_in_one_process_is_refused_in_words(native: str) -> None:
    with pytest.raises(ValueError, match=r"'shm', which joins processes.*use 'loopback'"):
        create(native, ranks=4, node_size=2, transport="shm")


def test_cuda_without_gpus_is_refused_in_words(native: str) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("the mesh has GPUs")
    with pytest.raises(ValueError, match=r"'cuda', which joins GPUs, but the mesh has none; use"):
        create(native, ranks=4, node_size=2, transport="cuda")


@pytest.mark.parametrize(("node_size", "asked"), [(None, []), (2, ["loopback"])])
def test_no_network_is_tried_that_is_not_needed(
    native: str, monkeypatch: pytest.MonkeyPatch, node_size: int | None, asked: list[str]
) -> None:
    if jax.default_backend() == "gpu" and node_size is not None:
        pytest.skip("nodes of one GPU process need a network of their own")
    from jax_ep import _core

    names = []
    transports = _core.transports

    def look(only: str = "") -> list[tuple[str, bool, str]]:
        names.append(only)
        return transports(only)

    monkeypatch.setattr(_core, "transports", look)
    create(native, ranks=4, node_size=node_size, transport="auto").close()
    assert names == asked


@pytest.mark.parametrize("name", ["shm", "cuda"])
def test_transports_of_one_host_are_refused_on_several(name: str) -> None:
    group = types.SimpleNamespace(config=types.SimpleNamespace(transport=name))
    with pytest.raises(ValueError, match=f"'{name}', which joins processes of one host, but"):
        topology.choose_transport(
            group,
            num_nodes=2,
            one_process=False,
            one_host=False,
            on_gpu=True,
            look=lambda name: {name: (True, "")},
        )


def test_sizes_that_a_command_between_nodes_cannot_name_are_refused(native: str) -> None:
    config = jax_ep.Config(num_experts=8, top_k=2, hidden=98304, max_tokens=65536, node_size=1)
    message = r"need [0-9.]+ GiB .* at most 1024.0 GiB .* lower max_tokens"
    with pytest.raises(ValueError, match=message):
        jax_ep.create_group(mesh_of(8), "ep", config, native)
