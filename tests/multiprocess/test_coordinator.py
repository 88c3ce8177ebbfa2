"""``launch --coordinator``: JAX's coordination service in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import (
    LIMIT_S,
    SAYS_WHAT_IT_GOT,
    all_gone,
    command,
    environment,
    launch,
    start,
    wait_for_lines,
)
from launching import PROGRAMS

pytestmark = pytest.mark.multiprocess

WAIT = """
    import os, time
    print("pid", os.getpid())
    time.sleep(300)
    """


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _coordinator_of(job: subprocess.Popen[str]) -> int:
    for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
        if "_launch.coordinator" in Path(f"/proc/{pid}/cmdline").read_text():
            return int(pid)
    raise AssertionError("the launcher has no coordinator")


@pytest.mark.ci
def test_nobody_waits_for_another_and_process_0_serves_nothing(script):
    path = script(
        """
        import time, jax
        from jax._src import distributed
        assert distributed.global_state.service is None
        print("devices", jax.device_count())
        if jax.process_index() == 1:
            time.sleep(2)
            print("still here")
        """
    )
    done = launch(path, "-n", "2", "--coordinator")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("devices 2") == 2 and "[1] still here" in done.stdout
    assert "oordinat" not in done.stderr


def test_the_end_of_the_coordinator_ends_all_also_who_cannot_hear_of_it(script):
    job = subprocess.Popen(
        command(script(WAIT), "-n", "3", "--grace", "1", "--coordinator", "--keep-going"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    pids = [int(line.split()[-1]) for line in wait_for_lines(job, "pid", 3)]
    coordinator = _coordinator_of(job)
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(coordinator, signal.SIGKILL)
    killed_at = time.monotonic()
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.SIGKILL
    assert f"the coordinator (pid {coordinator}) was ended by SIGKILL: no process" in errors
    assert time.monotonic() - killed_at < 30
    assert all_gone([*pids, coordinator])


def test_the_coordinator_ends_with_a_killed_launcher(script):
    job = start(script(WAIT), "-n", "1", "--coordinator")
    pids = [int(line.split()[-1]) for line in wait_for_lines(job, "pid", 1)]
    pids.append(_coordinator_of(job))
    job.kill()
    job.wait(timeout=LIMIT_S)
    assert all_gone(pids)


def test_an_address_that_cannot_be_had_ends_the_job_at_once(script):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ("-n", "2", "--coordinator", "--coordinator-address", address)
        begun = time.monotonic()
        done = launch(script(WAIT), *options)
    assert done.returncode == 1
    assert f"the coordinator cannot listen at {address}" in done.stderr
    assert "with a free port: change --coordinator-address" in done.stderr
    assert "before any process could join it; the job ends" in done.stderr
    assert time.monotonic() - begun < 30


@pytest.mark.ci
def test_two_that_end_together_leave_nobody_to_take_them_back(script):
    path = script(
        """
        import os, signal, time, jax
        from jax_ep._jax_compat import distributed_client
        distributed_client().wait_at_barrier("ready", 100_000)
        os.kill(os.getppid(), signal.SIGSTOP)  # it finds both ended at once
        if jax.process_index() == 0:
            os.system(f"(sleep 2; kill -CONT {os.getppid()}) > /dev/null 2>&1 &")
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    options = ("-n", "2", "--keep-going", "--restarts", "3", "--coordinator")
    done = launch(path, *options)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "no process is left that could take another one back" in done.stderr
    assert "is started again" not in done.stderr


@pytest.mark.ci
@pytest.mark.parametrize(("end", "exit_code"), [("sys.exit(0)", 0), ("sys.exit(5)", 6)])
def test_who_keeps_going_ends_with_the_first_good_end_or_the_last_failure(script, end, exit_code):
    """Process 0 fails first and is not missed; then 1 ends well, or all have failed."""
    path = script(
        f"""
        import sys, time, jax
        from jax_ep._jax_compat import distributed_client
        jax.devices()
        distributed_client().wait_at_barrier("ready", 100_000)
        if jax.process_index() == 0:
            sys.exit(6)
        time.sleep(2.0)
        print("went on")
        {end}
        """
    )
    done = launch(path, "-n", "2", "--grace", "1", "--keep-going", "--coordinator")
    assert done.returncode == exit_code, done.stderr
    assert "[1] went on" in done.stdout
    assert "process 0 failed with exit code 6; the others go on" in done.stderr


@pytest.mark.ci
def test_process_0_joins_again_and_sees_all_devices(script):
    path = script(
        """
        import os, signal, sys, time, jax
        from jax_ep._jax_compat import distributed_client
        store = distributed_client()
        def lives():
            return len(store.key_value_dir_get("life"))
        jax.devices()
        if jax.process_index() == 0:
            store.key_value_set(f"life/{os.getpid()}", "")
            if lives() < 3:
                os.kill(os.getpid(), signal.SIGKILL)
        limit = time.monotonic() + 90
        while lives() < 3 and time.monotonic() < limit:
            time.sleep(0.01)
        print("devices", jax.device_count(), "lives", lives())
        """
    )
    options = ("--grace", "5", "--keep-going", "--restarts", "2", "--coordinator")
    done = launch(path, "-n", "3", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("devices 3 lives 3") == 3, done.stdout + done.stderr
    assert done.stderr.count("process 0 is started again") == 2


@pytest.mark.ci
@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_others_join_again_after_a_process_0_that_never_saw_its_devices(script, end):
    path = script(
        f"""
        import os, signal, sys, time, jax
        from jax_ep._jax_compat import distributed_client
        from jax._src.distributed import global_state
        store, me = distributed_client(), global_state.process_id
        def lives(of):
            return len(store.key_value_dir_get(f"lives{{of}}"))
        def wait_for(of, count):
            limit = time.monotonic() + 90
            while lives(of) < count and time.monotonic() < limit:
                time.sleep(0.01)
        store.key_value_set(f"lives{{me}}/{{os.getpid()}}", "")
        if me == 0 and lives(0) == 2:
            store.key_value_set("lives0/ended", "")
            {end}
        jax.devices()
        if me == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(0, 3)
        if me == 1 and lives(1) == 1:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(1, 2)
        print("devices", jax.device_count())
        if me == 1:
            store.key_value_set("lives1/seen", "")
        wait_for(1, 3)
        """
    )
    options = ("--grace", "20", "--keep-going", "--restarts", "1", "--coordinator")
    done = launch(path, "-n", "3", *options)
    assert done.returncode == 0, done.stderr
    assert "[1] devices 3" in done.stdout, done.stdout + done.stderr


@pytest.mark.ci
def test_a_signal_to_all_leaves_the_coordinator_to_those_that_finish(script):
    job = start(script(SAYS_WHAT_IT_GOT), "-n", "2", "--coordinator")
    pids = [int(line.split()[-1]) for line in wait_for_lines(job, "pid", 2)]
    coordinator = _coordinator_of(job)
    for pid in (coordinator, *pids):  # as a batch system does
        os.kill(pid, signal.SIGTERM)
    rest, _ = job.communicate(timeout=LIMIT_S)
    assert rest.count("got 15") == 2 and job.returncode == 0
    assert all_gone([*pids, coordinator])


@pytest.mark.ci
@pytest.mark.parametrize(("transport", "wire"), [("shm", ""), ("ofi", "fp8")])
def test_an_elastic_group_goes_on_without_process_0_and_takes_it_back(transport, wire):
    from jax_ep import _core

    if transport not in {name for name, is_usable, _ in _core.transports() if is_usable}:
        pytest.skip(f"no transport {transport} here")
    options = ("-n", "4", "--keep-going", "--restarts", "1", "--coordinator")
    program = PROGRAMS / "lose_process_0.py"
    done = launch(program, *options, arguments=(transport, wire), JAX_EP_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout + done.stderr
    alone = [line.split() for line in done.stdout.splitlines() if "alone" in line]
    assert len(alone) == 3
    assert all(words[2:6] == ["[0,", "1,", "1,", "1]"] for words in alone), alone
    assert max(float(words[6]) for words in alone) < 3.0 + 2.0  # its peer_timeout_s
    (refused,) = [line.split() for line in done.stdout.splitlines() if "refused" in line]
    assert float(refused[-1]) < 4.0  # it waits for nobody
    for index in range(4):
        assert f"[{index}] again [1, 1, 1, 1]" in done.stdout
        assert f"[{index}] closed" in done.stdout


@pytest.mark.ci
def test_processes_of_several_launchers_share_a_coordinator(script):
    """One launcher hosts it, one joins, and a process joins by JAX's variables alone."""
    path = script(
        """
        import time, jax, jax_ep
        if not jax.distributed.is_initialized():
            jax_ep.initialize()
        print("I am", jax.process_index(), "of", jax.device_count(), flush=True)
        time.sleep(2 * jax.process_index())  # the coordinator's host is done first
        print("done", flush=True)
        """
    )
    address = _free_address()
    shared = ("-n", "1", "--coordinator-address", address, "--job-processes", "3")
    by_hand = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
    }
    jobs = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**extra),
        )
        for words, extra in (
            (command(path, *shared, "--coordinator"), {}),
            (command(path, *shared, "--first-process", "1"), {}),
            ([sys.executable, str(path)], by_hand),
        )
    ]
    for index, job in enumerate(jobs):
        text, _ = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, text
        assert f"I am {index} of 3" in text and "done" in text


@pytest.mark.ci
def test_a_launcher_that_has_joined_says_that_the_coordinator_is_gone(script):
    address = _free_address()
    shared = ("-n", "1", "--coordinator-address", address, "--job-processes", "2")
    host = start(script(WAIT), *shared, "--coordinator")
    more = ("--first-process", "1", "--keep-going", "--restarts", "3")
    guest = subprocess.Popen(
        command(script(WAIT), *shared, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    pids = [int(wait_for_lines(job, "pid", 1)[0].split()[-1]) for job in (host, guest)]
    os.kill(_coordinator_of(host), signal.SIGKILL)
    _, errors = guest.communicate(timeout=LIMIT_S)
    assert guest.returncode == 128 + signal.SIGABRT
    assert f"the coordinator at {address} is gone" in errors
    assert host.wait(timeout=LIMIT_S) == 128 + signal.SIGKILL
    assert all_gone(pids)
