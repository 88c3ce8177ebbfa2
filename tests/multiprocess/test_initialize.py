"""``jax_ep.initialize()``: which job it finds in an environment, and how processes leave."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import pytest

from jax_ep._launch import initialize
from jax_ep._launch.process import reserved_port

LIMIT_S = 200.0
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
OMPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
JOBSET = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
EXPLICIT = {
    "JAX_COORDINATOR_ADDRESS": "host:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


@pytest.fixture
def joined(monkeypatch):
    """An environment without a job, and the arguments of every attempt to join one."""
    prefixes = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS", "KUBERNETES_")
    for name in list(os.environ):
        if name.startswith((*prefixes, "JOB_COMPLETION", "TPU_", "MEGASCALE")):
            monkeypatch.delenv(name)
    calls = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    monkeypatch.setattr(initialize, "configure_jax", lambda: None)
    monkeypatch.setattr(initialize.atexit, "register", lambda hook: None)
    return calls


class TestWhichJob:
    def test_alone_it_does_nothing(self, joined):
        initialize.initialize()
        assert joined == []

    @pytest.mark.parametrize("job", [SLURM, OMPI_4, JOBSET], ids=["slurm", "ompi", "jobset"])
    def test_a_cluster_is_left_to_jax(self, joined, monkeypatch, job):
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        initialize.initialize()
        assert joined == [()]

    @pytest.mark.parametrize(
        "job",
        [SLURM | {"SLURM_NTASKS": "1"}, OMPI_4 | {"OMPI_COMM_WORLD_SIZE": "1"}],
        ids=["slurm", "ompi"],
    )
    def test_a_job_of_one_process_is_alone(self, joined, monkeypatch, job):
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        initialize.initialize()
        assert joined == []

    def test_explicit_variables_win(self, joined, monkeypatch):
        for name, value in (SLURM | EXPLICIT).items():
            monkeypatch.setenv(name, value)
        initialize.initialize()
        assert joined == [("host:1234", 4, 3)]

    def test_twice_is_once(self, joined, monkeypatch):
        for name, value in EXPLICIT.items():
            monkeypatch.setenv(name, value)
        initialize.initialize()
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        initialize.initialize()
        assert len(joined) == 1

    def test_an_address_alone_is_an_error_that_names_the_rest(self, joined, monkeypatch):
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1234")
        with pytest.raises(ValueError, match="expected all three"):
            initialize.initialize()

    def test_open_mpi_5_needs_an_address(self, joined, monkeypatch):
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
        with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS=host:port"):
            initialize.initialize()
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1234")
        initialize.initialize()
        assert joined == [("host:1234", 2, 1)]


@pytest.mark.multiprocess
def test_process_0_leaves_last():
    """Its coordinator goes with it: the others were aborted when it left first."""
    script = textwrap.dedent(
        """
        import time, jax, jax_ep
        jax_ep.initialize()
        assert jax.distributed.is_initialized() and jax.config.jax_enable_recoverability
        assert jax.device_count() == 2
        if jax.process_index() == 1:
            time.sleep(2)
        """
    )
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS",)}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": "2"}
    with reserved_port() as port:
        env["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        command = [sys.executable, "-c", script]
        processes = [
            subprocess.Popen(command, env=env | {"JAX_PROCESS_ID": str(index)})
            for index in range(2)
        ]
        assert [process.wait(timeout=LIMIT_S) for process in processes] == [0, 0]
