"""`python -m jax_ep report --html`: what the page shows, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import re

import jax
import numpy as np
import pytest
from harness import Case, eventually, inputs_of, keep, mesh_of, run

import jax_ep
from jax_ep.__main__ import main
from jax_ep._cli import report, report_page

pytest.importorskip("matplotlib")
ON_GPU = jax.default_backend() == "gpu"


def _counted(name, rank, num_ranks=2, pairs=(3, 1)):
    waits = {"plan": [0] * num_ranks, "dispatch": [0] * num_ranks}
    waits["dispatch"][1 - rank] = 5_000_000_000 * (1 - rank)
    counts = dict.fromkeys(("plans", "dispatches", "combines", "rows_received"), 7)
    entry = {"team": 0, "rank": rank, "rows_dropped": 41, "invalid_ids": 0, "wait_ns": 0}
    entry |= counts | {"pairs_per_expert": list(pairs), "wait_by_peer": waits}
    return {"name": name, "num_ranks": num_ranks, "failure": "", "ranks": [entry], "flows": []}


def _answering(monkeypatch, answers):
    """Processes 1, 2, ... that answer so, or raise."""

    def ask(pid, request=b""):
        answer = answers[pid - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) else json.dumps(answer)

    monkeypatch.setattr(report, "running", lambda: list(range(1, len(answers) + 1)))
    monkeypatch.setattr(report_page, "ask", ask)


def _version_1(*groups, uncounted=0):
    return {"version": 1, "groups": list(groups), "uncounted": uncounted}


def test_a_process_shows_what_it_has_counted(tmp_path, capsys):
    nodes = 1 if ON_GPU else 2  # nodes of one GPU process need a network of their own
    case = Case(ranks=4, tokens=17, top_k=2, hidden=16, node_size=4 // nodes)
    group = jax_ep.create_group(mesh_of(4), "ep", case.config(), "native")
    keep(group)
    inputs = inputs_of(case)

    def exchange(x, ids):
        received = jax_ep.dispatch(group, x, ids)
        return jax_ep.combine(group, received.x, received)

    run(group, exchange, inputs.x, inputs.ids)

    def answer_is_what_the_group_counts():
        answer = json.loads(report.ask(os.getpid(), report_page.REQUEST))
        (own,) = [found for found in answer["groups"] if found["name"] == group.name]
        stats = group.stats()
        for told, rank in zip(own["ranks"], stats["ranks"], strict=True):
            assert told == {key: rank[key] for key in told}
        flows = [flow["bytes"] for flow in stats["flows"]]
        assert [flow["bytes"] for flow in own["flows"]] == flows
        assert (sum(flows) > 0) == (nodes > 1)

    eventually(answer_is_what_the_group_counts)
    assert main(["report", "--pid", str(os.getpid()), "--html", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new/index.html").read_text()
    assert str(tmp_path / "new/index.html") in capsys.readouterr().out
    assert (
        group.name in page
        and page.count("<svg") >= 2
        and ("Flows to other nodes" in page) == (nodes > 1)
    )
    assert not re.search(r"(?:src|href)=.https?:", page)  # it loads nothing
    refused = json.loads(report.ask(os.getpid(), b'{"version": 2}'))
    assert "knows the request of version 1 only" in refused["error"]
    assert report.ask(os.getpid()).startswith("group ")


def test_processes_of_a_job_share_a_section_and_others_do_not(tmp_path, monkeypatch):
    same = [_version_1(_counted("ep[2]#1", rank)) for rank in (0, 1)]
    _answering(monkeypatch, [*same, _version_1(_counted("ep[2]#1", 0, pairs=(9, 9)))])
    assert report_page.report_page(None, str(tmp_path)) == 0
    page = (tmp_path / "index.html").read_text()
    assert page.count("<section>") == 2
    assert "2 of 2 ranks are on this host; processes 1, 2." in page
    assert "1 of 2 ranks are on this host; processes 3." in page
    assert "The busiest has 1.50 times the mean" in page
    assert "Most is waited for rank 1: 5.00 s, 100% of 5.00 s in all." in page
    assert "<td>41</td>" in page


def test_the_load_of_ranks_elsewhere_is_not_known():
    group = report_page.Counted("a", 2, [1], _counted("a", 1)["ranks"], [], [])
    assert np.isnan(group.load()[:2]).all() and group.load()[2:].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("group ep[2]#1: nobody is waiting", "its version of jax_ep knows no counters by request"),
        (PermissionError("it is of user 12"), "does not answer (it is of user 12)"),
        ('{"version": 1, "groups": [', "its answer was cut off; it is busy, ask again"),
        ({"version": 1, "error": "no such request"}, "it refused the request: no such request"),
        (_version_1(uncounted=2), "2 group(s) are left out"),
    ],
)
def test_what_cannot_be_shown_is_said_and_no_page_is_left(
    tmp_path, monkeypatch, capsys, answer, words
):
    _answering(monkeypatch, [answer])
    assert report_page.report_page(None, str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert words in said and "nothing to show" in said
    assert not (tmp_path / "index.html").exists()


def test_no_job_and_a_bad_folder_are_said(tmp_path, monkeypatch, capsys):
    _answering(monkeypatch, [])
    assert report_page.report_page(None, str(tmp_path)) == 1
    assert "no process of this host that has a native group open" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert report_page.report_page(None, str(tmp_path / "file")) == 2
    assert "cannot write" in capsys.readouterr().err
