"""JAX_EP_TRACE and `python -m jax_ep trace`: the picture agrees with what the job did."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import subprocess
import sys

import children
import numpy as np
import pytest
from launching import PROGRAMS, launch

import jax_ep.metrics
from jax_ep import __main__ as command_line
from jax_ep._cli import trace_clocks, trace_files

pytest.importorskip("jax_ep._core")
perfetto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

PROGRAM = PROGRAMS / "traced.py"
STEPS, RANKS = 6, 4  # of the program
LINE = 1 + PROGRAM.read_text().splitlines().index(
    "        recv = jax_ep.dispatch(group, x, ids)  # THE DISPATCH"
)


def _launch(prefix, *arguments, **options):
    env = {"JAX_EP_TRACE": str(prefix)}
    return launch("traced.py", *arguments, processes=RANKS, env=env, **options)


@dataclasses.dataclass
class Slice:
    row: str
    name: str
    begin: int
    end: int
    notes: dict
    flows: list
    inside: str = ""  # the slice around it


def _slices(path):
    """All slices and moments of a picture; checks that they nest and that times go up."""
    picture = perfetto.Trace()
    picture.ParseFromString(path.read_bytes())
    rows, parents = {}, {}
    found, counts = [], collections.defaultdict(list)
    stacks, newest = collections.defaultdict(list), collections.defaultdict(int)
    event_types = perfetto.TrackEvent
    for packet in picture.packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            rows[track.uuid], parents[track.uuid] = track.name, track.parent_uuid
            continue
        event, time = packet.track_event, packet.timestamp
        uuid = event.track_uuid
        assert time >= newest[uuid]
        newest[uuid] = time
        row = f"{rows.get(parents[uuid], '')} > {rows[uuid]}"
        if event.type == event_types.TYPE_SLICE_END:
            stacks[uuid].pop().end = time
            continue
        if event.type == event_types.TYPE_COUNTER:
            counts[row].append(event.counter_value)
            continue
        notes = {
            note.name: note.string_value or note.uint_value or note.double_value
            for note in event.debug_annotations
        }
        inside = stacks[uuid][-1].name if stacks[uuid] else ""
        new = Slice(row, event.name, time, time, notes, list(event.flow_ids), inside)
        found.append(new)
        if event.type == event_types.TYPE_SLICE_BEGIN:
            stacks[uuid].append(new)
    assert not any(stacks.values())
    return found, counts


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of four processes in two nodes, and its picture."""
    folder = tmp_path_factory.mktemp("trace")
    done = _launch(folder / "run")
    assert done.returncode == 0, done.text[-4000:]
    assert command_line.main(["trace", str(folder / "run")]) == 0
    return (*_slices(folder / "run.pftrace"), done.text, folder)


@pytest.mark.multiprocess
class TestPicture:
    def test_every_call_of_every_rank_is_there_with_its_line(self, job):
        slices, _, _, _ = job
        calls = collections.Counter(
            (each.row.split(" > ")[1].split(",")[0], each.name)
            for each in slices
            if "waited for its turn, us" in each.notes
        )
        for rank in range(RANKS):
            assert calls[f"rank {rank}", "plan"] == STEPS  # a dispatch of mode ll has its own
            assert calls[f"rank {rank}", "combine"] == 2 * STEPS
        dispatches = [each for each in slices if each.name == "dispatch"]
        assert dispatches and {each.notes["at"] for each in dispatches} == {f"{PROGRAM}:{LINE}"}

    def test_waits_and_phases_lie_within_calls(self, job):
        slices, _, _, _ = job
        inner = [
            each
            for each in slices
            if each.row.split(" > ")[1].startswith("rank")
            and not each.row.startswith("proxy")
            and each.begin < each.end
            and "waited for its turn, us" not in each.notes
        ]
        assert {"pull rows", "sum rows", "assign rows"} <= {each.name for each in inner}
        assert any(each.name.startswith("wait for rank") for each in inner)
        for each in inner:
            assert each.inside or each.name.endswith("create_group or close"), each

    def test_arrows_go_forward_from_a_signal_to_who_waited_for_it(self, job):
        slices, _, _, _ = job
        points = collections.defaultdict(list)
        for each in slices:
            for flow in each.flows:
                points[flow].append(each)
        ends = [each for each in slices if each.name.endswith("is here")]
        assert ends
        across = 0
        for end in ends:
            assert len(end.flows) == 1, end
            chain = sorted(points[end.flows[0]], key=lambda each: each.begin)
            assert chain[0].name.startswith("signal rank"), chain
            assert chain[-1] is end, chain
            middle = [each.name for each in chain[1:-1]]
            assert middle in ([], ["write + signal", "arrived"], ["signal", "arrived"]), chain
            across += bool(middle)
        assert across > 0

    def test_proxies_have_sent_what_the_statistics_say(self, job):
        slices, _, text, _ = job
        messages: collections.Counter[str] = collections.Counter()
        for each in slices:
            if each.row.startswith("proxy") and each.name != "arrived":
                messages[each.row] = max(messages[each.row], each.notes["messages so far"])
        checked = 0
        groups = dict(re.findall(r"^\[0\] ?group (\S+) (\S+)", text, re.MULTILINE))
        for mode, flows in re.findall(r"^\[\d\] ?flows (\S+) (.*)$", text, re.MULTILINE):
            for flow in json.loads(flows):
                channel = jax_ep.metrics.CHANNELS[flow["channel"]]
                if channel == "barrier":
                    continue  # close goes on after the statistics were printed
                row = (
                    f"proxy of rank {flow['rank']}, {groups[mode]} > rank {flow['peer']}, {channel}"
                )
                assert messages[row] == flow["messages"], (row, flow)
                checked += flow["messages"]
        assert checked > 0

    def test_nothing_is_under_way_at_the_end(self, job):
        _, counts, _, _ = job
        assert counts and all(max(values) > 0 for values in counts.values())
        assert all(values[-1] == 0 for values in counts.values()), counts.keys()

    def test_a_group_says_no_more_than_its_own_processes(self, job):
        folder = job[3]
        files = trace_files.find(str(folder / "run"))
        processes = [trace_files.read(path) for path in files]
        assert sorted(process.index for process in processes) == list(range(RANKS))
        for process in processes:
            ranks = {track.rank for track in process.tracks.values()}
            assert ranks == {process.index}
            assert sum(track.num_dropped for track in process.tracks.values()) == 0


@pytest.mark.multiprocess
def test_a_killed_process_leaves_its_last_calls(tmp_path):
    done = _launch(tmp_path / "run", "--kill", "2", grace=1)
    assert done.returncode != 0
    assert command_line.main(["trace", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    slices, _ = _slices(tmp_path / "out")
    combines = [each for each in slices if each.name == "combine"]
    of_dead = [each for each in combines if each.row.split(" > ")[1].startswith("rank 2")]
    assert len(of_dead) == STEPS and len(combines) == RANKS * STEPS


def _record(kind, body):
    return kind.to_bytes(4, "little") + len(body).to_bytes(4, "little") + body


def _process(index=0):
    return _record(1, f"1\nhost\nboot\n5\n{index}\n5\n7".encode())


def _track(name=b"plan", event_name=0, **values):
    """A track with one name and one event."""
    event = np.zeros(1, trace_files.EVENT)
    for key, value in {"name": event_name, **values}.items():
        event[key] = value
    track = _record(2, b"\0\0\0\0rank\n0\n1\n0\nep[1]#1")
    return track + _record(3, bytes(8) + name) + _record(5, bytes(8) + event.tobytes())


class TestCommand:
    def test_no_trace_is_an_error_that_says_how_to_make_one(self, tmp_path, capsys):
        assert command_line.main(["trace", str(tmp_path / "run")]) == 1
        assert f"JAX_EP_TRACE={tmp_path / 'run'}" in capsys.readouterr().err

    def test_another_file_is_an_error_that_names_it(self, tmp_path, capsys):
        path = tmp_path / "run.host.1.jaxep"
        # Such a text, and a record whose length is damaged.
        for data in (b"\1\0\0\0\5\0\0\0hello", b"\1\0\0\0\0\0\0\7" + _process()[8:] + _track()):
            path.write_bytes(data)
            assert command_line.main(["trace", str(tmp_path / "run")]) == 1
            assert f"{path} is not a trace" in capsys.readouterr().err

    def test_a_folder_is_an_error(self, tmp_path, capsys):
        # With JAX_EP_TRACE=/tmp/dir/ the files were hidden ones, which the command did not find.
        (tmp_path / ".host.5.jaxep").write_bytes(_process() + _track())
        assert command_line.main(["trace", f"{tmp_path}/"]) == 1
        assert f"got the folder '{tmp_path}/', expected" in capsys.readouterr().err

    @pytest.mark.parametrize("out", ["no/such/folder/out", ""])
    def test_a_file_that_cannot_be_written_is_an_error(self, tmp_path, capsys, out):
        (tmp_path / "run.host.5.jaxep").write_bytes(_process() + _track())
        out = str(tmp_path / out)  # the second is a folder
        assert command_line.main(["trace", str(tmp_path / "run"), "--out", out]) == 1
        assert out in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (_record(3, b"\7\0\0\0\0\0\0\0plan"), "7"),  # of no track
            (_record(4, b"1234"), "8 bytes"),
            (_record(2, b"\0\0\0\0rank"), "unpack"),
            (_track(name=b"\xff"), "utf-8"),
            (_track(kind=99), "the kind 99"),
            (_track(channel=99), "the channel 99"),
            (_track() + _track(event_name=9), "the name 9"),
            (_track(kind=6, event_name=9), "the command 9"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_damaged_file_is_an_error_that_names_it(self, tmp_path, capsys, damage, words):
        path = tmp_path / "run.host.5.jaxep"
        path.write_bytes(_process() + damage)
        assert command_line.main(["trace", str(tmp_path / "run")]) == 1
        said = capsys.readouterr().err
        assert f"{path} is damaged" in said and words in said

    @pytest.mark.parametrize(
        "begun",
        [b"", bytes(64), _process()[:3], _process()[:8], _process()[:9], _process()[:-1]],
        ids=["empty", "zeros", "half a header", "a header", "one byte more", "half a record"],
    )
    def test_a_process_that_was_killed_at_once_is_left_out(self, tmp_path, capsys, begun):
        """All but the empty one were refused as no trace, and with them the whole job's."""
        (tmp_path / "run.host.4.jaxep").write_bytes(begun)
        (tmp_path / "run.host.5.jaxep").write_bytes(_process() + _track())
        assert command_line.main(["trace", str(tmp_path / "run")]) == 0
        assert "run.host.4.jaxep has no record and is left out" in capsys.readouterr().out
        slices, _ = _slices(tmp_path / "run.pftrace")
        assert [each.name for each in slices] == ["plan"]
        (tmp_path / "run.host.5.jaxep").write_bytes(b"")
        assert command_line.main(["trace", str(tmp_path / "run")]) == 1
        assert "are without a record" in capsys.readouterr().err

    def test_files_of_two_runs_are_an_error_that_names_both(self, tmp_path, capsys):
        for pid in (1, 2):
            (tmp_path / f"run.host.{pid}.jaxep").write_bytes(_process())
        assert command_line.main(["trace", str(tmp_path / "run")]) == 1
        said = capsys.readouterr().err
        assert "host.1.jaxep" in said and "host.2.jaxep" in said and "two runs" in said

    @pytest.mark.parametrize(
        "tail",
        [
            _process()[:-1],
            _process()[:3],
            b"\5\0\0\0\xff\xff\xff\xff" + _track(),
            bytes(64),  # a host that went down has not written them
        ],
        ids=["half a record", "half a header", "a damaged length", "zeros"],
    )
    def test_what_is_left_out_at_the_end_is_told(self, tmp_path, capsys, tail):
        """Nobody was told, and took the picture for all that the process had done."""
        path = tmp_path / "run.host.5.jaxep"
        whole = _process() + _track()
        path.write_bytes(whole + tail)
        assert command_line.main(["trace", str(tmp_path / "run")]) == 0
        told = capsys.readouterr().err
        assert f"{path}: the last {len(tail)} of {path.stat().st_size:,} bytes are left out" in told
        assert len(_slices(tmp_path / "run.pftrace")[0]) == 1
        path.write_bytes(whole)
        assert command_line.main(["trace", str(tmp_path / "run")]) == 0
        assert capsys.readouterr().err == ""


class TestClocks:
    def test_messages_correct_what_real_time_has_wrong(self):
        rng = np.random.default_rng(0)
        true = {"a": 0, "b": 5_000_000_000, "c": -77_000_000}  # add this to a host's clock
        real = {
            host: offset + int(rng.integers(-2_000_000, 2_000_000)) for host, offset in true.items()
        }
        messages = []
        for _ in range(300):
            source, target = rng.choice(list(true), 2, replace=False)
            sent = int(rng.integers(10**10, 2 * 10**10))
            took = 20_000 + int(rng.exponential(50_000))
            messages.append((source, sent - true[source], target, sent + took - true[target]))
        found = trace_clocks.align(real, messages, "a")
        assert found["a"] == 0
        for host in ("b", "c"):
            assert abs(found[host] - true[host]) < 10_000  # a fifth of a usual message's time

    def test_one_way_traffic_is_only_moved_as_far_as_it_must(self):
        assert trace_clocks.align({"a": 0, "b": 0}, [("a", 100, "b", 40)], "a")["b"] == 60
        assert trace_clocks.align({"a": 0, "b": 0}, [("a", 100, "b", 140)], "a")["b"] == 0
        assert trace_clocks.align({"a": 0, "b": 0}, [("b", 100, "a", 40)], "a")["b"] == -60

    def test_without_messages_real_time_counts(self):
        assert trace_clocks.align({"a": 10, "b": 25}, [], "a") == {"a": 0, "b": 15}


def test_a_folder_that_is_not_there_fails_create_group():
    program = (
        "import jax, numpy as np, jax_ep\n"
        "mesh = jax.sharding.Mesh(np.array(jax.devices()), ('ep',))\n"
        "config = jax_ep.Config(num_experts=4, top_k=1, hidden=16, max_tokens=4)\n"
        "jax_ep.create_group(mesh, 'ep', config, implementation='native')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=children.quick() | {"JAX_EP_TRACE": "/no/such/folder/run", "JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "JAX_EP_TRACE: cannot open /no/such/folder/run." in done.stderr
