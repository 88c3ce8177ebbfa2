"""``python -m jax_ep``: what a user sees of info, selftest, bench and bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import children
import pytest

from jax_ep import __main__ as command_line
from jax_ep._cli import extras, shapes

LIMIT_S = 700.0  # above both limits of the selftest


def _run(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jax_ep", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**children.plain(), "JAX_PLATFORMS": "cpu", "COLUMNS": "120", **extra},
        check=False,
    )


class TestHelp:
    @pytest.mark.parametrize("command", ["info", "selftest", "bench", "launch"])
    def test_every_command_explains_itself(self, command, capsys):
        with pytest.raises(SystemExit) as ended:
            command_line.main([command, "--help"])
        assert ended.value.code == 0
        assert "usage: python -m jax_ep" in capsys.readouterr().out

    def test_no_command_is_an_error_that_lists_them(self, capsys):
        with pytest.raises(SystemExit) as ended:
            command_line.main([])
        assert ended.value.code == 2
        assert "COMMAND" in capsys.readouterr().err

    def test_a_missing_extra_is_named_with_its_installation(self, capsys):
        with pytest.raises(SystemExit) as ended:
            extras.require("no_such_package_of_jax_ep.part")
        assert "'no_such_package_of_jax_ep' is missing" in str(ended.value.code)
        assert "pip install" in str(ended.value.code)


class TestInfo:
    def test_it_tells_versions_transports_and_environment(self):
        done = _run("info", JAX_EP_LOG="warning")
        assert done.returncode in (0, 1), done.stderr
        for word in ("jaxlib", "jax_ep._core", "JAX_EP_LOG", "processes", "available for heaps"):
            assert word in done.stdout
        if done.returncode == 0:
            assert "transport loopback" in done.stdout and "transport shm" in done.stdout


@pytest.mark.multiprocess
class TestSelftest:
    def test_everything_on_this_machine_passes(self, tmp_path):
        pytest.importorskip("jax_ep._core")
        path = tmp_path / "selftest.json"
        done = _run("selftest", "--json", str(path))
        assert done.returncode == 0, done.stdout + done.stderr
        results = json.loads(path.read_text())
        names = {result["name"] for result in results}
        assert {"xla", "native ht, 1 node", "native ll, 2 nodes"} <= names
        assert len({result["part"] for result in results}) == 2
        assert all(result["ok"] for result in results)


@pytest.mark.multiprocess
class TestBench:
    def test_it_writes_a_table_a_picture_and_json(self, tmp_path):
        done = _run(
            "bench", "--shape", "tiny", "--ranks", "2", "--repeats", "2", "--out", str(tmp_path)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((tmp_path / "tiny-1x2.json").read_text())
        names = [result["name"] for result in report["results"]]
        assert any("jax_ep" in name for name in names)
        assert any("all_to_all" in name for name in names)
        assert all(0 < r["median_us"] <= r["p99_us"] for r in report["results"])
        assert (tmp_path / "tiny-1x2.png").stat().st_size > 1000
        assert "median" in done.stdout

    def test_ranks_that_do_not_fit_the_processes_are_refused(self, tmp_path):
        done = _run("bench", "--ranks", "3", "--processes", "2", "--out", str(tmp_path))
        assert done.returncode == 2
        assert "--ranks 3" in done.stdout

    def test_the_shapes_are_groups_that_can_be_made(self):
        for shape in shapes.SHAPES.values():
            assert shape.num_experts % 8 == 0
            assert shape.top_k <= shape.num_experts
