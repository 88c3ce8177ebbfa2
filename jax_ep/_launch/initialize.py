"""``jax_ep.initialize()``: joins the job that this process belongs to, if any.

Finding the job is JAX's work (SLURM, Open MPI, JobSet, TPU); here is only what it leaves out:
plain environment variables, being alone, and what survivors of a failure need.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
from pathlib import Path

import jax

_SLURM_ENV = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)


def initialize() -> None:
    """Joins this process to its job: ``jax.distributed.initialize`` for every known launcher.

    The job is looked for, in this order, in: the variables ``JAX_COORDINATOR_ADDRESS``,
    ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``; Open MPI; SLURM; a Kubernetes JobSet (or an
    indexed Job); a Cloud TPU. A process that belongs to none, or to a job of one process, is left
    as it is. Must come before anything that makes JAX look for devices; calling it again, or in a
    process where ``jax.distributed`` is up already, does nothing.

    It sets ``jax_enable_recoverability``, so that the survivors of a failed process can go on, and
    keeps process 0, the host of JAX's coordinator, until the others have left.

    Raises:
        ValueError: The environment names a job, but not all of it.

    Example:
        >>> import jax, jax_ep
        >>> if not jax.distributed.is_initialized():
        ...     jax_ep.initialize()
    """
    if jax.distributed.is_initialized():
        return
    job = _explicit_job()
    if job is None and not _is_in_cluster():
        return
    configure_jax()
    if job is not None:
        address, num_processes, process_id = job
        jax.distributed.initialize(address, num_processes, process_id)
    else:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            if "coordinator_address should be defined" in str(error):
                return  # looked like a TPU host or a pod, but is not part of a job
            raise
    atexit.register(_leave_in_order)


def configure_jax() -> None:
    """Sets the JAX options of a job of several processes; to be called before it is joined."""
    # Without it every survivor aborts about 100 s after one process has died.
    jax.config.update("jax_enable_recoverability", True)
    if "JAX_CPU_COLLECTIVES_IMPLEMENTATION" not in os.environ:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _explicit_job() -> tuple[str, int, int] | None:
    """The job given by environment variables, the counts also by a launcher JAX cannot read."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    num_processes = os.environ.get("JAX_NUM_PROCESSES") or os.environ.get("OMPI_COMM_WORLD_SIZE")
    process_id = os.environ.get("JAX_PROCESS_ID") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if address is None:
        if "JAX_NUM_PROCESSES" in os.environ and num_processes != "1":
            raise ValueError(
                f"JAX_NUM_PROCESSES={num_processes} without JAX_COORDINATOR_ADDRESS; expected "
                "JAX_COORDINATOR_ADDRESS=host:port (any free port of process 0's host) too"
            )
        if num_processes not in (None, "1") and "OMPI_MCA_orte_hnp_uri" not in os.environ:
            raise ValueError(
                f"found {num_processes} processes of Open MPI 5, whose coordinator JAX cannot "
                "find; set JAX_COORDINATOR_ADDRESS=host:port (mpirun -x JAX_COORDINATOR_ADDRESS)"
            )
        return None
    if num_processes is None or process_id is None:
        if _is_in_cluster():
            return None  # JAX takes the address from the variable and the rest from the cluster
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS={address} with JAX_NUM_PROCESSES={num_processes} and "
            f"JAX_PROCESS_ID={process_id}; expected all three (or unset the first to run alone)"
        )
    return address, int(num_processes), int(process_id)


def _is_in_cluster() -> bool:
    """Whether JAX's own detection is worth asking; it queries no device and no network."""
    if "OMPI_MCA_orte_hnp_uri" in os.environ:
        return os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"
    if all(name in os.environ for name in _SLURM_ENV):
        return os.environ["SLURM_NTASKS"] != "1"
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        return True
    if "TPU_WORKER_HOSTNAMES" in os.environ:
        return "," in os.environ["TPU_WORKER_HOSTNAMES"] or "MEGASCALE_NUM_SLICES" in os.environ
    has_tpu = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    return has_tpu and importlib.util.find_spec("libtpu") is not None


def _leave_in_order() -> None:
    """Keeps process 0, whose coordinator would take the others along.

    Registered after JAX's own exit hook, so it runs before it.
    """
    from jax_ep._jax_compat import distributed_client

    try:
        is_in_job = distributed_client() is not None
    except RuntimeError:  # a forked child leaves without a word
        return
    if is_in_job and jax.process_index() == 0:
        wait_for_others(jax.process_count())


def wait_for_others(num_processes: int) -> None:
    """Returns when every other process has disconnected, waits here too, or is known to be dead.

    Recoverable tasks skip JAX's shutdown barrier, and a coordinator that goes first aborts the
    rest.
    """
    from jax_ep._jax_compat import distributed_client

    with contextlib.suppress(Exception):  # leaving: nobody is left to tell
        # A barrier of the live ones: it opens when those that are here are the last of them.
        distributed_client().get_live_nodes(list(range(num_processes)))
