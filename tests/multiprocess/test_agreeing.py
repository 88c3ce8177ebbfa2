"""Groups whose processes call ``agree`` at different places of their programs."""

from __future__ import annotations

import pytest
from jobs import launch
from launching import PROGRAMS

pytestmark = pytest.mark.multiprocess


def test_who_needs_a_process_that_agrees_is_told_to_agree_too(native):
    """They waited for timeout_s, at which the one that agreed left them out."""
    done = launch(PROGRAMS / "agree_alone.py", "-n", "4", JAX_EP_LOG="warning")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "was told" in line]
    assert len(told) == 4 * 3
    assert all("call group.agree in this process, too" in line for line in told), told
    assert done.stdout.count("done") == 4
    assert "ERROR" not in done.stdout + done.stderr, done.stderr
