"""``launch`` when a process fails or cannot be started: exit codes, and what the others do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from jobs import LIMIT_S, all_gone, environment, is_alive, launch

pytestmark = pytest.mark.multiprocess


FEW_FILES = """
import resource, sys
from jax_ep.__main__ import main
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
sys.exit(main())
"""


class TestFailure:
    @pytest.mark.parametrize(
        ("statement", "expected"),
        [
            ("sys.exit(7)", 7),
            ("raise RuntimeError('broken')", 1),
            ("sys.exit('a message')", 1),
            ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
            ("os._exit(9)", 9),
        ],
    )
    def test_the_exit_code_is_the_first_failures(self, script, statement, expected):
        path = script(
            f"""
            import os, signal, sys, time, jax
            from jax_ep._jax_compat import distributed_client
            # The launcher's, when it knows of process 1's failure: this one is the second.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
            distributed_client().wait_at_barrier("ready", 100_000)
            if jax.process_index() == 1:
                {statement}
            while True:
                time.sleep(0.1)
            """
        )
        done = launch(path, "-n", "2", "--grace", "0.5")
        assert done.returncode == expected, done.stderr
        assert "[launch] process 1 " in done.stderr

    def test_the_others_may_finish_within_the_grace(self, script):
        path = script(
            """
            import sys, time, jax
            if jax.process_index() == 0:
                raise ValueError("mine")
            time.sleep(1.5)
            print("reported")
            """
        )
        done = launch(path, "-n", "2", "--grace", "30")
        assert done.returncode == 1
        assert "[1] reported" in done.stdout
        assert 'job.py", line' in done.stderr and "ValueError: mine" in done.stderr
        assert "runpy" not in done.stderr  # the traceback starts in the script

    def test_the_grace_ends_with_sigterm_and_then_sigkill(self, script):
        path = script(
            """
            import os, signal, sys, time, jax
            from jax_ep._jax_compat import distributed_client
            signal.signal(signal.SIGTERM, lambda *_: print("terminated"))
            if jax.process_index() == 0:
                print("pid", os.getpid(), time.monotonic())
            distributed_client().wait_at_barrier("ready", 100_000)
            while jax.process_index() == 0:
                time.sleep(1)
            sys.exit(5)
            """
        )
        done = launch(path, "-n", "2", "--grace", "1")
        end = time.monotonic()
        assert done.returncode == 5
        assert "[0] terminated" in done.stdout  # then it went on, so SIGKILL
        pid, begin = done.stdout.split("pid ")[1].split()[:2]
        assert end - float(begin) < 30
        assert not is_alive(int(pid))

    @pytest.mark.parametrize(
        ("failure", "what", "exit_code"),
        [
            ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", 0),
            pytest.param("sys.exit(6)", "failed with exit code 6", 4, marks=pytest.mark.ci),
        ],
    )
    def test_who_keeps_going_ends_with_process_0(self, script, failure, what, exit_code):
        """One fails, one hangs: process 0 goes on, then the other one is ended."""
        path = script(
            f"""
            import os, signal, sys, time, jax
            if jax.process_index() == 1:
                {failure}
            if jax.process_index() == 2:
                time.sleep(1000)
            time.sleep(2.0)
            print("went on")
            sys.exit({exit_code})
            """
        )
        done = launch(path, "-n", "3", "--grace", "1", "--keep-going")
        assert done.returncode == exit_code, done.stderr
        assert "[0] went on" in done.stdout
        assert done.stderr.count(f"process 1 {what}; the others go on (--keep-going)") == 1
        assert "ending process 0, 2" in done.stderr

    @pytest.mark.ci
    def test_a_process_that_fails_is_started_again_as_often_as_told(self, script):
        """It joins the job again under its number; its second failure is the last."""
        path = script(
            """
            import os, signal, sys, time, jax
            from jax_ep._jax_compat import distributed_client
            store = distributed_client()
            if jax.process_index() == 1:
                store.key_value_set(f"life/{os.getpid()}", "")
                os.kill(os.getpid(), signal.SIGKILL)
            limit = time.monotonic() + 60
            while len(store.key_value_dir_get("life")) < 2 and time.monotonic() < limit:
                time.sleep(0.01)
            time.sleep(0.3)
            print("lives:", len(store.key_value_dir_get("life")))
            """
        )
        done = launch(path, "-n", "2", "--grace", "1", "--keep-going", "--restarts", "1")
        assert done.returncode == 0, done.stderr
        assert "[0] lives: 2" in done.stdout, done.stderr
        assert done.stderr.count("process 1 was ended by SIGKILL; the others go on") == 2
        assert done.stderr.count("process 1 is started again (--restarts, 1 of 1)") == 1

    def test_who_keeps_going_ends_when_process_0_leaves_without_a_word(self, script):
        path = script(
            """
            import os, signal, time, jax
            if jax.process_index() == 0:
                time.sleep(1.0)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)  # JAX cannot end it
            """
        )
        done = launch(path, "-n", "2", "--grace", "1", "--keep-going")
        assert done.returncode == 0, done.stderr
        assert "ending process 1" in done.stderr

    def test_a_crash_of_process_0_at_its_end_counts(self, script):
        path = script(
            """
            import atexit, os, jax
            if jax.process_index() == 0:
                atexit.register(os._exit, 9)
            """
        )
        done = launch(path, "-n", "2", "--grace", "5", "--keep-going")
        assert done.returncode == 9, done.stderr

    def test_nothing_goes_on_before_all_have_started(self, script, tmp_path):
        (tmp_path / "sitecustomize.py").write_text(
            textwrap.dedent(
                """
                import os
                if '"index": 1' in os.environ.get("JAX_EP_LAUNCH", ""):
                    os._exit(3)
                """
            )
        )
        path = script("print('not reached')")
        done = launch(path, "-n", "2", "--grace", "1", "--keep-going", PYTHONPATH=str(tmp_path))
        assert done.returncode == 3, done.stderr
        assert "the others have 1 s (--grace) to finish" in done.stderr


class TestNoMoreProcesses:
    @pytest.mark.parametrize("option", [(), ("--coordinator",)])
    def test_a_process_that_cannot_be_started_ends_the_others(self, script, option):
        path = script("import os, time; print('pid', os.getpid()); time.sleep(300)")
        few = [sys.executable, "-c", FEW_FILES, "launch", "-n", "8", *option, path]
        done = subprocess.run(
            few, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 1, done.stderr
        words = r"\[launch\] cannot start process \d: Too many open files; start fewer \(-n\), or"
        assert re.search(words, done.stderr), done.stderr
        assert "Traceback" not in done.stderr
        assert all_gone([int(pid) for pid in re.findall(r"pid (\d+)", done.stdout)])
