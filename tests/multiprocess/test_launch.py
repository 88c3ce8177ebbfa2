"""``python -m jax_ep launch``: exit codes, output, signals, and what it leaves behind (nothing)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from jobs import (
    LIMIT_S,
    SAYS_WHAT_IT_GOT,
    all_gone,
    environment,
    is_alive,
    launch,
    start,
    wait_for_lines,
)

from jax_ep import __main__
from jax_ep._launch.options import cores_of

pytestmark = pytest.mark.multiprocess


FEW_FILES = """
import resource, sys
from jax_ep.__main__ import main
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
sys.exit(main())
"""


class TestRunning:
    def test_a_script_runs_as_main_in_every_process_with_its_arguments(self, script):
        path = script(
            """
            import os, sys, jax
            assert __name__ == "__main__" and __file__ == sys.argv[0]
            assert sys.path[0] == os.path.dirname(os.path.abspath(__file__))
            assert jax.distributed.is_initialized()
            import jax_ep._launch.initialize
            jax_ep._launch.initialize.initialize()  # nothing left to do
            assert jax.config.jax_enable_recoverability
            assert "JAX_EP_LAUNCH" not in os.environ
            print(jax.process_index(), jax.process_count(), jax.device_count(), sys.argv[1:])
            """
        )
        done = launch(path, "-n", "2", arguments=("--steps", "3", "-n", "a b"))
        assert done.returncode == 0, done.stderr
        lines = sorted(line for line in done.stdout.splitlines() if "steps" in line)
        assert lines == [
            "[0] 0 2 2 ['--steps', '3', '-n', 'a b']",
            "[1] 1 2 2 ['--steps', '3', '-n', 'a b']",
        ]

    def test_a_module_runs_as_with_pythons_m(self, tmp_path):
        body = """
            import os, sys, jax
            from . import helper
            print(__name__, __package__, helper.NAME, sys.path[0] == os.getcwd(), sys.argv[1:])
            print(os.path.basename(__file__) == os.path.basename(sys.argv[0]))
            if "fail" in sys.argv:
                raise ValueError("mine")
            """
        package = tmp_path / "package"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "helper.py").write_text("NAME = 'helper'")
        (package / "job.py").write_text(textwrap.dedent(body))
        (package / "__main__.py").write_text("from package import job  # noqa")
        command = [sys.executable, "-m", "jax_ep", "launch", "-n", "2"]

        def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, *arguments],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env=environment(),
                cwd=tmp_path,
                check=False,
            )

        done = launch("-m", "package.job", "-m", "--steps")
        assert done.returncode == 0, done.stderr
        for index in range(2):
            assert f"[{index}] __main__ package helper True ['-m', '--steps']" in done.stdout
            assert f"[{index}] True" in done.stdout
        done = launch("-m", "package.job", "fail")
        assert done.returncode == 1
        assert "ValueError: mine" in done.stderr and "job.py" in done.stderr
        assert "runpy" not in done.stderr and "child.py" not in done.stderr
        assert launch("-m", "package").stdout.count("package.job package helper") == 2
        glued = launch("-mpackage.job", "steps")
        assert glued.stdout.count("['steps']") == 2, glued.stderr
        done = launch("-m", "package.nothing")
        assert done.returncode == 1
        assert "No module named" in done.stderr and "package.nothing" in done.stderr

    def test_groups_are_open_in_exit_handlers_as_under_plain_python(self, script):
        """The launcher's child closed them before the program's handlers ran."""
        path = script(
            """
            import atexit
            import jax, jax_ep, numpy as np
            from jax.sharding import Mesh
            made = []
            def say(when):
                print(when, "the group:", made[0].health().ok, made[0].closed, flush=True)
            atexit.register(say, "before")
            config = jax_ep.Config(num_experts=2, top_k=1, hidden=8, max_tokens=4)
            made.append(jax_ep.create_group(Mesh(np.array(jax.devices()), ("ep",)), "ep", config))
            atexit.register(say, "after")
            """
        )
        plain = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment(),
            check=False,
        )
        wanted = ["after the group: True False", "before the group: False True"]
        assert plain.stdout.splitlines() == wanted, plain.stderr
        for options in (("-n", "2"), ("-n", "2", "--coordinator")):
            done = launch(path, *options)
            assert done.returncode == 0, done.stderr
            for index in range(2):
                lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{index}]")]
                assert lines == [f"[{index}] {line}" for line in wanted], done.stdout

    def test_a_forked_child_that_ends_is_not_the_end_of_its_process(self, script):
        """Its exit was reported to the launcher as the parent's."""
        path = script(
            """
            import atexit, os, sys, warnings
            warnings.simplefilter("ignore")
            atexit.register(lambda: os.getpid() != parent and os._exit(3))  # JAX's own may hang
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                sys.exit(3)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            """
        )
        done = launch(path, "-n", "2", "--grace", "5")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("child 3") == 2, done.stdout

    def test_devices_per_process_makes_virtual_devices_and_a_big_enough_pool(self, script):
        path = script(
            """
            import os, jax
            import jax.numpy as jnp
            from jax.sharding import Mesh, PartitionSpec as P
            import numpy as np
            mesh = Mesh(np.array(jax.devices()), ("i",))
            f = jax.jit(jax.shard_map(lambda: jax.lax.psum(jnp.ones(()), "i"), mesh=mesh,
                                      in_specs=(), out_specs=P()))
            print("sum", float(f().addressable_data(0)), os.environ["NPROC"])
            """
        )
        done = launch(path, "-n", "2", "--devices-per-process", "3")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("sum 6.0 32") == 2
        done = launch(path, "-n", "1", "-D", "2", NPROC="48")
        assert "sum 2.0 48" in done.stdout

    def test_bound_processes_share_the_cores_and_keep_xlas_pool(self, script):
        path = script("import os; print(sorted(os.sched_getaffinity(0)), os.environ['NPROC'])")
        cores = sorted(os.sched_getaffinity(0))
        done = launch(path, "-n", "2", "--bind-to", "core")
        assert done.returncode == 0, done.stderr
        half = len(cores) // 2
        shares = [cores[:half], cores[half:]] if half else [cores, cores]
        for index, share in enumerate(shares):
            assert f"[{index}] {share} {len(cores)}" in done.stdout

    @pytest.mark.parametrize(
        ("num_processes", "cores", "shares"),
        [
            (4, [0, 1], [[0], [0], [1], [1]]),
            (3, [0, 1], [[0], [0], [1]]),
            (2, [1, 3, 5, 7, 9], [[1, 3], [5, 7, 9]]),
        ],
    )
    def test_every_core_and_process_has_its_share(self, num_processes, cores, shares):
        assert [cores_of(i, num_processes, cores) for i in range(num_processes)] == shares

    def test_process_0_stays_until_the_others_have_left(self, script):
        # Leaving first, it took JAX's coordinator with it and the others were aborted.
        path = script(
            """
            import time, jax
            if jax.process_index() == 1:
                time.sleep(2)
                print("still here")
            """
        )
        done = launch(path, "-n", "2")
        assert done.returncode == 0, done.stderr
        assert "[1] still here" in done.stdout


class TestOutput:
    def test_every_line_is_whole_and_has_its_prefix(self, script):
        path = script(
            """
            import os, sys
            for i in range(400):
                sys.stdout.write("a" * 50); sys.stdout.flush()
                sys.stdout.write(f"b{i}\\n")
            os.write(1, b"no end")
            """
        )
        done = launch(path, "-n", "3")
        assert done.returncode == 0
        lines = done.stdout.splitlines()
        for index in range(3):
            mine = [line for line in lines if line.startswith(f"[{index}] ")]
            expected = [f"[{index}] {'a' * 50}b{i}" for i in range(400)]
            assert mine == [*expected, f"[{index}] no end"]
        assert len(lines) == 3 * 401

    def test_stderr_stays_stderr(self, script):
        path = script("import sys; print('oops', file=sys.stderr)")
        done = launch(path, "-n", "1")
        assert "[0] oops" in done.stderr and "oops" not in done.stdout


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


class TestWhoIsLeft:
    """The launcher waited without a word for a process that stood still."""

    @staticmethod
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
    def test_a_process_that_is_stopped_when_the_others_have_ended_is_named(self, script, index):
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
        job = self._start(path, "-n", "3")
        (line,) = wait_for_lines(job, "pid ", 1)
        pid = int(line.split()[-1])
        name = f"[launch] waits for process {index} (pid {pid}, state T (stopped)): the others"
        said = wait_for_lines(job, name, 2)
        first, second = (int(line.split(" ended ")[1].split()[0]) for line in said)
        assert first < second
        os.kill(pid, signal.SIGCONT)  # it was left alone
        rest, _ = job.communicate(timeout=LIMIT_S)
        assert f"[{index}] went on" in rest and job.returncode == 0

    def test_a_process_whose_exit_hangs_is_named(self, script):
        path = script(
            """
            import atexit, os, signal, jax
            if jax.process_index() == 1:
                print("pid", os.getpid(), flush=True)
                atexit.register(lambda: os.kill(os.getpid(), signal.SIGSTOP))
            """
        )
        job = self._start(path, "-n", "2", "--grace", "1")
        (line,) = wait_for_lines(job, "pid ", 1)
        pid = int(line.split()[-1])
        words = f"[launch] waits for process 1 (pid {pid}, state T (stopped)): the program ended"
        wait_for_lines(job, words, 1)  # before it stops, another may be spoken of
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=LIMIT_S)
        assert all_gone([pid])

    def test_who_ends_in_time_is_not_spoken_of(self, script):
        path = script("import time, jax; time.sleep(0.5 * jax.process_index())")
        done = launch(path, "-n", "2")
        assert done.returncode == 0 and "[launch]" not in done.stderr, done.stderr


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


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["-n", "0", __file__], "at least one process"),
            (["-n", "2", "-D", "0", __file__], "--devices-per-process: got 0"),
            (["-n", "2", "--grace", "-1", __file__], "--grace"),
            (["-n", "2", "--grace", "nan", __file__], "--grace"),  # for ever
            (["-n", "2", "--grace", "inf", __file__], "--grace"),  # a traceback at a failure
            (["-n", "2", "--bind-to", "socket", __file__], "--bind-to"),
            (["-n", "2", "--restarts", "1", __file__], "--restarts: expected --keep-going"),
            (["-n", "2", "--keep-going", "--restarts", "-1", __file__], "--restarts: got -1"),
            (["-n", "2", "--job-processes", "4", __file__], "expected --coordinator-address too"),
            (["-n", "2", "--coordinator", "--first-process", "1", __file__], "--first-process"),
            (
                ["-n", "2", "--coordinator", "--coordinator-address", "node0", __file__],
                "--coordinator-address: got 'node0', expected HOST:PORT",
            ),
            (
                ["-n", "2", "--coordinator-address", "a:1", "--first-process", "3", __file__],
                "got processes 3 to 4 (--first-process, -n), expected them to be among the 2",
            ),
            (["-n", "2"], "expected a script"),
            (["-n", "2", "no_such_file.py"], "'no_such_file.py' is not a file"),
            (["-n", "2", "-m"], "expected a script, or -m and a module"),
            (["-n", "2", "-m", "job.py"], "'job.py' is not the name of a module"),
            (["-n", "2", "-m", "package..job"], "'package..job' is not the name of a module"),
            (["-n", "2", "-m", "some/path.py"], "'some/path.py' is not the name of a module"),
            ([__file__], "-n"),
        ],
    )
    def test_a_wrong_command_line_says_what_is_wrong(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as ended:
            __main__.main(["launch", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
