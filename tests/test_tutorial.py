"""docs/tutorial.md runs and prints what it says; docs/migrating.md names what exists."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import children
import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [pytest.param("-n 1 -D 4", marks=pytest.mark.ci), "-n 2 -D 2"])
def test_the_tutorial_prints_what_it_says(tmp_path, options):
    text = (DOCS / "tutorial.md").read_text()
    assert f"python -m jax_ep launch {options} tutorial.py" in text
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    expected = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert len(code) == len(expected) == len(re.findall(r"^## \d+\.", text, re.MULTILINE)) == 11
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(code))
    done = subprocess.run(
        [sys.executable, "-m", "jax_ep", "launch", *options.split(), str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**children.plain(), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.findall(r"^(?:\[0\] )?(\d+: .*)$", done.stdout, re.MULTILINE)
    assert printed == "".join(expected).splitlines()


def test_migrating_names_what_exists():
    import jax_ep.flax
    import jax_ep.pallas

    text = (DOCS / "migrating.md").read_text()
    for name in re.findall(r"`jax_ep\.([a-z_.]+\w*)", text):
        found = jax_ep
        for part in name.split("."):
            found = getattr(found, part)
    fields = set(jax_ep.Config.__dataclass_fields__)
    for name in re.findall(r"`Config\.(\w+)`", text):
        assert name in fields, name
    # A jax_ep call in the right column of a table: its keywords are those of the function.
    for name, arguments in re.findall(r"`([a-z_]+)\(group, ([^`]*)\)`", text):
        parameters = inspect.signature(getattr(jax_ep, name)).parameters
        for keyword in re.findall(r"(\w+)=", arguments):
            assert keyword in parameters, (name, keyword)
