"""Groups whose processes call ``agree`` at different places of their programs."""

from __future__ import annotations

import re

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


def test_a_forked_child_is_told_what_it_is_and_its_parent_goes_on(native):
    """JAX's coordination client does not survive a request of the child, in either process.

    And the child was told that the group is well, closed, and to be created anew, which hung.
    """
    done = launching.launch("use_in_a_child.py", processes=2)
    assert done.returncode == 0, done.text
    assert done.value(1, "child") == "0", done.text
    assert [done.value(process, "went_on") for process in range(2)] == ["yes", "yes"]
    is_fork = "this process is a fork of the group's process, and takes no part in it"
    for use in ("agree", "check", "load", "call"):
        told = done.value(1, use)
        assert told.startswith("raised") and is_fork in told, told
    for look in ("health", "report"):
        told = done.value(1, look)
        assert is_fork in told and "ok=True" not in told, told
    told = done.value(1, "create")
    assert "was forked after its parent had joined the job" in told, told
    assert "call it in the parent, or start the child by" in told, told


def test_who_waits_in_agree_says_for_whom(native):
    """Reports said "nobody is waiting", after a failure "closed", and the log nothing."""
    done = launching.launch("agree_late.py", processes=2)
    assert done.returncode == 0, done.text
    for what in ("page", "asked"):
        assert re.match(
            r"group ep\[2\]#1: process 1 has kept process 0 waiting for \d\.\d s: it has not "
            r"called group\.agree$",
            done.value(0, what),
        ), done.text
    assert int(done.value(0, "others")) == 1, done.text  # its session's page, with the ranks
    assert "nobody is waiting" in done.value(0, "after"), done.text
    assert done.text.count("a rank has waited longer than a tenth of timeout_s") == 1, done.text


def test_who_has_closed_the_group_is_not_waited_for(native):
    """Nor does its close wait for those that go on; both took timeout_s."""
    done = launching.launch("agree_without_a_closer.py", processes=3)
    assert done.returncode == 0, done.text
    for process in range(3):
        for node_size in (3, 1):
            assert float(done.value(process, f"took_{node_size}")) < 20, done.text
            assert "is closed" in done.value(process, f"told_{node_size}"), done.text
    assert "call group.agree" not in done.text  # it was advised to one that leaves
