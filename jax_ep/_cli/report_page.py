"""``python -m jax_ep report --html DIR``: a page of the counters of the jobs on this host."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep._cli.extras import require
from jax_ep._cli.html_page import document
from jax_ep._cli.report import ask, no_answer, to_ask
from jax_ep._cli.report_plots import load_plot, waits_plot
from jax_ep._stats import WAIT_PHASES, pairs_per_slot, wait_matrix

REQUEST = b'{"version": 1, "want": "counters"}'  # kCountersRequest
_LONGEST_LISTS = 64  # rows of a table


@dataclasses.dataclass
class Counted:
    """What the processes of one job say of one of its groups.

    Attributes:
        name: the group's.
        num_ranks: N.
        pids: who answered.
        ranks: as in `jax_ep.RankStats`, of all who answered.
        flows: likewise; channels by name.
        failures: that processes report.
    """

    name: str
    num_ranks: int
    pids: list[int]
    ranks: list[dict[str, Any]]
    flows: list[dict[str, Any]]
    failures: list[str]

    def teams(self) -> list[int]:
        """Those with a rank here."""
        return sorted({rank["team"] for rank in self.ranks})

    def waits(self, team: int) -> dict[str, Any]:
        """By phase, f64[N, N] seconds: [i, j] is how long rank i waited for rank j."""
        return {
            phase: wait_matrix(self.num_ranks, self.ranks, phase, team) * 1e-9
            for phase in WAIT_PHASES
        }

    def load(self) -> Any:
        """f64[P]: pairs of each slot, over all teams; NaN where its rank is not on this host."""
        per_rank = len(self.ranks[0]["pairs_per_expert"])
        load = pairs_per_slot(self.ranks, self.num_ranks * per_rank).astype(np.float64)
        elsewhere = set(range(self.num_ranks)) - {rank["rank"] for rank in self.ranks}
        load.reshape(self.num_ranks, per_rank)[sorted(elsewhere)] = np.nan
        return load


def report_page(pid: int | None, folder: str) -> int:
    """Asks all jobs of this host, or one process, and writes DIR/index.html.

    Returns:
        The exit code: 2 if the folder cannot be written, 1 if nobody has counters to show.
    """
    require("matplotlib")
    path = Path(folder) / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        print(f"python -m jax_ep report: cannot write {path}: {error}", file=sys.stderr)
        return 2
    groups: list[Counted] = []
    for each in to_ask(pid):
        try:
            answer = _answer(each)
        except OSError as error:
            print(no_answer(each, error), file=sys.stderr)
            continue
        except ValueError as error:
            print(f"process {each}: {error}", file=sys.stderr)
            continue
        if answer["uncounted"]:
            print(
                f"process {each}: {answer['uncounted']} group(s) are left out: their GPUs did "
                "not answer",
                file=sys.stderr,
            )
        _merge(groups, each, answer["groups"])
    if not groups:
        if path.stat().st_size == 0:
            path.unlink()
        print(f"python -m jax_ep report: nothing to show; {path} is not written", file=sys.stderr)
        return 1
    path.write_text(page(groups), encoding="utf-8")
    print(path)
    return 0


def _answer(pid: int) -> dict[str, Any]:
    """Raises ValueError, a clause, if the process has another version of jax_ep."""
    for _ in range(3):  # a process that is slow to begin may have taken it for the old request
        text = ask(pid, REQUEST)
        if text.startswith("{"):
            break
    else:
        raise ValueError(
            "its version of jax_ep knows no counters by request; use "
            "`python -m jax_ep report` without --html, or start the job with this version"
        )
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise ValueError("its answer was cut off; it is busy, ask again") from error
    if answer.get("version") != 1 or "groups" not in answer:
        raise ValueError(
            f"it refused the request: {answer.get('error', 'it has another version')}; use the "
            "command of the version that the job runs"
        )
    return dict(answer)


def _merge(groups: list[Counted], pid: int, found: Iterable[dict[str, Any]]) -> None:
    """Adds a process's groups. One of the same name whose ranks it lacks is of the same job."""
    for new in found:
        own = {(rank["team"], rank["rank"]) for rank in new["ranks"]}
        for group in groups:
            seen = {(rank["team"], rank["rank"]) for rank in group.ranks}
            if (group.name, group.num_ranks) == (new["name"], new["num_ranks"]) and not own & seen:
                break
        else:
            group = Counted(new["name"], new["num_ranks"], [], [], [], [])
            groups.append(group)
        group.pids.append(pid)
        group.ranks = sorted(
            group.ranks + new["ranks"], key=lambda rank: (rank["team"], rank["rank"])
        )
        group.flows += new["flows"]
        group.failures += [new["failure"]] if new["failure"] else []


def page(groups: list[Counted]) -> str:
    """The whole page: it loads nothing else."""
    now = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")[:19]
    sections = [_section(group, number) for number, group in enumerate(groups)]
    head = (
        "<h1>Expert-parallel groups on this host</h1>\n"
        f'<p class="soft">{now} UTC. Totals since each group was made.</p>\n'
    )
    return document("jax_ep report", head + "\n".join(sections))


def _section(group: Counted, number: int) -> str:
    load = group.load()
    known = load[~np.isnan(load)]
    imbalance = known.max() / known.mean() if known.sum() else 1.0
    here = len({rank["rank"] for rank in group.ranks})
    parts = [
        f"<section><h2>Group {escape(group.name)}</h2>",
        f'<p class="soft">{here} of {group.num_ranks} ranks are on this host; processes '
        f"{', '.join(map(str, group.pids))}.</p>",
        *(f"<p><b>It has failed:</b> {escape(text)}</p>" for text in group.failures),
        f"<h3>Load of the experts</h3><p>The busiest has {imbalance:.2f} times the mean. "
        "With a placement, an expert is a slot.</p>",
        f"<figure>{load_plot(load, f'load{number}')}</figure>",
    ]
    for team in group.teams():
        waits = group.waits(team)
        title = "Who waits for whom" + (f", team {team}" if len(group.teams()) > 1 else "")
        parts += [
            f"<h3>{title}</h3><p>{_slowest(waits)}</p>",
            f'<div class="wide">{waits_plot(waits, f"waits{number}-{team}")}</div>',
        ]
    parts += ["<h3>Ranks and drops</h3>", _ranks(group)]
    if group.flows:
        parts += ["<h3>Flows to other nodes</h3>", _flows(group)]
    return "\n".join(parts) + "</section>"


def _slowest(waits: dict[str, Any]) -> str:
    total = sum(waits.values())
    if not total.sum():
        return "Nobody has waited."
    peer = int(total.sum(axis=0).argmax())
    share = total[:, peer].sum() / total.sum()
    return (
        f"Most is waited for rank {peer}: {total[:, peer].sum():.2f} s, {share:.0%} of "
        f"{total.sum():.2f} s in all. (On GPUs, waits for several ranks at once count for each.)"
    )


def _ranks(group: Counted) -> str:
    keys = ("team", "rank", "plans", "dispatches", "combines", "rows_received", "rows_dropped")
    head = ("team", "rank", "plans", "dispatches", "combines", "rows received", "pairs dropped")
    rows = [
        [
            *(str(rank[key]) for key in keys),
            str(rank["invalid_ids"]),
            f"{rank['wait_ns'] / 1e9:.3f}",
        ]
        for rank in group.ranks
    ]
    return _table([*head, "invalid ids", "waited, s"], rows)


def _flows(group: Counted) -> str:
    keys = ("rank", "peer", "channel", "messages", "bytes", "stalls", "retries", "reorders")
    busy = sorted((flow for flow in group.flows if flow["messages"]), key=lambda f: -f["bytes"])
    return _table(keys, [[str(flow[key]) for key in keys] for flow in busy])


def _table(head: Iterable[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows[:_LONGEST_LISTS]
    )
    rest = len(rows) - _LONGEST_LISTS
    more = f'<p class="soft">{rest} more are left out.</p>' if rest > 0 else ""
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{more}"
    )
