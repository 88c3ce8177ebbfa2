"""examples/launch/slurm.sbatch under a real SLURM of one node."""

import re

import pytest
from scripts import LAUNCH, LIMIT_S, OPTIONS, PROCESSES, check_trained, environment, run
from slurm_cluster import missing, slurm_cluster, wait_for_job

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
]


@pytest.mark.timeout(2 * LIMIT_S + 300)
def test_the_job_trains_and_a_failing_job_fails(tmp_path):
    # One CPU, so that two tasks overcommit it on every machine.
    with slurm_cluster(tmp_path, cpus=1) as env:
        env["PROCESSES_PER_NODE"] = str(PROCESSES)
        sbatch = ["sbatch", "--parsable", "--nodes=1", f"--output={tmp_path}/%j.out"]

        def batch(*options: object) -> tuple[int, str]:
            job = run(*sbatch, LAUNCH / "slurm.sbatch", *options, **env).strip()
            code = wait_for_job(job, environment(**env), LIMIT_S)
            return code, (tmp_path / f"{job}.out").read_text()

        code, output = batch(*OPTIONS, "--out", tmp_path / "results")
        assert code == 0, output[-6000:]
        check_trained(output)
        assert re.search("^[01]: ", output, re.MULTILINE), "srun --label was not used"
        assert (tmp_path / "results" / "results.json").exists()

        code, output = batch("--no-such-option")
        assert code != 0
        assert "unrecognized arguments: --no-such-option" in output
