"""Who started this process: told from what each launcher leaves in the environment."""

import os
import subprocess
import sys

import pytest

from stemdl import ranks

SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "6"}
LAUNCHERS = {
    "jsrun": {
        "JSM_NAMESPACE_RANK": "5",
        "JSM_NAMESPACE_SIZE": "6",
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "6",
        "PMIX_RANK": "5",
    },
    "Spectrum MPI": {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "PMIX_RANK": "5"},
    "PMI": {"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALNRANKS": "2"},
    "flux": {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "6"},
    "srun": SRUN | {"PMIX_RANK": "5"},
}


@pytest.mark.parametrize(("name", "environment"), LAUNCHERS.items(), ids=LAUNCHERS)
def test_each_launcher_is_known_by_its_variables(name, environment):
    found = ranks.launched(environment)
    assert (found.rank, found.size) == (5, 6)
    assert name in found.launcher


def test_a_launcher_that_does_not_tell_the_size():
    assert ranks.launched({"PMIX_RANK": "1"}) == ranks.Launched("a PMIx launcher", 1, None)


def test_mpirun_within_a_step_of_srun_counts():
    """Hydra starts its proxies by srun: the step then has one task a node."""
    inner = ranks.launched(SRUN | {"SLURM_STEP_NUM_TASKS": "2"} | LAUNCHERS["PMI"])
    assert inner.size == 6


def test_a_batch_script_is_no_rank():
    """sbatch gives the script itself SLURM_PROCID and SLURM_NTASKS."""
    assert ranks.launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_JOB_ID": "1"}) is None


@pytest.mark.parametrize("rank", ["0", "4"])
def test_six_processes_that_each_believe_to_be_alone_are_refused_once(rank, tmp_path):
    """As under srun --mpi=none, or the mpirun of another MPI: nothing is written."""
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "stemdl", "train", "configs/demo.yaml", f"run={run}"],
        env=os.environ | SRUN | {"SLURM_PROCID": rank},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    if rank == "0":
        assert len(lines) == 1
        assert "srun started 6 processes, but MPI (" in lines[0]
        assert "counts 1" in lines[0]
        assert "--mpi=pmi2" in lines[0]
    else:
        assert lines == []
    assert not run.exists()


def test_one_process_of_a_launcher_needs_no_mpi():
    code = "from stemdl import ranks; import sys; print(ranks.discover(), 'mpi4py' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "size=1" in done.stdout
    assert done.stdout.split()[-1] == "False"
