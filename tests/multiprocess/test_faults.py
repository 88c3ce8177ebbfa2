"""Death, stop and lateness of a rank: an error that names it within the limit, and a way on."""

import pathlib
import re
import time

import pytest
from launching import launch

pytestmark = pytest.mark.multiprocess

PEER_TIMEOUT_S = 4.0
# The time that this shared machine may take to run the survivors.
SLACK_S = 4.0
STOP_S = 3.0  # of a proxy that still has messages for the dead: proxy/proxy.h, kMaxStopTime
# Where nobody may exceed it: long, for then a machine that stands still looks like a lost rank.
LONG_PEER_TIMEOUT_S = 8.0
GRACE_S = 120  # for the survivors, who compile anew
SHARED_MEMORY = pathlib.Path("/dev/shm")


def _shared_memory_files():
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def _left_of(files, within_s=60.0):
    """Those of `files` that stay; other programs of this machine have theirs, and remove them."""
    limit = time.monotonic() + within_s
    while files and time.monotonic() < limit:
        time.sleep(0.1)
        files &= _shared_memory_files()
    return files


@pytest.mark.parametrize(
    ("how", "mode", "node_size"),
    [
        ("kill", "ht", None),
        ("kill", "ll", None),
        ("kill", "ht", 1),
        ("stop", "ht", None),
        ("stop", "ll", 1),
    ],
)
def test_every_survivor_names_the_lost_rank_and_goes_on(how, mode, node_size):
    before = _shared_memory_files()
    options = ["--how", how, "--mode", mode, "--peer-timeout", PEER_TIMEOUT_S]
    if node_size is not None:
        options += ["--node-size", node_size]
    done = launch("lose_a_rank.py", *options, processes=3, grace=GRACE_S)
    for survivor in range(2):
        assert float(done.value(survivor, "seconds")) < PEER_TIMEOUT_S + SLACK_S, done.text[-6000:]
        assert "rank 2" in done.value(survivor, "error"), done.text[-6000:]
        assert "rank 2" in done.value(survivor, "check")
        # The page named the survivor that wrote it, and had the culprit behind that.
        page = done.value(survivor, "page")
        assert ": FAILED: " in page and "rank 2" in page
        # Of another host's failure the rank is known, behind the one that has told of it.
        assert node_size is not None or re.match(r"group \S+: FAILED: rank 2 ", page), page
        if how == "kill" and node_size is None:
            line = done.value(survivor, "line")
            assert "rank 2, process 2, pid" in line and ": gone, its process has ended" in line
        later = [done.value(survivor, f"later{call}").partition(" ") for call in range(5)]
        assert all("rank 2" in text for _, _, text in later), later
        # The quickest: any one of them may have met a busy machine.
        assert min(float(delay) for delay, _, _ in later) < 1.0, later
        assert done.value(survivor, "went_on") == "2"
    assert done.returncode != 0  # the victim's
    assert not _left_of(_shared_memory_files() - before)


# One pair of ranks carries the heartbeat of two processes: its silence is that of all ranks.
@pytest.mark.parametrize(
    ("how", "transport", "calls"),
    [
        ("kill", "ofi", 0),
        ("stop", "ofi", 2),
        pytest.param("stop", "ofi", 0, marks=pytest.mark.ci),
        pytest.param("kill", "shm", 2, marks=pytest.mark.ci),
    ],
)
def test_a_process_that_is_lost_while_nothing_is_sent_is_named_by_all(how, transport, calls):
    options = ["--how", how, "--transport", transport, "--calls", calls]
    options += ["--peer-timeout", PEER_TIMEOUT_S]
    done = launch(
        "lose_a_quiet_process.py", *options, processes=4, devices_per_process=2, grace=GRACE_S
    )
    for survivor in range(3):
        assert float(done.value(survivor, "seconds")) < PEER_TIMEOUT_S + SLACK_S, done.text[-6000:]
        error = done.value(survivor, "error")
        assert "rank 6" in error or "rank 7" in error, done.text[-6000:]
        assert float(done.value(survivor, "closed")) < STOP_S + SLACK_S, done.text[-6000:]
    assert done.returncode != 0  # the victim's


@pytest.mark.parametrize("node_size", [None, 1])
def test_the_lost_rank_is_named_with_its_team_which_alone_ends(node_size):
    options = ["--how", "kill", "--teams", 2, "--peer-timeout", PEER_TIMEOUT_S]
    if node_size is not None:
        options += ["--node-size", node_size]
    done = launch("lose_a_rank.py", *options, processes=4, grace=GRACE_S)
    for survivor in range(2):
        assert done.value(survivor, "survived") == "yes", done.text[-6000:]
    for what in ("error", "check"):
        assert "rank 1 of team 1" in done.value(2, what), done.text[-6000:]


def test_in_debug_mode_an_invalid_id_ends_all_ranks_at_once():
    done = launch(
        "invalid_id.py", processes=2, devices_per_process=2, env={"JAX_EP_DEBUG": "1"}, timeout=300
    )
    assert done.returncode == 0, done.text[-6000:]
    for rank in range(4):
        process = rank // 2
        for name in ("host", "decode", "network", "xla"):
            error = done.value(process, f"{name}_{rank}")
            assert "rank 2" in error, error
            # Of another host's failure only the rank is known, not the text.
            if name != "network" or process == 1:
                assert "expected ids below num_experts" in error, error
            assert float(done.value(process, f"{name}_seconds")) < SLACK_S


@pytest.mark.parametrize("how", ["pause", pytest.param("late", marks=pytest.mark.ci)])
def test_a_rank_that_comes_back_in_time_is_no_failure(how):
    options = ["--how", how, "--peer-timeout", LONG_PEER_TIMEOUT_S]
    done = launch("lose_a_rank.py", *options, processes=3)
    assert done.returncode == 0, done.text[-6000:]
    for process in range(3):
        assert done.value(process, "survived") == "yes"


@pytest.mark.parametrize(
    ("phase", "node_size"), [("bootstrap", None), ("close", None), ("close", 1)]
)
def test_a_death_inside_create_group_or_close_holds_nobody_up(phase, node_size):
    options = ["--phase", phase]
    if node_size is not None:
        options += ["--node-size", node_size]
    done = launch("lose_a_rank_early_or_late.py", *options, processes=3, grace=GRACE_S)
    limit = PEER_TIMEOUT_S + SLACK_S + (STOP_S if node_size == 1 else 0.0)
    for survivor in range(2):
        assert float(done.value(survivor, "seconds")) < limit, done.text[-6000:]
        error = done.value(survivor, "error")
        assert ("process 2" in error) if phase == "bootstrap" else error == "closed", error
        assert done.value(survivor, "went_on") == "yes"
    assert done.returncode != 0  # the victim's
