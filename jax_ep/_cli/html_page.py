"""The frame and the style of the pages that commands write. A page loads nothing else."""

from __future__ import annotations

from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d0d7de; --paper: #fff;
  --tint: #f6f8fa; --ours: #dafbe1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --paper: #0d1117; --tint: #161b22; --ours: #12301c; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --paper: #fff;
  --tint: #fff; --ours: #eee; } section { break-inside: avoid; } }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.soft, caption, figcaption { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; }
.side { display: grid; grid-template-columns: minmax(0, 1fr); gap: 1rem; align-items: start; }
@media (min-width: 60rem) { .side { grid-template-columns: minmax(0, 5fr) minmax(0, 7fr); } }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
th:first-child, td:first-child, .text { text-align: left; }
thead th { color: var(--soft); font-weight: 600; }
tr.ours td { background: var(--ours); }
tr.operation th { background: var(--tint); text-align: left; }
tr.missing td { color: var(--soft); text-align: left; overflow-wrap: anywhere; }
.facts th { font-weight: 600; white-space: nowrap; }
.facts td { text-align: left; overflow-wrap: anywhere; }
.number { white-space: nowrap; }
figure { margin: 0; max-width: 36rem; }
svg { width: 100%; height: auto; font-family: inherit; }
code { font-size: .9em; overflow-wrap: anywhere; }
@media (max-width: 30rem) { body { padding: .75rem; } th, td { padding: .2rem .3rem; }
  .facts th, .facts td { display: block; border: 0; padding: 0; }
  .facts td { border-bottom: 1px solid var(--line); padding-bottom: .3rem; } }
"""


def document(title: str, body: str) -> str:
    """The whole page around the HTML of its body."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        f"{body}\n</body></html>\n"
    )
