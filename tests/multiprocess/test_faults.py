"""Death, stop and lateness of a rank: an error that names it within the limit, and a way on."""

import pathlib

import pytest
from launching import launch

pytestmark = pytest.mark.multiprocess

PEER_TIMEOUT_S = 4.0
# Detection plus the time that this shared machine may take to run the survivors.
SLACK_S = 4.0


def _shared_memory_files():
    return (
        {path.name for path in pathlib.Path("/dev/shm").iterdir()}
        if pathlib.Path("/dev/shm").exists()
        else set()
    )


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
    done = launch("lose_a_rank.py", *options, processes=3, grace=30)
    for survivor in range(2):
        assert float(done.value(survivor, "seconds")) < PEER_TIMEOUT_S + SLACK_S, done.text[-6000:]
        assert "rank 2" in done.value(survivor, "error"), done.text[-6000:]
        assert "rank 2" in done.value(survivor, "check")
        delay, _, text = done.value(survivor, "later").partition(" ")
        assert float(delay) < 1.0 and "rank 2" in text
        assert done.value(survivor, "went_on") == "2"
    assert done.returncode != 0  # the victim's
    assert _shared_memory_files() <= before


@pytest.mark.parametrize("how", ["pause", "late"])
def test_a_rank_that_comes_back_in_time_is_no_failure(how):
    done = launch("lose_a_rank.py", "--how", how, "--peer-timeout", PEER_TIMEOUT_S, processes=3)
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
    done = launch("lose_a_rank_early_or_late.py", *options, processes=3, grace=30)
    for survivor in range(2):
        assert float(done.value(survivor, "seconds")) < PEER_TIMEOUT_S + SLACK_S, done.text[-6000:]
        error = done.value(survivor, "error")
        assert ("process 2" in error) if phase == "bootstrap" else error == "closed", error
        assert done.value(survivor, "went_on") == "yes"
    assert done.returncode != 0  # the victim's
