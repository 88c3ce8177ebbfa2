"""The README's example runs and prints what the README says."""

import pathlib
import re
import subprocess
import sys

import children

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def test_the_example_prints_what_it_says(tmp_path):
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    expected = re.search(r"it prints\n```\n(.*?)```", text, re.DOTALL).group(1)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=children.plain(), timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


def test_it_is_short_and_the_commands_come_first():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    commands = [i for i, line in enumerate(lines) if line.startswith("pip install")]
    assert len(commands) == 2 and commands[1] < 20


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
