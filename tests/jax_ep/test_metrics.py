"""Group.stats is what its types say, and jax_ep.metrics exports it."""

from __future__ import annotations

import functools
import gc
import json
import os
import pathlib
import re
import signal
import threading
import time
import typing
import urllib.request

import jax
import numpy as np
import pytest
from harness import Case, inputs_of, keep, mesh_of, run

import jax_ep
import jax_ep.metrics

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
ON_GPU = jax.default_backend() == "gpu"
CPU_KEYS = {"rows_sent_internode", "bytes_sent_internode"}
GPU_KEYS = {"bytes_staged", "launches"}


def _group(implementation="native", **sizes):
    case = Case(**({"ranks": 4, "tokens": 33, "top_k": 2, "hidden": 16} | sizes))
    group = jax_ep.create_group(mesh_of(case.ranks), "ep", case.config(), implementation)
    keep(group)
    return case, group


def _exchange(x, ids, group):
    received = jax_ep.dispatch(group, x, ids)
    return jax_ep.combine(group, received.x, received)


def _samples(registry):
    """By name, all samples."""
    text = prometheus_client.generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def _value(registry, name, **labels):
    return _samples(registry)[name, tuple(sorted(labels.items()))]


class TestTypes:
    @pytest.mark.parametrize("node_size", [None, 2])
    def test_a_native_group_has_the_keys_of_its_types(self, node_size):
        if ON_GPU and node_size is not None:
            pytest.skip("nodes of one GPU process need a network of their own")
        case, group = _group(node_size=node_size)
        inputs = inputs_of(case)
        run(group, lambda x, ids: _exchange(x, ids, group), inputs.x, inputs.ids)
        stats = group.stats()
        elsewhere = CPU_KEYS if ON_GPU else GPU_KEYS
        expected = set(typing.get_type_hints(jax_ep.RankStats)) - elsewhere
        assert {frozenset(rank) for rank in stats["ranks"]} == {frozenset(expected)}
        expected = set(typing.get_type_hints(jax_ep.GroupStats)) - elsewhere
        assert set(stats) == expected
        assert bool(stats["flows"]) == (node_size is not None)
        for flow in stats["flows"]:
            assert set(flow) == set(typing.get_type_hints(jax_ep.FlowStats))
            assert jax_ep.metrics.CHANNELS[flow["channel"]] in ("plan", "dispatch", "combine") or (
                flow["channel"] in range(len(jax_ep.metrics.CHANNELS))
            )
        for name in expected - {"implementation", "num_ranks", "heap_bytes", "ranks", "flows"}:
            assert stats[name] == sum(rank[name] for rank in stats["ranks"]), name

    def test_xla_counts_nothing(self):
        _, group = _group("xla")
        assert group.stats() == {"implementation": "xla", "num_ranks": 4, "heap_bytes": 0}

    def test_every_key_is_described(self):
        for types in (jax_ep.RankStats, jax_ep.FlowStats, jax_ep.GroupStats):
            described = types.__doc__
            if types is jax_ep.GroupStats:
                described += jax_ep.RankStats.__doc__
            for key in typing.get_type_hints(types):
                assert re.search(rf"\b{key}\b[a-z_, ]*:", described), f"{types.__name__}: {key}"


class TestExpertLoad:
    @pytest.mark.parametrize("mode", ["ht", "ll"])
    @pytest.mark.parametrize("node_size", [4, 2])
    def test_it_is_what_the_routing_says(self, mode, node_size):
        if ON_GPU and node_size == 2:
            pytest.skip("nodes of one GPU process need a network of their own")
        case, group = _group(mode=mode, node_size=node_size, tokens=29, top_k=3, experts=12)
        expected = np.zeros(case.experts, np.int64)
        for seed in range(3):
            inputs = inputs_of(case, "zipf", seed)
            ids = np.array(inputs.ids)
            ids[:, ::5, 1] = -1
            ids[:, 3, 0] = case.experts + 7
            run(group, lambda x, ids: _exchange(x, ids, group), inputs.x, ids)
            valid = ids[(ids >= 0) & (ids < case.experts)]
            expected += np.bincount(valid, minlength=case.experts)
        counted = [rank["pairs_per_expert"] for rank in group.stats()["ranks"]]
        assert np.concatenate(counted).tolist() == expected.tolist()

    def test_a_reused_plan_counts_once_and_a_view_counts_in_its_group(self):
        case, group = _group(experts=8)
        inputs = inputs_of(case)

        def twice(x, ids):
            plan = jax_ep.plan(group, ids)
            first = jax_ep.dispatch(group, x, plan=plan)
            return jax_ep.dispatch(group, x, plan=plan).x + first.x

        run(group, twice, inputs.x, inputs.ids)
        total = sum(sum(rank["pairs_per_expert"]) for rank in group.stats()["ranks"])
        assert total == inputs.ids.size
        # On CPUs a plan of mode ll was one more dispatch, and its rows were received.
        stats = group.stats()
        assert (stats["plans"], stats["dispatches"]) == (case.ranks, 2 * case.ranks)
        view = group.view(num_experts=4)
        ids = np.zeros_like(inputs.ids)
        ids[..., 1] = 3
        run(group, lambda x, ids: _exchange(x, ids, view), inputs.x, ids)
        after = [rank["pairs_per_expert"] for rank in group.stats()["ranks"]]
        assert sum(map(sum, after)) == total + ids.size

    @pytest.mark.parametrize("mode", ["ht", "ll"])
    def test_logical_experts_whose_placement_changes_between_steps(self, mode):
        mesh = mesh_of(4)
        config = jax_ep.Config(
            num_experts=6, physical_experts=12, top_k=3, hidden=16, max_tokens=9, dtype=np.float32
        )
        group = jax_ep.create_group(mesh, "ep", config, "native")
        keep(group)

        def exchange(x, ids, placement):
            received = jax_ep.dispatch(group, x, ids, mode=mode, placement=placement)
            return jax_ep.combine(group, received.x, received)

        spec = jax.sharding.PartitionSpec("ep")
        specs = (spec, spec, jax.sharding.PartitionSpec())
        step = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=specs, out_specs=spec))
        rng = np.random.default_rng(7)
        seen = np.zeros(12, np.int64)
        with pytest.raises(ValueError, match="got no placement, expected the one that was used"):
            group.expert_load()
        with pytest.raises(ValueError, match="got a placement of 6 experts in 6 slots"):
            group.expert_load(jax_ep.Placement.identity(6))
        with pytest.raises(ValueError, match=r"got placement of type int, expected a jax_ep\.Plac"):
            group.expert_load(6)
        for _ in range(3):
            slots = rng.permutation(np.concatenate([np.arange(6), rng.integers(0, 6, 6)]))
            placement = jax_ep.Placement.from_physical(slots, 6)
            before = group.expert_load(placement)
            ids = rng.integers(-1, 6, (4 * 9, 3)).astype(np.int32)
            out = step(np.ones((4 * 9, 16), np.float32), ids, placement)
            jax.block_until_ready(out)
            load = group.expert_load(placement, all_processes=True) - before
            assert load.tolist() == np.bincount(ids[ids >= 0], minlength=6).tolist()
            seen[:6] += load
        total = sum(sum(rank["pairs_per_expert"]) for rank in group.stats()["ranks"])
        assert total == seen.sum() > 0

    def test_processes_of_a_group_that_has_failed_are_not_waited_for(self):
        group = _group("native")[1]
        group._native._session.abort("rank 1 is gone")
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            group.expert_load(all_processes=True)
        assert group.expert_load().sum() == 0

    def test_xla_says_that_it_counts_nothing(self):
        with pytest.raises(ValueError, match=r"counts nothing; sum jax_ep\.routing"):
            _group("xla")[1].expert_load()

    def test_a_sum_over_processes_keeps_63_bits(self):
        values = np.array([0, 1, 2**31 - 1, 2**31, 2**40 + 5, 2**61 + 3])
        assert jax_ep._stats.sum_over_processes(values).tolist() == values.tolist()


class TestWaits:
    @pytest.mark.skipif(ON_GPU, reason="stalls CPU ranks; tests/gpu has late ranks of GPUs")
    @pytest.mark.parametrize(
        ("mode", "channel", "phase"),
        [
            ("ht", "plan", "plan"),
            ("ll", "ll-dispatch", "dispatch"),
            ("ll", "ll-combine", "combine"),
        ],
    )
    def test_the_late_rank_is_waited_for_in_its_phase(self, monkeypatch, mode, channel, phase):
        monkeypatch.setenv("JAX_EP_TEST_STALL", f"{channel}:2:0.4")
        case, group = _group(node_size=2)
        inputs = inputs_of(case)

        def exchange(x, ids):
            received = jax_ep.dispatch(group, x, ids, mode=mode)
            return jax_ep.combine(group, received.x, received)

        run(group, exchange, inputs.x, inputs.ids)
        waits = group.wait_ns(phase)
        assert waits.shape == (4, 4) and not waits.diagonal().any()
        assert waits.sum(axis=0).argmax() == 2 and waits[:, 2].max() > 0.2e9
        by_phase = sum(group.wait_ns(name) for name in jax_ep._stats.WAIT_PHASES)
        assert group.wait_ns().tolist() == by_phase.tolist()
        sums = [rank["wait_ns"] for rank in group.stats()["ranks"]]
        assert group.wait_ns().sum(axis=1).tolist() == sums
        for team in (1, -1, "a"):
            with pytest.raises(ValueError, match=r"got team=.*, expected one of the group's 1"):
                group.wait_ns(team=team)

    def test_an_unknown_phase_is_an_error(self):
        with pytest.raises(ValueError, match="got phase='ht', expected one of"):
            _group("xla")[1].wait_ns("ht")


class TestExport:
    def test_values_are_those_of_the_group(self):
        case, group = _group(node_size=None if ON_GPU else 2)
        registry = prometheus_client.CollectorRegistry()
        with jax_ep.metrics.register(group, registry):
            inputs = inputs_of(case)
            run(group, lambda x, ids: _exchange(x, ids, group), inputs.x, inputs.ids)
            stats = group.stats()
            samples = _samples(registry)
            name = group.name
            for rank in stats["ranks"]:
                of = {"group": name, "team": "0", "rank": str(rank["rank"])}
                labels = tuple(sorted(of.items()))
                assert samples["jax_ep_rows_received_total", labels] == rank["rows_received"]
                assert samples["jax_ep_dispatches_total", labels] == 1
                seconds = samples["jax_ep_wait_seconds_total", labels]
                assert seconds == pytest.approx(rank["wait_ns"] / 1e9)
                for phase, by_peer in rank["wait_by_peer"].items():
                    for peer, nanoseconds in enumerate(by_peer):
                        key = of | {"peer": str(peer), "phase": phase}
                        key = "jax_ep_wait_for_peer_seconds_total", tuple(sorted(key.items()))
                        assert (key in samples) == (peer != rank["rank"])
                        assert samples.get(key, 0) == pytest.approx(nanoseconds / 1e9)
                for local, count in enumerate(rank["pairs_per_expert"]):
                    expert = rank["rank"] * group.experts_per_rank + local
                    labels = tuple(sorted((of | {"expert": str(expert)}).items()))
                    assert samples["jax_ep_expert_pairs_total", labels] == count
            for flow in stats["flows"]:
                channel = jax_ep.metrics.CHANNELS[flow["channel"]]
                if channel == "barrier":
                    continue
                labels = {"group": name, "team": "0", "rank": str(flow["rank"])}
                labels |= {"peer": str(flow["peer"]), "channel": channel}
                key = tuple(sorted(labels.items()))
                assert samples["jax_ep_flow_messages_total", key] >= flow["messages"]
        assert not _samples(registry)

    @pytest.mark.parametrize(
        ("limit", "asked", "expected"),
        [(4, None, True), (3, None, False), (3, True, True), (4, False, False)],
    )
    def test_waits_by_peer_are_bounded(self, monkeypatch, limit, asked, expected):
        monkeypatch.setattr(jax_ep.metrics, "WAITS_LIMIT", limit)
        registry = prometheus_client.CollectorRegistry()
        with jax_ep.metrics.register(_group()[1], registry, waits_by_peer=asked):
            names = [name for name, _ in _samples(registry)]
        assert names.count("jax_ep_wait_for_peer_seconds_total") == (4 * 4 * 3 if expected else 0)

    def test_several_groups_share_each_family(self):
        (_, one), (_, two), (_, xla) = _group(), _group(None), _group("xla")
        registry = prometheus_client.CollectorRegistry()
        for group in (one, two, xla):
            jax_ep.metrics.register(group, registry)
        text = prometheus_client.generate_latest(registry).decode()
        types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert len(types) == len(set(types))
        for group in (one, two):
            labels = {"group": group.name, "implementation": "native"}
            assert _value(registry, "jax_ep_healthy", **labels) == 1
        labels = {"group": xla.name, "implementation": "xla"}
        assert _value(registry, "jax_ep_healthy", **labels) == 1

    def test_a_view_exports_its_group(self):
        _, group = _group(experts=8)
        of_group, of_view = (prometheus_client.CollectorRegistry() for _ in range(2))
        jax_ep.metrics.register(group, of_group)
        jax_ep.metrics.register(group.view(num_experts=4), of_view)  # which nobody keeps
        gc.collect()
        assert _samples(of_group).keys() == _samples(of_view).keys()
        assert any(name == "jax_ep_healthy" for name, _ in _samples(of_view))

    def test_twice_is_an_error_and_unregistering_twice_is_none(self):
        _, group = _group()
        registry = prometheus_client.CollectorRegistry()
        exporter = jax_ep.metrics.register(group, registry)
        with pytest.raises(ValueError, match=re.escape(group.name)):
            jax_ep.metrics.register(group, registry)
        exporter.unregister()
        exporter.unregister()
        jax_ep.metrics.register(group, registry).unregister()

    def test_what_is_no_group_or_no_registry_is_an_error(self):
        _, group = _group("xla")
        with pytest.raises(TypeError, match=r"got 'ep', expected a jax_ep\.Group"):
            jax_ep.metrics.register("ep")
        for _ in range(2):  # the second time it was taken, and exported nowhere
            with pytest.raises(TypeError, match=r"got <module .*, expected a"):
                jax_ep.metrics.register(group, prometheus_client)

    def test_a_closed_group_stays_as_it_was_and_a_forgotten_one_goes(self):
        registry = prometheus_client.CollectorRegistry()
        case = Case(ranks=4, tokens=8, top_k=1, hidden=16)
        group = jax_ep.create_group(mesh_of(4), "ep", case.config(), "native")
        name = group.name
        jax_ep.metrics.register(group, registry)
        inputs = inputs_of(case)
        run(group, functools.partial(_exchange, group=group), inputs.x, inputs.ids)
        group.close()
        assert _value(registry, "jax_ep_healthy", group=name, implementation="native") == 0
        assert _value(registry, "jax_ep_heap_bytes", group=name) == 0
        assert _value(registry, "jax_ep_dispatches_total", group=name, team="0", rank="1") == 1
        del group
        jax.clear_caches()
        gc.collect()
        if any(labels for _, labels in _samples(registry)):
            # A program may still hold it; then it stays exported, and a scrape raises nothing.
            assert _value(registry, "jax_ep_healthy", group=name, implementation="native") == 0

    def test_a_group_that_cannot_be_read_shows_what_it_was(self, monkeypatch):
        _, group = _group()
        registry = prometheus_client.CollectorRegistry()
        jax_ep.metrics.register(group, registry)
        before = _value(registry, "jax_ep_stats_age_seconds", group=group.name)
        hold = threading.Event()
        real = type(group).stats

        def slow(self):
            hold.wait(20)
            return real(self)

        monkeypatch.setattr(jax_ep.metrics, "READ_LIMIT_S", 0.05)
        monkeypatch.setattr(type(group), "stats", slow)
        _samples(registry)
        age = _value(registry, "jax_ep_stats_age_seconds", group=group.name)
        assert before < 0.05 <= age

        # Its health does not wait for its counters.
        labels = {"group": group.name, "implementation": "native"}
        monkeypatch.setattr(type(group), "health", lambda self: jax_ep.Health(False, "lost"))
        assert _value(registry, "jax_ep_healthy", **labels) == 0
        monkeypatch.undo()
        monkeypatch.setattr(jax_ep.metrics, "READ_LIMIT_S", 0.05)

        def broken(self):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(type(group), "stats", broken)
        hold.set()
        for _ in range(50):
            if _value(registry, "jax_ep_healthy", **labels) == 0:
                return
        pytest.fail("a group whose statistics cannot be read is shown as healthy")

    def test_groups_that_cannot_be_read_share_one_limit(self, monkeypatch):
        registry = prometheus_client.CollectorRegistry()
        hold = threading.Event()
        for _ in range(4):
            jax_ep.metrics.register(_group()[1], registry)
        monkeypatch.setattr(jax_ep.metrics, "READ_LIMIT_S", 0.5)
        monkeypatch.setattr(jax_ep.Group, "stats", lambda self: hold.wait(20))
        begin = time.monotonic()
        _samples(registry)
        assert 0.4 < time.monotonic() - begin < 1.5
        hold.set()

    def test_a_view_exports_the_experts_of_its_group(self):
        _, group = _group(experts=8)
        registry = prometheus_client.CollectorRegistry()
        jax_ep.metrics.register(group.view(num_experts=4), registry)
        pairs = [dict(labels) for name, labels in _samples(registry) if "expert_pairs" in name]
        assert sorted(int(labels["expert"]) for labels in pairs) == list(range(8))

    @pytest.mark.filterwarnings("ignore:.*os.fork")
    def test_a_child_that_is_forked_amid_a_scrape_exports_nothing(self):
        registry = prometheus_client.CollectorRegistry()
        exporter = jax_ep.metrics.register(_group("xla")[1], registry)
        with exporter._reader._lock, jax_ep.metrics._lock:  # as another thread may
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                exporter.unregister()
                os._exit(1 if _samples(registry) else 0)
        assert os.waitpid(child, 0)[1] == 0
        assert _samples(registry)

    def test_a_server_is_scraped_while_a_program_runs(self):
        case, group = _group(tokens=16)
        registry = prometheus_client.CollectorRegistry()
        server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
        try:
            with jax_ep.metrics.register(group, registry):
                inputs = inputs_of(case)
                seen = []
                for _ in range(5):
                    run(group, lambda x, ids: _exchange(x, ids, group), inputs.x, inputs.ids)
                    url = f"http://127.0.0.1:{server.server_port}/metrics"
                    text = urllib.request.urlopen(url, timeout=10).read().decode()
                    pattern = r'^jax_ep_combines_total\{[^}]*rank="2"[^}]*\} (\S+)'
                    seen.append(float(re.search(pattern, text, re.MULTILINE)[1]))
                assert seen == [1, 2, 3, 4, 5]
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)


def test_grafana_s_own_model_takes_the_dashboard_and_loses_nothing_of_it():
    """What Grafana does not know of a file, it drops; its model is generated from its schemas."""
    sdk = functools.partial(pytest.importorskip, reason="of the extra `test`")
    sdk("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    encoder = sdk("grafana_foundation_sdk.cog.encoder").JSONEncoder()
    dashboard = sdk("grafana_foundation_sdk.models.dashboard").Dashboard
    board = json.loads((ROOT / "docs/grafana/jax_ep.json").read_text())
    taken = json.loads(encoder.encode(dashboard.from_json(board)))

    def lost(given, kept, path="dashboard"):
        if isinstance(given, dict):
            for key, value in given.items():
                assert key in kept, f"{path}.{key}"
                lost(value, kept[key], f"{path}.{key}")
        elif isinstance(given, list):
            assert len(given) == len(kept), path
            for i, (value, other) in enumerate(zip(given, kept, strict=True)):
                lost(value, other, f"{path}[{i}]")
        else:
            assert given == kept, path

    lost(board, taken)


def test_the_dashboard_asks_for_what_is_exported():
    _, group = _group(node_size=None if ON_GPU else 2)
    registry = prometheus_client.CollectorRegistry()
    jax_ep.metrics.register(group, registry)
    text = prometheus_client.generate_latest(registry).decode()
    exported = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    board = json.loads((ROOT / "docs/grafana/jax_ep.json").read_text())
    asked = set()
    for panel in board["panels"]:
        assert panel["title"] and panel["description"] and panel["targets"]
        for target in panel["targets"]:
            asked |= set(re.findall(r"\bjax_ep_\w+", target["expr"]))
    assert asked <= exported and len(asked) > 12
    where = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y)
        for at in where
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
