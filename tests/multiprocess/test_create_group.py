"""create_group between processes: one that fails tells the others, and the next call works."""

import functools
import os

import pytest
from launching import launch

pytestmark = pytest.mark.multiprocess


@functools.cache
def _job():
    done = launch("calls_that_fail.py", processes=2)
    assert done.returncode == 0, done.text[-6000:]
    return done


def _errors(name):
    """What the two processes were told; the next call gave both the same group."""
    ids = [_job().value(process, f"{name}_id") for process in range(2)]
    assert ids[0] == ids[1]
    return [_job().value(process, name) for process in range(2)]


def test_an_error_of_one_process_reaches_the_others_at_once():
    other, culprit = _errors("wrong")
    assert culprit.startswith("ValueError") and "num_experts=3" in culprit
    assert other.startswith("BootstrapError") and "process 1 failed" in other
    assert "num_experts=3" in other


def test_meshes_of_another_device_order_are_an_error_on_both():
    for message in _errors("order"):
        assert message.startswith("ValueError") and "devices [" in message, message


def test_who_asked_for_another_implementation_is_named():
    native, xla = _errors("xla")
    assert xla == "none"  # waits for nobody
    assert native.startswith("BootstrapError") and "process 1 failed" in native
    assert "got implementation='xla' in process 1" in native


def test_a_process_that_comes_when_the_others_gave_up_is_told_so():
    waited, late = _errors("absent")
    assert "process 1 did not reach stage 'hello'" in waited
    assert late.startswith("BootstrapError") and "process 0 failed" in late
    assert "call create_group again in every process" in late


@pytest.mark.parametrize("wait", ["store", "barrier"])
def test_ctrl_c_ends_a_wait_in_create_group(wait):
    interrupted, other = _errors(wait)
    assert interrupted.startswith("KeyboardInterrupt")
    assert other.startswith(("RuntimeError", "BootstrapError")), other


def test_ctrl_c_ends_a_wait_in_close():
    interrupted, _ = _errors("close")
    assert interrupted.startswith("KeyboardInterrupt")


def test_ctrl_c_ends_a_wait_in_close_for_what_was_enqueued():
    # Two devices a process: on one, XLA runs so small a step before it returns.
    done = launch("interrupt_close.py", processes=2, devices_per_process=2)
    assert done.returncode == 0, done.text[-6000:]
    assert done.value(0, "close") == "KeyboardInterrupt"
    assert done.value(0, "heap_bytes") == "0"
    assert "process 0 was interrupted by a signal" in done.value(1, "told")


def test_another_job_secret_is_refused_on_both_sides():
    for process, message in enumerate(_errors("secret")):
        assert f"the record of process {1 - process} is refused" in message, message
        assert "JAX_EP_JOB_SECRET differs" in message


def test_what_a_launched_job_stores_cannot_be_read():
    for process in range(2):
        assert _job().value(process, "readable") == "True []"


def test_a_group_that_is_never_freed_leaves_no_complaint_at_exit():
    done = launch("held_at_exit.py", processes=1, devices_per_process=2)
    assert done.returncode == 0, done.text[-6000:]
    assert done.value(0, "closed") == "True"
    assert "leaked" not in done.text, done.text[-6000:]


def test_programs_that_process_0_would_load_are_refused():
    for message in _errors("cache"):
        assert message.startswith("ValueError") and "JAX_ENABLE_COMPILATION_CACHE" in message


@pytest.mark.ci
def test_32_processes_create_a_group():
    done = launch("many_processes.py", processes=32)
    assert done.returncode == 0, done.text[-6000:]
    seconds = [float(done.value(process, "SECONDS")) for process in range(32)]
    print(f"create_group of 32 processes: {max(seconds):.1f} s on {os.cpu_count()} cores")
    assert all(done.value(process, "DONE") == "yes" for process in range(32))
