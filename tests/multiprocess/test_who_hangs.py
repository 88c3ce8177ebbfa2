"""A job whose rank 1 stands: what `python -m jax_ep report` and SIGUSR1 say of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import children
import pytest
from launching import PROGRAMS, launch

from jax_ep._cli import report

pytest.importorskip("jax_ep._core")
pytestmark = pytest.mark.multiprocess

SILENT_S = 3.0  # a heartbeat is missed after 2
LINE = 1 + next(
    n
    for n, line in enumerate((PROGRAMS / "stand.py").read_text().splitlines())
    if "THE CALL" in line
)


class _Job:
    """The program under the launcher; its output so far."""

    def __init__(self, folder):
        command = [sys.executable, "-m", "jax_ep", "launch", "-n", "4", str(PROGRAMS / "stand.py")]
        self.process = subprocess.Popen(
            [*command, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=children.quick(),
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def text(self):
        return "".join(self.lines)

    def wait_for(self, words, limit_s=100.0):
        deadline = time.monotonic() + limit_s
        while words not in self.text:
            assert time.monotonic() < deadline and self.process.poll() is None, self.text[-4000:]
            time.sleep(0.02)

    def end(self):
        self.process.wait(100)
        self._reader.join(10)
        return self.process.returncode


def _ask(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jax_ep", "report", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=children.plain() | {"JAX_PLATFORMS": "cpu"},
    )


def _pages(text, job):
    """Those of the job (others may run on this host), by the ranks that each knows."""
    own = set(re.findall(r"^\[\d\] ?PID (\d+)", job.text, re.MULTILINE))
    pages = {}
    for page in re.split(r"^(?=group )", text, flags=re.MULTILINE):
        found = re.findall(r"^  rank (\d), process \d, pid (\d+): ", page, re.MULTILINE)
        if found and own.issuperset(pid for _, pid in found):
            pages[tuple(int(rank) for rank, _ in found)] = page
    return pages


def _until(condition, limit_s=30.0):
    """What it returns once that is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def _pid_of(rank, page):
    return int(re.search(rf"^  rank {rank}, process \d, pid (\d+)", page, re.MULTILINE)[1])


def test_the_one_that_stands_is_named_wherever_one_asks(tmp_path):
    job = _Job(tmp_path)
    try:
        job.wait_for("STANDS GO1")

        def both_nodes_wait():
            pages = _pages(_ask().stdout, job)
            waits = [
                re.search(r"rank 1 .*for (\d+\.\d) s", pages.get(node, "").partition("\n")[0])
                for node in ((0, 1), (2, 3))
            ]
            return pages if all(found and float(found[1]) >= 1.0 for found in waits) else None

        pages = _until(both_nodes_wait)
        first = pages[0, 1].splitlines()[0]
        assert "rank 1 (process 1) has kept rank 0 waiting for" in first
        assert (
            f"has not made call 5, dispatch (ll) epoch 3 at {PROGRAMS / 'stand.py'}:{LINE}" in first
        )
        first = pages[2, 3].splitlines()[0]
        assert "rank 1 (process 1) has kept rank" in first and "it is in another node" in first
        assert "window 256" in pages[2, 3]

        # One process alone; and one that does not exist.
        pid = _pid_of(0, pages[0, 1])
        assert "rank 1 (process 1) has kept rank 0 waiting" in _ask("--pid", str(pid)).stdout
        missing = _ask("--pid", "1")
        assert missing.returncode == 1 and "process 1 is none of this host" in missing.stderr

        # The log, though the main thread is in XLA.
        os.kill(pid, signal.SIGUSR1)
        job.wait_for("SIGUSR1: this process's groups", 20)
        assert "rank 1 (process 1) has kept rank 0 waiting" in job.text

        # All processes of the job, by its launcher.
        job.process.send_signal(signal.SIGUSR1)
        _until(lambda: job.text.count("SIGUSR1: this process's groups") == 5)

        # A stopped process does not answer; its node-mate says so.
        stopped = _pid_of(3, pages[2, 3])
        os.kill(stopped, signal.SIGSTOP)
        try:
            time.sleep(SILENT_S)
            done = _ask()
            assert f"process {stopped} does not answer" in done.stdout
            assert "state T (stopped)" in done.stdout
            assert re.search(r"rank 3, process 3, pid \d+: SILENT for \d", done.stdout)
        finally:
            os.kill(stopped, signal.SIGCONT)

        (tmp_path / "GO1").touch()
        job.wait_for("STANDS GO2")

        # The wait that has ended is counted, and the page has all processes of the job together.
        done = _ask("--html", str(tmp_path / "page"))
        assert done.returncode == 0, done.stderr
        sections = (tmp_path / "page/index.html").read_text().split("<section>")
        (own,) = [
            each
            for each in sections
            if (found := re.search(r"on this host; processes ([\d, ]+)\.", each))
            and str(pid) in found[1].split(", ")
        ]
        assert "4 of 4 ranks are on this host" in own
        assert float(re.search(r"Most is waited for rank 1: ([\d.]+) s", own)[1]) > 1
        closing = _until(
            lambda: (
                page
                if "rank 1 (process 1) has kept rank 0 waiting"
                in (page := _pages(_ask().stdout, job).get((0, 1), "")).partition("\n")[0]
                else None
            )
        )
        assert "it has not come to that point of create_group or close" in closing.splitlines()[0]
        (tmp_path / "GO2").touch()
        assert job.end() == 0, job.text[-4000:]
    finally:
        job.process.kill()


def test_a_process_that_waits_in_another_groups_close_says_so():
    """Each blamed the other one, "in no call"."""
    done = launch("close_in_opposite_orders.py", processes=2)
    assert done.returncode == 0, done.text[-4000:]
    for me in range(2):
        page = done.value(me, "page")
        assert f"rank {1 - me} (process {1 - me}) has kept rank {me} waiting for" in page
        assert f"; its process is in close of group #{2 - me}" in page


ONE_PROCESS = """
import os, signal, subprocess, sys
import jax, jax.numpy as jnp, numpy as np
import jax_ep

def taken():  # whether somebody handles SIGUSR1
    text = open("/proc/self/status").read()
    mask = int(text.split("SigCgt:")[1].split()[0], 16)
    return bool(mask >> (signal.SIGUSR1 - 1) & 1)

def group():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
    config = jax_ep.Config(num_experts=4, top_k=1, hidden=16, max_tokens=4, dtype=jnp.float32)
    return jax_ep.create_group(mesh, "ep", config, implementation="native")

assert not taken()
one, two = group(), group()
assert taken()
one.close()
assert taken()
two.close()
assert not taken()

seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
with group():
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [1]
assert taken()
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
three = group()
signal.signal(signal.SIGUSR1, lambda *_: seen.append(2))  # after ours: it stays
three.close()
os.kill(os.getpid(), signal.SIGUSR1)
assert seen == [1, 2]
signal.signal(signal.SIGUSR1, signal.SIG_DFL)

four = group()
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGUSR1)  # ends it, as without jax_ep
    os._exit(7)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGUSR1
four.close()

# A child that lives on, such as a loader of data, had the socket of its parent, too: the parent
# could take the name no more, and who asked it got no answer.
five = group()
child = os.fork()
if child == 0:
    signal.pause()
five.close()
with group():
    command = [sys.executable, "-m", "jax_ep", "report", "--pid", str(os.getpid())]
    said = subprocess.run(command, capture_output=True, text=True)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
assert said.returncode == 0 and "nobody is waiting" in said.stdout, said
print("GOOD")
"""


def test_the_signal_is_taken_only_where_nobody_else_wants_it():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-c", ONE_PROCESS],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=children.quick() | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0 and "GOOD" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "SIGUSR1: this process's groups" not in done.stderr


def test_nothing_to_ask_is_said(monkeypatch, capsys):
    monkeypatch.setattr(report, "running", list)
    assert report.report(None) == 1
    assert "no process of this host that has a native group open" in capsys.readouterr().err


def test_pages_of_one_node_are_shown_once_the_longest_wait_first():
    def page(pid, group, first, *pids):
        lines = [f"  rank {n}, process {n}, pid {each}: in no call" for n, each in enumerate(pids)]
        return report.Page(pid, "\n".join([f"group {group}: {first}", *lines]) + "\n")

    waits = "rank 1 (process 1) has kept rank 0 waiting for"
    pages = [
        page(11, "ep[4]#1", "nobody is waiting", 11, 12),
        page(12, "ep[4]#1", f"{waits} 2.5 s: in no call", 11, 12),
        page(21, "ep[4]#1", f"{waits} 9.0 s: in no call", 21, 22),  # of another job or node
        page(12, "ep[4]#2", "nobody is waiting", 11, 12),
        page(12, "ep[4]#3", f"{waits} 3.5 s: in no call", 11, 12),
        page(11, "ep[4]#3", "FAILED: rank 1 (pid 12) is gone: its process has ended", 11, 12),
    ]
    assert report.newest_of_each(pages) == [pages[5], pages[2], pages[1], pages[3]]


def test_who_waits_in_agree_hides_no_page_with_ranks():
    """It stood in for the pages that say where the process is that all wait for."""
    wait = "group ep[3]#1: process 2 has kept process {} waiting for {} s: it has not called "
    full = "group ep[3]#1: nobody is waiting\n" + "".join(
        f"  rank {rank}, process {rank}, pid {10 + rank}: in no call\n" for rank in range(3)
    )
    pages = [
        report.Page(10, wait.format(0, 1.5) + "group.agree\n"),
        report.Page(11, wait.format(1, 2.5) + "group.agree\n"),
        report.Page(12, full),
        report.Page(11, full),
    ]
    assert report.newest_of_each(pages) == [pages[1], pages[2]]
