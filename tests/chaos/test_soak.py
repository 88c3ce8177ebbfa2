"""Some seconds of the soak; `bash .ci/run soak` lets it run for half an hour."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess

SOAK = pathlib.Path(__file__).parent / "soak.py"


def _run(out, minutes, *arguments):
    return subprocess.run(
        [sys.executable, str(SOAK), "--minutes", minutes, "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.ci
def test_groups_that_come_and_go_leave_nothing_behind(tmp_path):
    done = _run(tmp_path, "0.2", "--without", "chaos,control")
    assert done.returncode == 0, done.stdout[-6000:]
    said = json.loads((tmp_path / "soak.json").read_text())
    assert said["faults"] == [] and said["pauses"] > 0
    assert set(said["rounds"]) == {"one0", "many0", "many1", "many2"}
    assert (tmp_path / "soak.png").stat().st_size > 0


@pytest.mark.ci
def test_what_is_left_behind_is_found(tmp_path):
    done = _run(tmp_path, "0", "--without", "chaos,control,many", "--leak", "descriptor")
    assert done.returncode == 1
    assert "one0: descriptors grew from" in done.stdout and "/dev/null" in done.stdout
