"""The Python blocks of each page, one behind the other, are a program that runs as it stands.

A page whose program needs several devices names the command that starts it. README.md and
docs/tutorial.md also say what theirs print: test_readme.py and test_tutorial.py.
"""

import pathlib
import re
import subprocess
import sys

import children
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"python -m jax_ep launch ((?:-[nD] \d+ ?)+) (\w+\.py)")
WITH_OUTPUT = {"README.md", "docs/tutorial.md"}
NEEDS = {"docs/flax.md": ("flax", "optax", "orbax.checkpoint")}
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md")
    if BLOCK.search(page.read_text())
)


def test_the_pages_with_code() -> None:
    assert set(PAGES) >= WITH_OUTPUT | {"docs/flax.md", "docs/launch.md", "docs/migrating.md"}


@pytest.mark.multiprocess
@pytest.mark.parametrize("page", sorted(set(PAGES) - WITH_OUTPUT))
def test_the_code_of_a_page_runs(page: str, tmp_path: pathlib.Path) -> None:
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    text = (ROOT / page).read_text()
    script = tmp_path / f"{pathlib.Path(page).stem}.py"
    script.write_text("\n".join(BLOCK.findall(text)))
    command = [sys.executable, str(script)]
    if named := COMMAND.search(text):
        script = script.rename(tmp_path / named[2])
        command[1:] = ["-m", "jax_ep", "launch", *named[1].split(), str(script)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**children.quick(), "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
