"""Ranks that leave a group late, by an exception, or not at all (a forked child)."""

import pytest
from launching import launch

pytestmark = pytest.mark.multiprocess


def test_a_rank_leaves_in_peace_and_is_named_where_it_is_missed():
    done = launch("leave.py", processes=2)
    assert done.returncode == 0, done.text[-6000:]
    assert "has not arrived within" not in done.text, done.text[-6000:]  # at the end of the program
    for name in ("mates", "nodes"):
        for process in range(2):
            assert done.value(process, f"{name}_late") == "ok", done.text[-6000:]
            assert done.value(process, f"{name}_fork") == "ok", done.text[-6000:]
        assert done.value(1, f"{name}_child") == "0"
        assert done.value(1, f"{name}_raised") == "yes"
        error = done.value(0, f"{name}_error")
        assert "rank 1 closed it: its program ended" in error, error
        # Long before timeout_s.
        assert float(done.value(0, f"{name}_seconds")) < 30, done.text[-6000:]
