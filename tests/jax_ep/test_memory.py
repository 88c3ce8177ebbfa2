"""What a group takes, said before it is made: against groups and arrays that exist."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from harness import Case, group_of, inputs_of, mesh_of, put
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _gpu_library, _memory

CASES = [
    Case(ranks=4, tokens=16),
    Case(ranks=4, tokens=300, mode="ht", node_size=2, dtype="bfloat16"),
    Case(ranks=4, tokens=300, node_size=1, partials="dtype", dtype="bfloat16", top_k=3),
    Case(ranks=8, tokens=100, mode="ll", experts=16, hidden=136),
    Case(ranks=2, tokens=0, max_tokens=40, mode="ht", experts=64),
    Case(ranks=1, tokens=7),
]


PLATFORM = "gpu" if jax.default_backend() == "gpu" else "cpu"
# What is allocated is a multiple of this: on GPUs the driver's granule.
GRANULE = 2 << 20 if PLATFORM == "gpu" else 1


def allocated(heap_bytes: int) -> int:
    return -(-heap_bytes // GRANULE) * GRANULE


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_heap_is_that_of_a_group(case: Case, native: str) -> None:
    config = dataclasses.replace(case.config(), mode=case.mode or "auto")
    said = config.memory(case.ranks, platform=PLATFORM)
    lowering_only = jax_ep.create_group(AbstractMesh((case.ranks,), ("ep",)), "ep", config)
    with jax_ep.create_group(mesh_of(case.ranks), "ep", config, native) as group:
        of_rank = allocated(said.heap_bytes) + said.network_stage_bytes
        assert of_rank * case.ranks == group.heap_bytes > 0
        assert said == group.memory() == lowering_only.memory(PLATFORM)
        assert said == dataclasses.replace(config, node_size=None).memory(
            case.ranks, group.node_size, platform=PLATFORM
        )
    has_stage = PLATFORM == "gpu" and group.node_size < case.ranks
    assert (said.network_stage_bytes > 0) == has_stage and said.unknown == ""
    assert lowering_only.heap_bytes == 0


def test_teams_have_a_heap_per_rank(native: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "ep"))
    config = Case(ranks=2, tokens=9).config()
    with jax_ep.create_group(mesh, "ep", config, native) as group:
        said = config.memory(2, platform=PLATFORM)
        assert allocated(said.heap_bytes) * 4 == group.heap_bytes


def formula(config: jax_ep.Config, ranks: int, node: int) -> int:
    """docs/tuning.md, "Memory of a rank"."""
    nodes, slots, depth = ranks // node, config.top_k, config.max_in_flight
    bf16 = config.dtype.itemsize * config.hidden
    total = 0

    def cut(tokens: int, fits: int) -> tuple[int, int]:
        size = min(tokens, max(1, fits))
        return size, depth if size == tokens else 1

    row = bf16 + 4 * slots
    partial = (bf16 if config.partials == "dtype" else 4 * config.hidden) + 4 * slots
    if config.mode != "ll":
        tokens = config.max_tokens
        plan = 4 * (config.num_experts + tokens * slots)
        summed, sum_sets = cut(tokens, 8 * tokens // ranks)
        sent, row_sets = cut(tokens, 4 * tokens // nodes)
        total += depth * tokens * row + 2 * plan + sum_sets * ranks * summed * partial
        if nodes > 1:
            total += 2 * nodes * plan + 2 * row_sets * nodes * sent * row
            total += 2 * sum_sets * nodes * summed * (partial + 4 * slots * (node - 1))
    if config.mode != "ht":
        tokens = min(config.max_tokens, 128)
        size, sets = cut(tokens, 8192 // ranks)
        total += sets * ranks * (size * row + 8 * tokens * slots)
        total += sets * tokens * min(ranks, slots) * partial
        if nodes > 1:
            total += sets * (tokens * (row + 8 * slots) + ranks * size * partial)
    return total


@pytest.mark.parametrize("ranks", [8, 64, 256, 1024])
@pytest.mark.parametrize("options", [{}, {"partials": "dtype"}, {"mode": "auto"}, {"mode": "ll"}])
def test_the_formula_of_tuning_holds(ranks: int, options: dict[str, Any], native: str) -> None:
    config = jax_ep.Config(
        num_experts=max(256, ranks),
        top_k=8,
        hidden=7168,
        max_tokens=128 if options.get("mode") == "ll" else 4096,
        capacity_factor=1.25,
        **{"mode": "ht", **options},
    )
    for node in (8, min(ranks, 64)):
        heap = config.memory(ranks, node).heap_bytes
        assert heap is not None
        assert heap == pytest.approx(formula(config, ranks, node), rel=0.005, abs=1 << 20)
        assert heap < (1 << 30 if config.mode == "ll" else 5 << 29)


@pytest.mark.parametrize("layout", ["expert_major", "expert_batched", "rank_major"])
@pytest.mark.parametrize("tokens", [16, 5])
def test_the_rows_are_those_of_a_dispatch(layout: str, tokens: int) -> None:
    case = Case(ranks=4, tokens=tokens, max_tokens=16, capacity_factor=1.0, dtype="bfloat16")
    group = group_of(case, "xla")
    rows = getattr(group.config.memory(4, num_tokens=tokens), layout)
    inputs = inputs_of(case)

    def local(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jax_ep.dispatch(group, x[0], ids[0], layout=layout).x

    mapped = jax.shard_map(local, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
    received = jax.eval_shape(mapped, *put(group, (inputs.x, inputs.ids)))
    assert rows.recv_bytes == received.size * received.dtype.itemsize // 4
    assert rows.recv_rows == group.recv_rows(tokens, layout)


def test_xla_holds_nothing() -> None:
    group = group_of(Case(ranks=4, tokens=16), "xla")
    memory = group.memory()
    assert (memory.platform, memory.heap_bytes, memory.network_stage_bytes) == ("xla", 0, 0)
    assert memory == group.config.memory(4, platform="xla")
    with pytest.raises(ValueError, match=r"Group.memory: got platform='tpu', expected one of"):
        group.memory("tpu")  # type: ignore[arg-type]


def test_gpus_are_known_where_their_library_is(native: str) -> None:
    # In mode ll one node has more: room for tagged words.
    config = dataclasses.replace(Case(ranks=4, tokens=16).config(), mode="ht")
    memory = config.memory(4, node_size=2, platform="gpu")
    if not pathlib.Path(_gpu_library.path()).exists():
        pytest.skip("jax_ep was installed where nvcc was not found: there is no GPU library")
    one_node = config.memory(4, platform="gpu")
    assert memory.heap_bytes > one_node.heap_bytes > config.max_tokens * 4 * config.hidden
    assert memory.network_stage_bytes > 0 == one_node.network_stage_bytes


def test_mode_ht_on_gpus_holds_partials_and_one_stage(native: str) -> None:
    """docs/gpu.md has these numbers; tests/kernels_gpu/heap_layout_test.cc more sizes."""
    if not pathlib.Path(_gpu_library.path()).exists():
        pytest.skip("jax_ep was installed where nvcc was not found: there is no GPU library")
    config = jax_ep.Config(
        num_experts=256, top_k=8, hidden=7168, max_tokens=4096, partials="dtype", mode="ht"
    )

    def heap_bytes(**options: Any) -> int:
        heap = dataclasses.replace(config, **options).memory(4, platform="gpu").heap_bytes
        assert heap is not None
        return heap

    row = 2 * 7168 + 4 * 8  # with its weights or scalars
    record_flags = 4 * 4096 * 8
    slices = 2 * 4 * 32 * (16 + 256 * 2)  # counts of plans
    tables = 4096 * 8 * (8 * 4 + 4 * 4) + record_flags + slices
    rest = heap_bytes() - (3 * 4096 * row + 4096 * row + tables)
    assert 0 < rest < 300_000
    assert heap_bytes() == heap_bytes(max_in_flight=1) == heap_bytes(max_in_flight=7)
    assert heap_bytes() >> 20 == 226
    assert heap_bytes(mode="auto") >> 20 == 266
    assert heap_bytes(mode="auto", max_in_flight=4) > heap_bytes(mode="auto")


def test_without_the_gpu_library_the_reason_is_said(
    native: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "libjax_ep_gpu.so")
    monkeypatch.setattr(_gpu_library, "path", lambda: path)
    memory = Case(ranks=4).config().memory(4, platform="gpu")
    assert memory.heap_bytes is None and memory.network_stage_bytes is None
    assert path in memory.unknown and memory.unknown in str(memory)
    assert memory.expert_major.recv_rows > 0


def test_without_the_extension_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'jax_ep._core'")

    monkeypatch.setattr(_memory._extension, "load", missing)
    memory = Case().config().memory(4)
    assert memory.heap_bytes is None and memory.unknown == "No module named 'jax_ep._core'"
    assert "heap not known (No module" in str(memory)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3,), {}, "memory: got num_experts=8, expected a multiple of the group's 3 ranks"),
        ((4, 3), {}, "memory: got node_size=3, expected a divisor of the group's 4 ranks"),
        ((4, 0), {}, "memory node_size: got 0, expected an int of at least 1"),
        ((0,), {}, "memory num_ranks: got 0, expected an int of at least 1"),
        ((4,), {"platform": "tpu"}, "got platform='tpu', expected one of"),
        ((4,), {"num_tokens": -1}, "memory num_tokens: got -1"),
    ],
)
def test_what_memory_refuses(arguments: tuple[int, ...], options: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case().config().memory(*arguments, **options)


def test_the_repr_shows_what_was_resolved(native: str) -> None:
    config = Case(ranks=4, tokens=300, node_size=2).config()
    with jax_ep.create_group(mesh_of(4), "ep", config) as group:
        text = repr(group)
        for part in (
            "Group(axis='ep', num_ranks=4, num_experts=8, implementation='native'",
            "mode='auto (ll: T <= 128)'",
            f"partials={'dtype' if PLATFORM == 'gpu' else 'float32'!r}",
            "node_size=2, transport='loopback'",
            f"heap_bytes={group.heap_bytes})",
        ):
            assert part in text
    assert repr(group).endswith("heap_bytes=0, closed)")
    abstract = jax_ep.create_group(AbstractMesh((4,), ("ep",)), "ep", config)
    assert "implementation=None" in repr(abstract) and "lowering-only" in repr(abstract)


def test_a_lowering_only_group_logs_its_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_EP_LOG", "info")
    config = Case(ranks=4).config()
    group = jax_ep.create_group(AbstractMesh((4,), ("ep",)), "ep", config)
    line = f"INFO group ep[4]: lowering-only, ranks 4, nodes 1, transport xla, {group.memory()}"
    assert line in capfd.readouterr().err


def test_nothing_is_computed_for_a_line_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def memory(self: jax_ep.Group) -> Any:
        raise AssertionError("loads the extension")

    monkeypatch.setenv("JAX_EP_LOG", "warning")
    monkeypatch.setattr(jax_ep.Group, "memory", memory)
    jax_ep.create_group(AbstractMesh((4,), ("ep",)), "ep", Case(ranks=4).config())
    assert "INFO" not in capfd.readouterr().err
