"""The page of ``bench --report``: one HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from jax_ep._cli.bench_report_cases import OPERATIONS, OURS
from jax_ep._cli.bench_report_plot import duration, plot
from jax_ep._cli.html_page import document

_READ = """<b>How to read it.</b> Less is better. A point is the median of all samples, the line
through it reaches from the first to the third quartile; where the lines of two methods overlap,
do not trust their order. <em>over jax_ep</em> is a method's median over jax_ep's in the same run:
2.0 means that it took twice as long."""

_METHOD = """<b>What is timed.</b> A call inside <code>jax.jit</code>, in a loop of many calls each
of which depends on the one before, so that Python and the start of a program do not count. A
sample is one run of that loop, divided by its calls; all processes start together and the slowest
decides. The programs of all methods take turns, one sample of each per round, each round beginning
with another one, so that what disturbs the machine hits all alike. Before anything is timed, each
method's round trip is compared with its input. <em>dispatch</em> brings tokens to their experts'
ranks: jax_ep's includes the plan and groups rows by expert, the others leave them in the order of
their sources. <em>combine</em> brings weighted sums back, <em>pair</em> is both, and the last one
is the pair with the gradients of tokens and weights. <em>GB/s</em> counts the same bytes for every
method: each token once per chosen expert and direction, whatever the method really sends."""


def page(record: Mapping[str, Any]) -> str:
    """The whole page; ``record`` is what results.json holds."""
    cases = record["cases"]
    parts = [
        "<h1>Expert-parallel exchanges on this machine</h1>",
        f'<p class="soft">jax_ep {escape(record["versions"]["jax_ep"])}, '
        f"{escape(record['date'][:16].replace('T', ' '))} UTC. "
        "All samples are in <code>results.json</code>.</p>",
        _summary(cases),
        f"<p>{_READ}</p>",
        *(_case(case, number) for number, case in enumerate(cases, 1)),
        "<section><h2>Method</h2>",
        f"<p>{_METHOD}</p>",
        f"<p>Repeat it with <code>{escape(record['command'])}</code>. At most {record['repeats']} "
        "samples of each program are taken.</p></section>",
        "<section><h2>Machine</h2>" + _facts(record["machine"]) + "</section>",
        "<section><h2>Versions</h2>" + _facts(record["versions"]) + "</section>",
    ]
    return document("jax_ep benchmarks", "\n".join(parts))


def _medians(case: Mapping[str, Any], operation: str) -> dict[str, float]:
    found = (r for r in case["results"] if r["operation"] == operation)
    return {r["method"]: r["median_us"] for r in found}


def _summary(cases: list[dict[str, Any]]) -> str:
    """One row a case: jax_ep's pair beside the quickest of the others."""
    rows = []
    for case in cases:
        medians = _medians(case, "pair")
        ours = medians.pop(OURS, None)
        cells = [duration(ours) if ours else "not measured", "-", "-"]
        if medians:
            best = min(medians, key=medians.__getitem__)
            cells[1] = f'{duration(medians[best])} <span class="soft">{escape(best)}</span>'
            cells[2] = f"{medians[best] / ours:.2f}" if ours else "-"
        cells = [escape(case["name"]), *cells]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(
        f"<th>{name}</th>" for name in ("pair", "jax_ep", "quickest of JAX's own", "over jax_ep")
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>{"".join(rows)}</table></div>'


def _case(case: Mapping[str, Any], number: int) -> str:
    shape = case["shape"]
    text = (
        f"{case['ranks']} ranks in {case['processes']} process{'es' * (case['processes'] > 1)}; "
        f"{shape['tokens']:,} tokens per rank of {shape['hidden']:,} {shape['dtype']}, "
        f"top-{shape['top_k']} of {shape['num_experts']} experts"
    )
    if case["results"]:
        text += (
            f". Implementation {case['implementation']} on {case['device']}. "
            f"{size(_payload(case))} of rows per rank and direction, of which "
            f"{size(case['remote_bytes_per_rank'])} must leave the rank. "
            f"{case['results'][0]['samples']} samples of each program"
        )
    drawn = plot(dict(case), number) if case["results"] else ""
    if drawn:
        drawn = f"<figure>{drawn}</figure>"
    return (
        f'<section id="case{number}"><h2>{escape(case["name"])}</h2><p>{escape(text)}.</p>'
        f'<div class="side">{drawn}{_table(case)}</div></section>'
    )


def _payload(case: Mapping[str, Any]) -> float:
    return min(float(result["payload_bytes"]) for result in case["results"])


def size(num_bytes: float) -> str:
    """Three digits, in bytes of powers of ten."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def _table(case: Mapping[str, Any]) -> str:
    names = ("method", "median", "over jax_ep", "quartiles", "GB/s")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    for operation in OPERATIONS:
        results = [r for r in case["results"] if r["operation"] == operation]
        if results:
            rows.append(f'<tr class="operation"><th colspan="{len(names)}">{operation}</th></tr>')
        ours = _medians(case, operation).get(OURS)
        for result in results:
            rows.append(_row(case, result, ours))
    for missing in case["missing"]:
        text = f"{escape(missing['method'])} is not there: {escape(missing['reason'])}"
        rows.append(f'<tr class="missing"><td colspan="{len(names)}">{text}</td></tr>')
    body = "".join(rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def _row(case: Mapping[str, Any], result: Mapping[str, Any], ours: float | None) -> str:
    cells = (
        duration(result["median_us"]),
        f"{result['median_us'] / ours:.2f}" if ours else "-",
        f"{duration(result['q1_us'])} to {duration(result['q3_us'])}",
        f"{result['payload_gb_per_s']:.3g}",
    )
    kind = "ours" if result["method"] == OURS else "baseline"
    named = f'data-case="{escape(case["name"])}" data-operation="{result["operation"]}"'
    body = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f'<tr class="{kind}" {named}><td>{escape(result["method"])}</td>{body}</tr>'


def _facts(rows: Mapping[str, str]) -> str:
    body = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items()
    )
    return f'<table class="facts">{body}</table>'
