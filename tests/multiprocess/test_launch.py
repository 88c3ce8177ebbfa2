"""``python -m jax_ep launch``: exit codes, output, signals, and what it leaves behind (nothing)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jax_ep import __main__
from jax_ep._launch.options import cores_of

pytestmark = pytest.mark.multiprocess

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 200.0  # for a whole job: generous, a job that hangs fails all the same


def _environment(**extra: str) -> dict[str, str]:
    dropped = ("XLA_FLAGS", "NPROC", "JAX_NUM_CPU_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**env, "JAX_PLATFORMS": "cpu", **extra}


def _command(script: Path, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "jax_ep", "launch", *options, str(script), *arguments]


def _launch(
    script: Path, *options: str, arguments: tuple[str, ...] = (), **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(script, *options, arguments=arguments),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=_environment(**extra),
        check=False,
    )


def _start(script: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        _command(script, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=_environment(),
    )


def _wait_for_lines(process: subprocess.Popen[str], word: str, count: int) -> list[str]:
    assert process.stdout is not None
    found: list[str] = []
    while len(found) < count:
        line = process.stdout.readline()
        assert line, f"the job ended after {found}"
        if word in line:
            found.append(line)
    return found


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def _all_gone(pids: list[int], within_s: float = 60.0) -> bool:
    limit = time.monotonic() + within_s
    while any(map(_is_alive, pids)):
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def script(tmp_path: Path):
    def write(body: str) -> Path:
        path = tmp_path / "job.py"
        path.write_text(textwrap.dedent(body))
        return path

    return write


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
        done = _launch(path, "-n", "2", arguments=("--steps", "3", "-n", "a b"))
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
                env=_environment(),
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
        done = _launch(path, "-n", "2", "--devices-per-process", "3")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("sum 6.0 32") == 2
        done = _launch(path, "-n", "1", "-D", "2", NPROC="48")
        assert "sum 2.0 48" in done.stdout

    def test_bound_processes_share_the_cores_and_keep_xlas_pool(self, script):
        path = script("import os; print(sorted(os.sched_getaffinity(0)), os.environ['NPROC'])")
        cores = sorted(os.sched_getaffinity(0))
        done = _launch(path, "-n", "2", "--bind-to", "core")
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
        done = _launch(path, "-n", "2")
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
        done = _launch(path, "-n", "3")
        assert done.returncode == 0
        lines = done.stdout.splitlines()
        for index in range(3):
            mine = [line for line in lines if line.startswith(f"[{index}] ")]
            expected = [f"[{index}] {'a' * 50}b{i}" for i in range(400)]
            assert mine == [*expected, f"[{index}] no end"]
        assert len(lines) == 3 * 401

    def test_stderr_stays_stderr(self, script):
        path = script("import sys; print('oops', file=sys.stderr)")
        done = _launch(path, "-n", "1")
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
        done = _launch(path, "-n", "2", "--grace", "0.5")
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
        done = _launch(path, "-n", "2", "--grace", "30")
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
        done = _launch(path, "-n", "2", "--grace", "1")
        end = time.monotonic()
        assert done.returncode == 5
        assert "[0] terminated" in done.stdout  # then it went on, so SIGKILL
        pid, begin = done.stdout.split("pid ")[1].split()[:2]
        assert end - float(begin) < 30
        assert not _is_alive(int(pid))

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
        done = _launch(path, "-n", "3", "--grace", "1", "--keep-going")
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
        done = _launch(path, "-n", "2", "--grace", "1", "--keep-going", "--restarts", "1")
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
        done = _launch(path, "-n", "2", "--grace", "1", "--keep-going")
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
        done = _launch(path, "-n", "2", "--grace", "5", "--keep-going")
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
        done = _launch(path, "-n", "2", "--grace", "1", "--keep-going", PYTHONPATH=str(tmp_path))
        assert done.returncode == 3, done.stderr
        assert "the others have 1 s (--grace) to finish" in done.stderr


class TestSignals:
    BODY = """
        import os, signal, sys, time
        def stop(number, frame):
            print("got", number)
            sys.exit(0 if number == signal.SIGTERM else 4)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        print("pid", os.getpid())
        while True:
            time.sleep(0.1)
        """

    @pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 0), (signal.SIGINT, 4)])
    def test_a_signal_reaches_every_process(self, script, number, expected):
        job = _start(script(self.BODY), "-n", "2")
        pids = [int(line.split()[-1]) for line in _wait_for_lines(job, "pid", 2)]
        job.send_signal(number)
        rest, _ = job.communicate(timeout=LIMIT_S)
        assert rest.count(f"got {int(number)}") == 2
        assert job.returncode == expected
        assert _all_gone(pids)

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
        job = _start(path, "-n", "2")
        _wait_for_lines(job, "ready", 2)
        job.send_signal(signal.SIGUSR1)
        rest, _ = job.communicate(timeout=LIMIT_S)
        assert rest.count("asked") == 2 and job.returncode == 0

    def test_an_unhandled_sigterm_ends_the_job(self, script):
        # JAX's preemption service used to swallow it.
        path = script("import time; print('pid'); time.sleep(100)")
        job = _start(path, "-n", "2")
        _wait_for_lines(job, "pid", 2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=LIMIT_S) == 128 + signal.SIGTERM


class TestCoordinator:
    """--coordinator: JAX's coordination service in a process of its own."""

    WAIT = """
        import os, time
        print("pid", os.getpid())
        time.sleep(300)
        """

    @staticmethod
    def _free_address() -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"

    @staticmethod
    def _coordinator_of(job: subprocess.Popen[str]) -> int:
        for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            if "_launch.coordinator" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
        raise AssertionError("the launcher has no coordinator")

    @pytest.mark.ci
    def test_nobody_waits_for_another_and_process_0_serves_nothing(self, script):
        path = script(
            """
            import time, jax
            from jax._src import distributed
            assert distributed.global_state.service is None
            print("devices", jax.device_count())
            if jax.process_index() == 1:
                time.sleep(2)
                print("still here")
            """
        )
        done = _launch(path, "-n", "2", "--coordinator")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("devices 2") == 2 and "[1] still here" in done.stdout
        assert "oordinat" not in done.stderr

    def test_the_end_of_the_coordinator_ends_all_also_who_cannot_hear_of_it(self, script):
        job = subprocess.Popen(
            _command(script(self.WAIT), "-n", "3", "--grace", "1", "--coordinator", "--keep-going"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        pids = [int(line.split()[-1]) for line in _wait_for_lines(job, "pid", 3)]
        coordinator = self._coordinator_of(job)
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(coordinator, signal.SIGKILL)
        killed_at = time.monotonic()
        _, errors = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 128 + signal.SIGKILL
        assert f"the coordinator (pid {coordinator}) was ended by SIGKILL: no process" in errors
        assert time.monotonic() - killed_at < 30
        assert _all_gone([*pids, coordinator])

    def test_the_coordinator_ends_with_a_killed_launcher(self, script):
        job = _start(script(self.WAIT), "-n", "1", "--coordinator")
        pids = [int(line.split()[-1]) for line in _wait_for_lines(job, "pid", 1)]
        pids.append(self._coordinator_of(job))
        job.kill()
        job.wait(timeout=LIMIT_S)
        assert _all_gone(pids)

    def test_an_address_that_cannot_be_had_ends_the_job_at_once(self, script):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            options = ("-n", "2", "--coordinator", "--coordinator-address", address)
            begun = time.monotonic()
            done = _launch(script(self.WAIT), *options)
        assert done.returncode == 1
        assert f"the coordinator cannot listen at {address}" in done.stderr
        assert "with a free port: change --coordinator-address" in done.stderr
        assert "before any process could join it; the job ends" in done.stderr
        assert time.monotonic() - begun < 30

    @pytest.mark.ci
    def test_two_that_end_together_leave_nobody_to_take_them_back(self, script):
        path = script(
            """
            import os, signal, time, jax
            from jax_ep._jax_compat import distributed_client
            distributed_client().wait_at_barrier("ready", 100_000)
            os.kill(os.getppid(), signal.SIGSTOP)  # it finds both ended at once
            if jax.process_index() == 0:
                os.system(f"(sleep 2; kill -CONT {os.getppid()}) > /dev/null 2>&1 &")
                time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
        options = ("-n", "2", "--keep-going", "--restarts", "3", "--coordinator")
        done = _launch(path, *options)
        assert done.returncode == 128 + signal.SIGKILL, done.stderr
        assert "no process is left that could take another one back" in done.stderr
        assert "is started again" not in done.stderr

    @pytest.mark.ci
    @pytest.mark.parametrize(("end", "exit_code"), [("sys.exit(0)", 0), ("sys.exit(5)", 6)])
    def test_who_keeps_going_ends_with_the_first_good_end_or_the_last_failure(
        self, script, end, exit_code
    ):
        """Process 0 fails first and is not missed; then 1 ends well, or all have failed."""
        path = script(
            f"""
            import sys, time, jax
            from jax_ep._jax_compat import distributed_client
            jax.devices()
            distributed_client().wait_at_barrier("ready", 100_000)
            if jax.process_index() == 0:
                sys.exit(6)
            time.sleep(2.0)
            print("went on")
            {end}
            """
        )
        done = _launch(path, "-n", "2", "--grace", "1", "--keep-going", "--coordinator")
        assert done.returncode == exit_code, done.stderr
        assert "[1] went on" in done.stdout
        assert "process 0 failed with exit code 6; the others go on" in done.stderr

    @pytest.mark.ci
    def test_process_0_joins_again_and_sees_all_devices(self, script):
        path = script(
            """
            import os, signal, sys, time, jax
            from jax_ep._jax_compat import distributed_client
            store = distributed_client()
            def lives():
                return len(store.key_value_dir_get("life"))
            jax.devices()
            if jax.process_index() == 0:
                store.key_value_set(f"life/{os.getpid()}", "")
                if lives() < 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            limit = time.monotonic() + 90
            while lives() < 3 and time.monotonic() < limit:
                time.sleep(0.01)
            print("devices", jax.device_count(), "lives", lives())
            """
        )
        options = ("--grace", "5", "--keep-going", "--restarts", "2", "--coordinator")
        done = _launch(path, "-n", "3", *options)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("devices 3 lives 3") == 3, done.stdout + done.stderr
        assert done.stderr.count("process 0 is started again") == 2

    @pytest.mark.ci
    @pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
    def test_others_join_again_after_a_process_0_that_never_saw_its_devices(self, script, end):
        path = script(
            f"""
            import os, signal, sys, time, jax
            from jax_ep._jax_compat import distributed_client
            from jax._src.distributed import global_state
            store, me = distributed_client(), global_state.process_id
            def lives(of):
                return len(store.key_value_dir_get(f"lives{{of}}"))
            def wait_for(of, count):
                limit = time.monotonic() + 90
                while lives(of) < count and time.monotonic() < limit:
                    time.sleep(0.01)
            store.key_value_set(f"lives{{me}}/{{os.getpid()}}", "")
            if me == 0 and lives(0) == 2:
                store.key_value_set("lives0/ended", "")
                {end}
            jax.devices()
            if me == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for(0, 3)
            if me == 1 and lives(1) == 1:
                time.sleep(2)
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for(1, 2)
            print("devices", jax.device_count())
            if me == 1:
                store.key_value_set("lives1/seen", "")
            wait_for(1, 3)
            """
        )
        options = ("--grace", "20", "--keep-going", "--restarts", "1", "--coordinator")
        done = _launch(path, "-n", "3", *options)
        assert done.returncode == 0, done.stderr
        assert "[1] devices 3" in done.stdout, done.stdout + done.stderr

    @pytest.mark.ci
    def test_a_signal_to_all_leaves_the_coordinator_to_those_that_finish(self, script):
        job = _start(script(TestSignals.BODY), "-n", "2", "--coordinator")
        pids = [int(line.split()[-1]) for line in _wait_for_lines(job, "pid", 2)]
        coordinator = self._coordinator_of(job)
        for pid in (coordinator, *pids):  # as a batch system does
            os.kill(pid, signal.SIGTERM)
        rest, _ = job.communicate(timeout=LIMIT_S)
        assert rest.count("got 15") == 2 and job.returncode == 0
        assert _all_gone([*pids, coordinator])

    @pytest.mark.ci
    @pytest.mark.parametrize("transport", ["shm", "ofi"])
    def test_an_elastic_group_goes_on_without_process_0_and_takes_it_back(self, transport):
        from jax_ep import _core

        if transport not in {name for name, is_usable, _ in _core.transports() if is_usable}:
            pytest.skip(f"no transport {transport} here")
        options = ("-n", "4", "--keep-going", "--restarts", "1", "--coordinator")
        program = PROGRAMS / "lose_process_0.py"
        done = _launch(program, *options, arguments=(transport,), JAX_EP_SOCKET_IFNAME="lo")
        assert done.returncode == 0, done.stdout + done.stderr
        alone = [line.split() for line in done.stdout.splitlines() if "alone" in line]
        assert len(alone) == 3
        assert all(words[2:6] == ["[0,", "1,", "1,", "1]"] for words in alone), alone
        assert max(float(words[6]) for words in alone) < 3.0 + 2.0  # its peer_timeout_s
        for index in range(4):
            assert f"[{index}] again [1, 1, 1, 1]" in done.stdout
            assert f"[{index}] closed" in done.stdout

    @pytest.mark.ci
    def test_processes_of_several_launchers_share_a_coordinator(self, script):
        """One launcher hosts it, one joins, and a process joins by JAX's variables alone."""
        path = script(
            """
            import time, jax, jax_ep
            if not jax.distributed.is_initialized():
                jax_ep.initialize()
            print("I am", jax.process_index(), "of", jax.device_count(), flush=True)
            time.sleep(2 * jax.process_index())  # the coordinator's host is done first
            print("done", flush=True)
            """
        )
        address = self._free_address()
        shared = ("-n", "1", "--coordinator-address", address, "--job-processes", "3")
        by_hand = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "3",
            "JAX_PROCESS_ID": "2",
        }
        jobs = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=_environment(**extra),
            )
            for command, extra in (
                (_command(path, *shared, "--coordinator"), {}),
                (_command(path, *shared, "--first-process", "1"), {}),
                ([sys.executable, str(path)], by_hand),
            )
        ]
        for index, job in enumerate(jobs):
            text, _ = job.communicate(timeout=LIMIT_S)
            assert job.returncode == 0, text
            assert f"I am {index} of 3" in text and "done" in text

    @pytest.mark.ci
    def test_a_launcher_that_has_joined_says_that_the_coordinator_is_gone(self, script):
        address = self._free_address()
        shared = ("-n", "1", "--coordinator-address", address, "--job-processes", "2")
        host = _start(script(self.WAIT), *shared, "--coordinator")
        more = ("--first-process", "1", "--keep-going", "--restarts", "3")
        guest = subprocess.Popen(
            _command(script(self.WAIT), *shared, *more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        pids = [int(_wait_for_lines(job, "pid", 1)[0].split()[-1]) for job in (host, guest)]
        os.kill(self._coordinator_of(host), signal.SIGKILL)
        _, errors = guest.communicate(timeout=LIMIT_S)
        assert guest.returncode == 128 + signal.SIGABRT
        assert f"the coordinator at {address} is gone" in errors
        assert host.wait(timeout=LIMIT_S) == 128 + signal.SIGKILL
        assert _all_gone(pids)


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
        job = _start(path, "-n", "2")
        pids = [int(p) for line in _wait_for_lines(job, "pid", 2) for p in line.split()[2:]]
        job.kill()
        job.wait(timeout=LIMIT_S)
        assert len(pids) == 4
        assert _all_gone(pids)

    def test_grandchildren_end_with_the_job(self, script):
        path = script(
            """
            import subprocess
            print("pid", subprocess.Popen(["sleep", "300"]).pid)
            """
        )
        done = _launch(path, "-n", "1")
        assert done.returncode == 0
        assert _all_gone([int(done.stdout.split("pid ")[1])])


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
