"""``python -m jax_ep bench --report``: the page, the results, and methods that fail."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import subprocess
import sys

import children
import numpy as np
import pytest

from jax_ep import __main__ as command_line
from jax_ep._cli import (
    baselines,
    bench_report,
    bench_report_cases,
    bench_report_page,
    bench_report_plot,
    bench_report_worker,
    loop_steps,
)
from jax_ep._cli.bench import BenchOptions
from jax_ep._cli.shapes import SHAPES

LIMIT_S = 280
VOID = {"meta", "br", "hr", "img", "link", "input"}
RAGGED = "ragged_all_to_all"
OPTIONS = BenchOptions("tiny", "auto", 0, 0, None, "auto", 3, "out")


class Page(html.parser.HTMLParser):
    """Rows of results, and what a page would load; fails where elements do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.loads, self.tags = [], [], [], []
        self.in_row = self.in_cell = False
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.loads += [attrs[name] for name in ("src", "href", "srcset", "data") if name in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.in_row = "data-case" in attrs
        if tag == "tr" and self.in_row:
            self.rows.append([attrs["data-case"], attrs["data-operation"]])
        self.in_cell = tag == "td" and self.in_row
        if self.in_cell:
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.in_cell = False

    def handle_data(self, data):
        if self.in_cell:
            self.rows[-1][-1] += data


def made_up_case(mode, methods, missing=()):
    results = [
        {
            "method": method,
            "operation": operation,
            "median_us": 10.0 * (index + 1),
            "q1_us": 9.0 * (index + 1),
            "q3_us": 12.0 * (index + 1),
            "samples": 3,
            "calls_per_sample": 5,
            "payload_bytes": 1e6 * trips,
            "payload_gb_per_s": 1.0,
            "samples_us": [9.0, 10.0, 12.0],
        }
        for operation, trips in bench_report_cases.OPERATIONS.items()
        for index, method in enumerate(methods)
    ]
    return {
        "name": f"{mode}, tiny",
        "mode": mode,
        "shape": dataclasses.asdict(SHAPES["tiny"]),
        "ranks": 2,
        "processes": 2,
        "device": "cpu",
        "implementation": "native",
        "remote_bytes_per_rank": 5e5,
        "results": results,
        "missing": [{"method": name, "reason": reason} for name, reason in missing],
    }


def made_up_record(cases):
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m jax_ep bench --report DIR",
        "machine": {"CPU": "a <fast> one"},
        "versions": {"jax_ep": "1"},
        "repeats": 3,
        "cases": cases,
    }


def assert_loads_nothing(text, page):
    assert all(target.startswith("#") for target in page.loads), page.loads
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)


def test_a_page_has_a_row_for_each_result_and_names_what_is_missing():
    methods = [bench_report_cases.OURS, "all_to_all, padded"]
    whole = made_up_case("ll", methods, [(RAGGED, "no <support>")])
    failed = made_up_case("ht", methods[1:], [(bench_report_cases.OURS, "exit code 1")])
    text = bench_report_page.page(made_up_record([whole, failed]))
    page = Page(text)
    assert_loads_nothing(text, page)
    assert len(page.rows) == 3 * len(bench_report_cases.OPERATIONS)
    assert "no &lt;support&gt;" in text and "a &lt;fast&gt; one" in text
    assert "jax_ep is not there: exit code 1" in text
    assert page.tags.count("svg") == 2
    # jax_ep's own factor is 1; what is twice as slow has 2; without jax_ep there is none.
    factors = [row[4] for row in page.rows]
    assert factors == ["1.00", "2.00"] * len(bench_report_cases.OPERATIONS) + ["-"] * 4


def test_plots_of_one_page_share_no_names():
    case = made_up_case("ll", [bench_report_cases.OURS])
    names = [set(re.findall(r'id="([^"]*)"', bench_report_plot.plot(case, n))) for n in (1, 2)]
    assert names[0] and names[1] and not names[0] & names[1]


@pytest.mark.parametrize(
    ("us", "text"), [(0.123, "0.12 us"), (12.34, "12.3 us"), (1500, "1.5 ms"), (2e6, "2 s")]
)
def test_durations_have_three_digits(us, text):
    assert bench_report_plot.duration(us) == text


def test_every_baseline_can_be_drawn():
    assert {bench_report_cases.OURS, *baselines.BASELINES} == bench_report_plot._COLORS.keys()


def test_a_method_that_ends_its_job_does_not_take_the_others_along(monkeypatch):
    asked = []

    def job(settings, processes, devices):
        asked.append(dict(settings["missing"]))
        if RAGGED not in settings["missing"]:
            return None, RAGGED, "exit code 139: boom"
        return {"results": ["measured"]}, "", ""

    monkeypatch.setattr(bench_report, "_job", job)
    assert bench_report._measure({"shape": "tiny", "num_ranks": 2}, 2, 2) == {
        "results": ["measured"]
    }
    assert asked == [{}, {RAGGED: "exit code 139: boom"}]


def test_a_job_that_no_method_ended_is_told_and_not_repeated_for_ever(monkeypatch):
    monkeypatch.setattr(bench_report, "_job", lambda *_: (None, "", "no end within 300 s"))
    record = bench_report._measure({"shape": "tiny", "num_ranks": 2}, 2, 2)
    assert record["missing"] == [
        {"method": bench_report_cases.OURS, "reason": "no end within 300 s"}
    ]
    assert "no end within 300 s" in bench_report_page.page(
        made_up_record([{"name": "x", **record}])
    )


def test_a_job_has_a_deadline(monkeypatch):
    def late(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(bench_report.subprocess, "run", late)
    record, culprit, reason = bench_report._job({"missing": {}}, 1, 1)
    assert (record, culprit, reason) == (None, "", f"no end within {bench_report.CASE_LIMIT_S:g} s")


@pytest.mark.parametrize(
    ("found", "ranks", "processes", "expected"),
    [
        ("cpu 1", 0, 0, ("cpu", 4, 4)),
        ("cpu 1", 2, 0, ("cpu", 2, 2)),
        ("cpu 1", 8, 2, ("cpu", 8, 2)),
        ("gpu 8", 0, 0, ("gpu", 8, 1)),
        ("gpu 8", 2, 0, ("gpu", 2, 1)),
        ("gpu 2", 4, 0, "at most the 2 devices"),
        ("gpu 2", 2, 2, "expected one process"),
    ],
)
def test_ranks_and_processes_fit_the_machine(found, ranks, processes, expected, monkeypatch):
    done = subprocess.CompletedProcess([], 0, f"FOUND {found}\n", "")
    monkeypatch.setattr(bench_report.subprocess, "run", lambda *_, **__: done)
    options = dataclasses.replace(OPTIONS, num_ranks=ranks, num_processes=processes)
    if isinstance(expected, tuple):
        assert bench_report._place(options) == expected
        return
    with pytest.raises(ValueError, match=re.escape(expected)):
        bench_report._place(options)


def test_the_declared_cases_are_shapes_for_both_modes():
    for platform in ("cpu", "gpu"):
        cases = bench_report_cases.cases_for(platform, None, "auto")
        assert {case.mode for case in cases} == {"ll", "ht"}
        assert all(case.shape in SHAPES for case in cases)
    assert [case.name for case in bench_report_cases.cases_for("cpu", "tiny", "ll")] == ["ll, tiny"]


def run_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jax_ep", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**children.plain(), "JAX_PLATFORMS": "cpu", "COLUMNS": "120"},
        check=False,
    )


@pytest.mark.ci
@pytest.mark.multiprocess
def test_the_command_writes_a_page_and_all_samples(tmp_path):
    pytest.importorskip("jax_ep._core")
    folder = tmp_path / "report"
    arguments = ("--report", str(folder), "--shape", "tiny", "--ranks", "2", "--repeats", "2")
    done = run_command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((folder / "results.json").read_text())
    assert record["machine"]["CPU"] and record["versions"]["jax"]
    assert [case["name"] for case in record["cases"]] == ["ll, tiny", "ht, tiny"]
    gathered = {bench_report_cases.OURS, "all_gather + psum_scatter", "all_to_all, padded"}
    for case in record["cases"]:
        assert case["ranks"] == case["processes"] == 2
        missing = {missing["method"] for missing in case["missing"]}
        assert missing <= {RAGGED}  # XLA:CPU of jaxlib 0.10 has none
        measured = {(r["method"], r["operation"]) for r in case["results"]}
        methods = gathered | {RAGGED} - missing
        assert measured == {(m, o) for m in methods for o in bench_report_cases.OPERATIONS}
        for result in case["results"]:
            assert 0 < result["q1_us"] <= result["median_us"] <= result["q3_us"]
            assert result["samples"] == len(result["samples_us"]) == 2
            assert result["payload_bytes"] > 0 and result["payload_gb_per_s"] > 0
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert_loads_nothing(text, page)
    assert page.tags.count("svg") == 2
    assert len(page.rows) == sum(len(case["results"]) for case in record["cases"])
    for row in page.rows:
        assert all(float(re.match(r"[\d.]+", cell)[0]) > 0 for cell in row[3:])


@pytest.mark.parametrize("output", ["--out", "--report"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--ranks 3", "got 3 ranks, expected a divisor of the 8 experts of tiny"),
        ("--ranks 3 --processes 2", "got --ranks 3 and --processes 2, expected the ranks to be"),
        ("--node-size 3", "got --node-size 3, expected a divisor of the 4 ranks"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(
    output, options, words, tmp_path, capsys, monkeypatch
):
    # Without --report each of them ended in tracebacks of the job's processes.
    def place(options):
        ranks = options.num_ranks or 4
        return "cpu", ranks, options.num_processes or ranks

    monkeypatch.setattr(bench_report, "_place", place)
    command = ["bench", output, str(tmp_path / "out"), "--shape", "tiny", *options.split()]
    assert command_line.main(command) == 2
    assert words in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("option", ["--ranks", "--processes", "--node-size", "--repeats"])
@pytest.mark.parametrize("value", ["0", "-2", "1.5", "two"])
def test_a_count_is_a_number_of_at_least_one(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["bench", f"{option}={value}"])
    assert ended.value.code == 2
    assert f"{option}: got {value!r}, expected a number of at least 1" in capsys.readouterr().err


def test_a_transport_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["bench", "--transport", "carrier-pigeon"])
    assert ended.value.code == 2 and "'loopback'" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["--out", "--report"])
def test_a_folder_that_is_a_file_is_refused(output, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command_line.main(["bench", output, str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().out


@pytest.mark.parametrize("operation", bench_report_cases.OPERATIONS)
def test_no_collective_leaves_the_loop_that_is_timed(operation, tmp_path):
    options = {"shape": "tiny", "num_ranks": 2}
    case = bench_report_worker._Case(options, tmp_path / "progress")
    method = baselines.DenseAllToAll(case.sizes())
    x, ids, weights = case.inputs
    carry, context = x, (ids, weights)
    if operation == "combine":
        carry, state = case.per_rank(method.dispatch)(x, ids, weights)
        context = (state, weights)
    looped = case._looped(loop_steps.steps_of(method)[operation])
    text = looped.lower(np.int32(1), carry, context).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert "all-to-all(" in text and "all-to-all(" not in entry
    assert "input_output_alias={ {}: (1" in text  # the carry's memory is used again
