"""``python -m jax_ep``: what a user sees of info, selftest, bench and bad input."""

from __future__ import annotations

import importlib.metadata
import json
import re
import signal
import subprocess
import sys

import children
import pytest

from jax_ep import __main__ as command_line
from jax_ep._cli import extras, sections, shapes

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
    @pytest.mark.parametrize("command", ["info", "selftest", "bench", "report", "trace", "launch"])
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

    def test_an_option_of_launch_is_explained_by_its_usage(self, capsys):
        with pytest.raises(SystemExit) as ended:
            command_line.main(["launch", "-n", "0", "script.py"])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert "usage: python -m jax_ep launch -n N" in said and "-n: got 0" in said

    def test_a_file_that_cannot_be_written_is_named_before_anything_runs(self, capsys):
        with pytest.raises(SystemExit) as ended:
            command_line.main(["selftest", "--json", "/nowhere/results.json"])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert "--json: got /nowhere/results.json, expected a file that can be written" in said

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

    def test_every_value_that_is_not_allowed_is_marked(self):
        pytest.importorskip("jax_ep._core", reason="which checks what C++ reads")
        bad = {
            "JAX_EP_RING_SLOTS": "3",
            "JAX_EP_INBOX_SLOTS": "7",
            "JAX_EP_FAULTY": "foo=1",
            "JAX_EP_THREADS_PER_RANK": "many",
        }
        done = _run("info", **bad, JAX_EP_VERBS_SL="3")
        for name, value in bad.items():
            assert re.search(rf"{name} +{value} \(.*expected", done.stdout), (name, done.stdout)
        assert re.search(r"JAX_EP_VERBS_SL +3$", done.stdout, re.MULTILINE)

    def test_who_stops_to_read_hears_no_complaint(self):
        with subprocess.Popen(
            [sys.executable, "-m", "jax_ep", "info"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert "Traceback" not in process.stderr.read()
        assert process.returncode == 128 + signal.SIGPIPE


class TestWithoutExtras:
    """No optional package can be imported, as after a plain `pip install jax_ep`."""

    CODE = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "matplotlib", "flax", "optax", "orbax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from jax_ep.__main__ import main

sys.exit(main(sys.argv[1:]))
"""

    def _run(self, *arguments: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**children.plain(), "JAX_PLATFORMS": "cpu"},
            check=False,
        )

    @pytest.mark.parametrize(
        ("option", "words"),
        [
            ((), ("versions", "jaxlib", "available for heaps", "environment")),
            (("--nics",), ("interfaces", "lo", "network transports")),
        ],
    )
    def test_info_works(self, option, words):
        done = self._run("info", *option)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        assert all(word in done.stdout for word in words), done.stdout

    def test_the_version(self):
        done = self._run("--version")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"jax_ep {importlib.metadata.version('jax_ep')}"

    def test_a_report_asks_for_the_plots_package_before_it_measures(self, tmp_path):
        code = self.CODE.replace('"rich", ', "")
        folder = tmp_path / "report"
        done = self._run("bench", "--report", str(folder), code=code)
        assert done.returncode == 1 and done.stdout == ""
        assert "'matplotlib' is missing; install it with: pip install" in done.stderr
        assert not folder.exists()

    def test_other_commands_say_what_to_install(self):
        done = self._run("selftest")
        assert done.returncode == 1
        assert "'rich' is missing; install it with: pip install 'jax_ep[cli]'" in done.stderr


class TestSections:
    def test_values_line_up_and_long_ones_wrap_on_a_terminal(self, capsys, monkeypatch):
        monkeypatch.setattr(sections, "_width", lambda: 40)
        sections.print_sections({"title": [("a", "word " * 12), ("name", "x")], "none": []})
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "title"
        assert lines[1].startswith("  a     word") and lines[2].startswith(" " * 8 + "word")
        assert all(len(line) <= 40 for line in lines)
        assert "  name  x" in lines and "  (none)" in lines

    def test_a_file_gets_whole_lines(self, capsys):
        sections.print_sections({"title": [("a", "word " * 100)]})
        assert len(capsys.readouterr().out.splitlines()) == 3


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
    @pytest.mark.ci
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

    def test_the_shapes_are_groups_that_can_be_made(self):
        for shape in shapes.SHAPES.values():
            assert shape.num_experts % 8 == 0
            assert shape.top_k <= shape.num_experts
