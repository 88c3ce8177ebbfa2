"""What tests of the launcher share."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path):
    def write(body: str) -> Path:
        path = tmp_path / "job.py"
        path.write_text(textwrap.dedent(body))
        return path

    return write
