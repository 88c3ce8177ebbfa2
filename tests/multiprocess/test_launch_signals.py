"""Signals to ``launch``, and what it leaves behind (nothing)."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from jobs import LIMIT_S, SAYS_WHAT_IT_GOT, all_gone, launch, start, wait_for_lines

pytestmark = pytest.mark.multiprocess


class TestSignals:
    @pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 0), (signal.SIGINT, 4)])
    def test_a_signal_reaches_every_process(self, script, number, expected):
        job = start(script(SAYS_WHAT_IT_GOT), "-n", "2")
        pids = [int(line.split()[-1]) for line in wait_for_lines(job, "pid", 2)]
        job.send_signal(number)
        rest, _ = job.communicate(timeout=LIMIT_S)
        assert rest.count(f"got {int(number)}") == 2
        assert job.returncode == expected
        assert all_gone(pids)

    def test_a_request_for_reports_reaches_every_process_alone(self, script):
        # It ended the launcher, and with it the job.
        path = script(
            """
            import signal, subprocess
            asked = []
            signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
            loader = subprocess.Popen(["sleep", "100"])
            print("ready", flush=True)
            while not asked:
                signal.sigtimedwait([], 0.1)
            assert loader.poll() is None
            loader.kill()
            print("asked")
            """
        )
        job = start(path, "-n", "2")
        wait_for_lines(job, "ready", 2)
        job.send_signal(signal.SIGUSR1)
        rest, _ = job.communicate(timeout=LIMIT_S)
        assert rest.count("asked") == 2 and job.returncode == 0

    def test_a_request_for_reports_does_not_end_who_cannot_answer(self, script):
        # As a process that waits in its first create_group: it was ended by the signal.
        path = script(
            """
            import signal, time
            import jax
            me = jax.process_index()
            asked = []
            if me == 0:
                signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
            print("ready", flush=True)
            if me == 0:
                while not asked:
                    signal.sigtimedwait([], 0.1)
            else:
                time.sleep(2)
            print("done")
            """
        )
        job = start(path, "-n", "2", stderr=subprocess.STDOUT)
        wait_for_lines(job, "ready", 2)
        job.send_signal(signal.SIGUSR1)
        rest, _ = job.communicate(timeout=LIMIT_S)
        assert rest.count("done") == 2 and job.returncode == 0
        assert "processes [1] do not handle SIGUSR1: they have no open group" in rest

    def test_a_stopped_process_acts_on_the_signal_too(self, script):
        """It stood still for the whole --grace."""
        job = start(script(SAYS_WHAT_IT_GOT), "-n", "2", "--grace", "30", stderr=subprocess.STDOUT)
        pids = [int(line.split()[-1]) for line in wait_for_lines(job, "pid", 2)]
        os.kill(pids[1], signal.SIGSTOP)
        job.send_signal(signal.SIGTERM)
        rest, _ = job.communicate(timeout=LIMIT_S)
        assert rest.count(f"got {int(signal.SIGTERM)}") == 2, rest
        assert "ending process" not in rest and job.returncode == 0

    def test_an_unhandled_sigterm_ends_the_job(self, script):
        # JAX's preemption service used to swallow it.
        path = script("import time; print('pid'); time.sleep(100)")
        job = start(path, "-n", "2")
        wait_for_lines(job, "pid", 2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=LIMIT_S) == 128 + signal.SIGTERM


class TestNothingLeftBehind:
    def test_a_killed_launcher_takes_children_and_grandchildren_along(self, script):
        path = script(
            """
            import os, subprocess, time
            child = subprocess.Popen(["sleep", "300"])
            print("pid", os.getpid(), child.pid)
            time.sleep(300)
            """
        )
        job = start(path, "-n", "2")
        pids = [int(p) for line in wait_for_lines(job, "pid", 2) for p in line.split()[2:]]
        job.kill()
        job.wait(timeout=LIMIT_S)
        assert len(pids) == 4
        assert all_gone(pids)

    def test_grandchildren_end_with_the_job(self, script):
        path = script(
            """
            import subprocess
            print("pid", subprocess.Popen(["sleep", "300"]).pid)
            """
        )
        done = launch(path, "-n", "1")
        assert done.returncode == 0
        assert all_gone([int(done.stdout.split("pid ")[1])])
