"""``launch`` says for whom it waits; it waited without a word for a process that stood still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types

import pytest
from jobs import LIMIT_S, all_gone, environment, wait_for_lines

from jax_ep._launch import launcher
from jax_ep._launch.options import LaunchOptions

pytestmark = pytest.mark.multiprocess


def _start(path, *options):
    shorten = "launcher.WAITS_FOR_S = 1.5"
    code = f"from jax_ep import __main__; from jax_ep._launch import launcher; {shorten}"
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}; __main__.main()", "launch", *options, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_is_stopped_when_the_others_have_ended_is_named(script, index):
    path = script(
        f"""
        import os, pathlib, signal, time, jax
        said = pathlib.Path(__file__).with_suffix
        if jax.process_index() == {index}:
            while not all(said(f".{{i}}").exists() for i in range(3) if i != {index}):
                time.sleep(0.01)  # they may need process 0 until then
            print("pid", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            print("went on")
        else:
            said(f".{{jax.process_index()}}").touch()
        """
    )
    job = _start(path, "-n", "3")
    (line,) = wait_for_lines(job, "pid ", 1)
    pid = int(line.split()[-1])
    name = f"[launch] waits for process {index} (pid {pid}, state T (stopped)): the others"
    said = wait_for_lines(job, name, 2)
    first, second = (int(line.split(" ended ")[1].split()[0]) for line in said)
    assert first < second
    os.kill(pid, signal.SIGCONT)  # it was left alone
    rest, _ = job.communicate(timeout=LIMIT_S)
    assert f"[{index}] went on" in rest and job.returncode == 0


def test_a_process_whose_exit_hangs_is_named(script):
    path = script(
        """
        import atexit, os, signal, jax
        if jax.process_index() == 1:
            print("pid", os.getpid(), flush=True)
            atexit.register(lambda: os.kill(os.getpid(), signal.SIGSTOP))
        """
    )
    job = _start(path, "-n", "2", "--grace", "1")
    (line,) = wait_for_lines(job, "pid ", 1)
    pid = int(line.split()[-1])
    words = f"[launch] waits for process 1 (pid {pid}, state T (stopped)): the program ended"
    wait_for_lines(job, words, 1)  # before it stops, another may be spoken of
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=LIMIT_S)
    assert all_gone([pid])


def test_who_ends_in_time_is_not_spoken_of(monkeypatch, capsys):
    """Each has the whole time from the newest end on; by a clock that goes on here alone."""
    now = 100.0
    monkeypatch.setattr(launcher, "time", types.SimpleNamespace(monotonic=lambda: now))
    job = launcher._Job(LaunchOptions(3, [__file__]))
    itself = types.SimpleNamespace(pid=os.getpid())
    job._children = [launcher.Child(index, itself, None, -1) for index in range(3)]

    def what_it_says() -> str:
        job._tell_who_is_left()
        return capsys.readouterr().err

    for child in job._children[:2]:
        now += launcher.WAITS_FOR_S - 0.5
        assert what_it_says() == ""
        job._note_good_end(child)
        child.has_exited = True
    now += launcher.WAITS_FOR_S - 0.5
    assert what_it_says() == ""
    now += 0.5
    assert what_it_says().startswith(f"[launch] waits for process 2 (pid {os.getpid()}, ")
