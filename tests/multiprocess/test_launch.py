"""``python -m jax_ep launch``: what runs in its processes, and what they write."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from jobs import LIMIT_S, environment, launch

pytestmark = pytest.mark.multiprocess


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
