"""Group.report: a rank that stands at any phase is named first, with what the others wait for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("jax_ep._core")

pytestmark = pytest.mark.ci

TIMEOUT_S = 8.0
STALL_S = 1.6

PROGRAM = """
import os, re, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
import jax_ep
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("ep",))
x = np.ones((32, 16), np.float32)
ids = np.tile(np.array([[0, 5]], np.int32), (32, 1))

def layer(group, mode):
    def local(x, ids):
        recv = jax_ep.dispatch(group, x, ids, mode=mode)  # DISPATCH
        return jax_ep.combine(group, recv.x, recv)  # COMBINE
    spec = P("ep")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped)

for node_size, mode, channel in eval(sys.argv[1]):
    os.environ["JAX_EP_TEST_STALL"] = f"{channel}:2:STALL_S"
    config = jax_ep.Config(num_experts=8, top_k=2, hidden=16, max_tokens=8, dtype=jnp.float32,
                           node_size=node_size, timeout_s=TIMEOUT_S)
    with jax_ep.create_group(mesh, "ep", config) as group:
        step = layer(group, mode)
        pages = []
        def look():
            while True:
                pages.append(group.report())
                time.sleep(0.05)
                first = pages[-1].splitlines()[0]
                waited = re.search(r"(?:waiting|gone on) for ([0-9.]+) s", first)
                if waited and float(waited[1]) > 0.5:
                    return
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        for _ in range(12):  # a set is used again: then its readers' done is waited for
            out = step(x, ids)
        jax.block_until_ready(out)
        looking.join(20)
        assert not looking.is_alive(), pages[-1]
        print("CASE", node_size, mode, channel)
        print(pages[-1], flush=True)
    assert "closed" in group.report()
"""
CASES = [
    *((4, "ht", name) for name in ("plan", "dispatch", "dispatch-done", "reduce", "reduce-done")),
    *((2, "ht", name) for name in ("plan", "dispatch", "combine")),
    *((2, "ht", name) for name in ("dispatch-done", "combine-done")),
    *((2, "ht", name) for name in ("reduce", "reduce-done")),
    *((n, "ll", f"ll-{name}") for n in (4, 2) for name in ("dispatch", "combine")),
    *((n, "ll", f"ll-{name}-done") for n in (4, 2) for name in ("dispatch", "combine")),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, str], str]:
    """The page of each case; the log, as "log"."""
    path = tmp_path_factory.mktemp("report") / "program.py"
    path.write_text(PROGRAM.replace("STALL_S", str(STALL_S)).replace("TIMEOUT_S", str(TIMEOUT_S)))
    done = subprocess.run(
        [sys.executable, str(path), repr(CASES)],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for part in done.stdout.split("CASE ")[1:]:
        case, _, page = part.partition("\n")
        node_size, mode, channel = case.split()
        found[int(node_size), mode, channel] = page
    return found | {(0, "", "log"): done.stderr}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rank_that_stands_is_named_first(
    pages: dict[tuple[int, str, str], str], case: tuple[int, str, str]
) -> None:
    first, *lines = pages[case].splitlines()
    assert re.match(
        r"group ep\[4\]#\d+: rank 2 \(process 0\) (has kept rank [013] waiting|has not gone on)"
        r" for \d",
        first,
    )
    assert re.search(r"call \d+, (plan|dispatch|combine).* at \S+program.py:\d+", first), first
    ranks = [line for line in lines if re.match(r"  rank \d, process 0, pid \d+: ", line)]
    assert len(ranks) == 4, pages[case]
    assert "waits for rank" not in ranks[2], ranks[2]
    # The others may be in no call: their program waits for the step before.
    if "has kept" in first:
        assert any(re.search(r"waits for rank 2 for \d+\.\d s \(", line) for line in ranks), pages[
            case
        ]
    if case[0] == 2 and case[2] in ("plan", "dispatch"):
        # What rank 2 sends to the other node comes to rank 0, for rank 1 as well.
        assert f"rank 0 and rank 2, channel {case[2]}: posted" in pages[case]
        assert "rank 1 and rank 2, channel" not in pages[case]
    if case[0] == 2 and case[2] == "combine":
        assert "rank 0 and rank 2, channel combine: posted" in pages[case]
        assert "window 256" in pages[case]


def test_the_line_is_that_of_the_call(pages: dict[tuple[int, str, str], str]) -> None:
    lines = PROGRAM.splitlines()
    dispatch = next(n for n, line in enumerate(lines, 1) if "# DISPATCH" in line)
    assert f"program.py:{dispatch}" in pages[4, "ht", "dispatch"].splitlines()[0]
    assert f"program.py:{dispatch + 1}" in pages[4, "ht", "reduce"].splitlines()[0]


def test_each_wait_is_in_the_log_once(pages: dict[tuple[int, str, str], str]) -> None:
    log = pages[0, "", "log"]
    words = "a rank has waited longer than a tenth of timeout_s\ngroup ep[4]#"
    waited = {case for case in CASES if "has kept" in pages[case].splitlines()[0]}
    # When a combine ends, the others wait for the program, and in no call.
    assert all(case[2].endswith("combine-done") for case in set(CASES) - waited)
    assert log.count(words) == len(waited), log[-4000:]
