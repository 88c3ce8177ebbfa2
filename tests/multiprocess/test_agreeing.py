"""Groups whose processes call ``agree`` at different places of their programs."""

from __future__ import annotations

import jobs
import launching
import pytest
from launching import PROGRAMS

pytestmark = pytest.mark.multiprocess


def _agree_alone(*options, groups, living, arguments=()):
    """The job. Asserts that in each group all that live but one were told to agree."""
    program = PROGRAMS / "agree_alone.py"
    done = jobs.launch(program, "-n", "4", *options, arguments=arguments, JAX_EP_LOG="warning")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "was told" in line]
    assert len(told) == groups * (living - 1), told
    assert all("call group.agree in this process, too" in line for line in told), told
    assert done.stdout.count("done") == living
    return done


def test_who_needs_a_process_that_agrees_is_told_to_agree_too(native):
    """They waited for timeout_s, at which the one that agreed left them out."""
    done = _agree_alone(groups=4, living=4)
    assert "ERROR" not in done.stdout + done.stderr, done.stderr


def test_they_are_told_so_too_when_a_rank_was_lost_before(native):
    _agree_alone("--keep-going", groups=3, living=3, arguments=("1",))


def test_a_forked_child_may_not_agree_and_its_parent_goes_on(native):
    done = launching.launch("agree_in_a_child.py", processes=2)
    assert done.returncode == 0, done.text
    assert done.value(1, "child") == "0"
    assert [done.value(process, "went_on") for process in range(2)] == ["yes", "yes"]
    assert "agree: this process is a fork of the group's process" in done.text
