"""What users import: the names, the cost of importing, identities and sizes of groups."""

from __future__ import annotations

import inspect
import linecache
import re
import subprocess
import sys
from typing import Any, get_args, get_overloads

import jax
import jax.numpy as jnp
import pytest
from harness import Case, mesh_of

import jax_ep

NAMES = {
    "BootstrapError",
    "Config",
    "ExchangeStats",
    "FP8",
    "FlowStats",
    "Group",
    "GroupStats",
    "Health",
    "InFlight",
    "Layout",
    "Memory",
    "Mode",
    "Pad",
    "Placement",
    "Plan",
    "Quantized",
    "RankStats",
    "Received",
    "ReceivedQuantized",
    "combine",
    "combine_done",
    "combine_start",
    "create_group",
    "dispatch",
    "dispatch_bytes",
    "dispatch_done",
    "dispatch_quantized",
    "dispatch_start",
    "eplb",
    "export_checks",
    "fp8",
    "initialize",
    "moe",
    "overlap",
    "overlap_gradients",
    "plan",
    "routing",
    "wait",
}


def test_the_public_names() -> None:
    assert set(jax_ep.__all__) == NAMES
    for name in NAMES:
        assert getattr(jax_ep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jax_ep.nothing  # noqa: B018


def test_dir_shows_the_public_names_and_no_others() -> None:
    code = """
import jax_ep
print(*[name for name in dir(jax_ep) if not name.startswith("_")])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == NAMES | {"block_until_ready"}  # which is deprecated


def test_public_functions_document_themselves() -> None:
    choices = {"Layout", "Mode", "Pad"}  # Literals, which have no text
    modules = {"eplb", "fp8", "routing"}
    others = {"BootstrapError", "initialize", "Health", "InFlight"}
    for name in NAMES - choices - modules - others:
        text = getattr(jax_ep, name).__doc__
        assert text, name
        if callable(getattr(jax_ep, name)) and not isinstance(getattr(jax_ep, name), type):
            assert "Returns:" in text and "Example" in text, name


@pytest.mark.parametrize(
    "name", ["dispatch_start", "dispatch_done", "combine_start", "combine_done"]
)
def test_halves_are_documented_where_an_editor_shows_them(name: str) -> None:
    function = getattr(jax_ep, name)
    text = function.__doc__
    assert not re.search(r": as (in )?`", text)
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^\s+{parameter}: .{{15,}}", text, re.MULTILINE), parameter


def test_the_choices_are_literals() -> None:
    assert get_args(jax_ep.Mode) == ("ht", "ll")
    assert get_args(jax_ep.Layout) == ("expert_major", "expert_batched", "rank_major")
    assert get_args(jax_ep.Pad) == ("zero", "undefined")


# Else mypy refuses a flag that is known only when the program runs.
@pytest.mark.parametrize(
    ("function", "flag"), [(jax_ep.combine, "return_weights"), (jax_ep.moe, "return_stats")]
)
def test_the_types_of_a_flag_that_adds_a_result(function: Any, flag: str) -> None:
    overloads = get_overloads(function)
    flags = [inspect.signature(each).parameters[flag].annotation for each in overloads]
    assert flags == ["Literal[False]", "Literal[True]", "bool"]
    either = inspect.signature(overloads[-1]).return_annotation
    assert either == inspect.signature(function).return_annotation


def test_signatures_show_what_is_not_given() -> None:
    assert "= NOT_GIVEN," in str(inspect.signature(jax_ep.combine))


def test_group_counts_has_a_name_that_nobody_takes_for_group_sizes() -> None:
    plan = jax_ep.Plan(*map(jnp.array, range(8)), None, layout="expert_major", mode="ht")
    with pytest.warns(DeprecationWarning, match="now pairs_per_expert") as caught:
        assert plan.group_counts is plan.pairs_per_expert
    assert caught[0].filename == __file__
    assert "plan.group_counts" in linecache.getline(__file__, caught[0].lineno)


def test_importing_queries_no_device_and_no_extra_package() -> None:
    code = """
import jax, sys
before = set(sys.modules)
import jax_ep
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
heavy = {'flax', 'optax', 'matplotlib', 'rich', 'pyverbs', 'jax_ep._core', 'jax_ep._runtime.start'}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_session_ids_depend_on_shape_and_order_alone() -> None:
    config = jax_ep.Config(num_experts=8, top_k=1, hidden=24, max_tokens=3)
    code = f"""
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
import jax_ep
config = jax_ep.Config(num_experts=8, top_k=1, hidden=24, max_tokens=3)
mesh = jax.sharding.AbstractMesh((2,), ("ep",))
print(*(jax_ep.create_group(mesh, "ep", config).session_id for _ in range({2})))
"""
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    groups = [jax_ep.create_group(mesh_of(2), "ep", config, "xla") for _ in range(2)]
    here = [group.session_id for group in groups]
    assert [int(word) for word in there.stdout.split()] == here
    assert here[0] != here[1]
    assert all(-(2**63) <= value < 2**63 for value in here)
    other = jax_ep.Config(num_experts=8, top_k=1, hidden=24, max_tokens=4)
    assert jax_ep.create_group(mesh_of(2), "ep", other, "xla").session_id not in here


def test_group_properties(implementation: str) -> None:
    case = Case(ranks=4, tokens=16)
    ranks = case.ranks
    with jax_ep.create_group(mesh_of(ranks), "ep", case.config(), implementation) as group:
        assert group.num_ranks == ranks and group.local_ranks == tuple(range(ranks))
        assert group.node_size == ranks and group.experts_per_rank == 8 // ranks
        assert (group.heap_bytes > 0) == (implementation == "native")
        assert group.health().ok and group.health().message == ""
        assert group.stats()["implementation"] == implementation
        assert f"Group(axis='ep', num_ranks={ranks}" in group.dump_state()
        assert hash(group) == hash(group) and group == group
        group.check()
        assert jax_ep.wait({"a": jnp.ones(3)})["a"].shape == (3,)
    assert group.closed
    _expect_closed(group)


def _expect_closed(group: jax_ep.Group) -> None:
    """`health` and `check` agree that it cannot be used, and why."""
    with pytest.raises(RuntimeError, match=r"^group ep.* is closed; create a new one$") as caught:
        group.check()
    health = group.health()
    assert not health.ok and health.message == str(caught.value)
    assert dict(health.details)["closed"] is True


def test_a_closed_group_that_holds_nothing_says_so_too() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("ep",))
    with jax_ep.create_group(mesh, "ep", Case(ranks=2).config()) as group:
        assert group.lowering_only
        group.check()
        assert group.health().ok and dict(group.health().details)["closed"] is False
        view = group.view(top_k=1)
    _expect_closed(group)
    _expect_closed(view)


# CPU groups once left this variable unread.
def test_the_environment_sets_the_inbox(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EP_INBOX_SLOTS", "32")
    case = Case(ranks=2, tokens=16, node_size=1)
    with jax_ep.create_group(mesh_of(2), "ep", case.config(), native) as group:
        assert group.dump_state().count("inbox of 32 slots") == 2


@pytest.mark.parametrize(
    ("changes", "tokens", "rows"),
    [
        ({}, 0, 0),
        ({}, 1, 2 * 128),  # P = 8 pairs over 2 experts: one whole block each
        ({}, 1000, (8000 + 2 * 127) // 128 * 128),
        ({"capacity_factor": 1.25}, 1000, 2560 + 256),
        ({"capacity_factor": 100.0}, 1000, (8000 + 2 * 127) // 128 * 128),
        ({"capacity_factor": 1e308}, 1000, (8000 + 2 * 127) // 128 * 128),
        ({"recv_rows": 256}, 1000, 256),
    ],
)
def test_receive_rows(changes: dict[str, float], tokens: int, rows: int) -> None:
    config = jax_ep.Config(num_experts=8, top_k=2, hidden=8, max_tokens=1000, **changes)
    group = jax_ep.create_group(mesh_of(4), "ep", config, "xla")
    assert group.recv_rows(tokens) == rows
    assert group.recv_rows(tokens, "rank_major") == 4 * tokens
    assert group.recv_rows(tokens, "expert_batched") == 8 * tokens


def test_config_is_hashable_and_normalises_its_dtype() -> None:
    one = jax_ep.Config(num_experts=8, top_k=2, hidden=8, max_tokens=4, dtype="bfloat16")
    two = jax_ep.Config(num_experts=8, top_k=2, hidden=8, max_tokens=4, dtype=jnp.bfloat16)
    assert one == two and hash(one) == hash(two) and one.dtype == jnp.bfloat16


def test_a_plan_is_a_pytree_with_static_layout_and_mode() -> None:
    plan = jax_ep.Plan(*([jnp.zeros(1)] * 8), None, layout="expert_major", mode="ht")
    assert len(jax.tree.leaves(plan)) == 8
    assert jax.tree.map(lambda a: a + 1, plan).layout == "expert_major"
