"""``launch``: command lines that are wrong, and each process's share of the cores."""

from __future__ import annotations

import pytest

from jax_ep import __main__
from jax_ep._launch.options import cores_of


@pytest.mark.parametrize(
    ("num_processes", "cores", "shares"),
    [
        (4, [0, 1], [[0], [0], [1], [1]]),
        (3, [0, 1], [[0], [0], [1]]),
        (2, [1, 3, 5, 7, 9], [[1, 3], [5, 7, 9]]),
    ],
)
def test_every_core_and_process_has_its_share(num_processes, cores, shares):
    assert [cores_of(i, num_processes, cores) for i in range(num_processes)] == shares


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
def test_a_wrong_command_line_says_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["launch", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
