"""examples/launch: every launcher starts the same unchanged program, and it trains the same."""

import re
import shutil
import subprocess

import pytest
from scripts import LAUNCH, OPTIONS, PROCESSES, TRAIN, check_trained, run

pytestmark = pytest.mark.multiprocess

for package in ("flax", "optax", "orbax.checkpoint", "rich", "matplotlib"):
    pytest.importorskip(package)

NAMES = {"local.sh", "mpirun.sh", "slurm.sbatch", "jobset.yaml", "tpu_vm.sh"}


@pytest.fixture(scope="module")
def local_results(tmp_path_factory):
    out = tmp_path_factory.mktemp("local")
    output = run(LAUNCH / "local.sh", *OPTIONS, "--out", out, NUM_PROCESSES=PROCESSES)
    check_trained(output)
    return out / "results.json"


def test_each_starts_the_same_program_and_shell_files_are_correct():
    assert {path.name for path in LAUNCH.iterdir()} == NAMES
    for name in NAMES:
        text = (LAUNCH / name).read_text()
        assert len(text.splitlines()) < 120, f"{name} is not short"
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        assert re.findall(r"[\w/.-]+\.py\b", code) == [TRAIN], name
        if not name.endswith(".yaml"):
            subprocess.run(["bash", "-n", LAUNCH / name], check=True)
            assert (LAUNCH / name).stat().st_mode & 0o111 or name.endswith(".sbatch"), name


def test_local(local_results):
    assert local_results.exists()


@pytest.mark.ci
@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun (Debian: apt-get install openmpi-bin)"
)
def test_mpirun_trains_the_same(local_results, tmp_path):
    output = run(
        *(LAUNCH / "mpirun.sh", *OPTIONS, "--out", tmp_path, "--compare", local_results),
        NUM_PROCESSES=PROCESSES,
        # Refused otherwise: root (in containers), and more processes than cores.
        OMPI_ALLOW_RUN_AS_ROOT=1,
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1,
        OMPI_MCA_rmaps_base_oversubscribe=1,
    )
    check_trained(output)
    assert "same: " in output


def test_the_tpu_script_alone_is_a_job_of_one_process(tmp_path):
    """Without a TPU nothing is found to join; on a slice each host runs these very lines."""
    check_trained(run(LAUNCH / "tpu_vm.sh", *OPTIONS, "--out", tmp_path), processes=1)
