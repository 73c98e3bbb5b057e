#!/usr/bin/env bash
#SBATCH --job-name=demo
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=360
#SBATCH --account=m1234_g
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/abc123/stemdl/runs/demo/logs/%j.log
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --exclusive
#
# demo on perlmutter: 16 nodes, 64 ranks. Check, stage, train, evaluate, purge.
# Written by stemdl 0.1.0: stemdl launch configs/demo.yaml train.epochs=3 --on slurm
#
# Ends with 0 when the run is done, 75 when it stopped early with a checkpoint (the next job of the
# chain goes on), 2 for a mistake in the experiment, and anything else for a failure.
set -eo pipefail

cd /shared/abc123/stemdl
run=/shared/abc123/stemdl/runs/demo
limit=21600  # wall-time limit of this job [s]
notice=300  # kept for the last checkpoint and for tidying up [s]
experiment=(/shared/abc123/stemdl/configs/demo.yaml train.epochs=3)

# 1. Environment.
module load PrgEnv-gnu
module load cudatoolkit
module load craype-accel-nvidia80
module load nccl
export OMP_NUM_THREADS="16"
export MPICH_GPU_SUPPORT_ENABLED="0"
python=/shared/abc123/stemdl/.venv/bin/python
set -u  # from here on: modules use unset variables

# 2. How a command starts on every rank, and once on every node.
left() { local seconds=$((limit - SECONDS - notice)); echo $((seconds > 1 ? seconds : 1)); }  # to train [s]
every_rank() { srun --nodes=16 --ntasks=64 --ntasks-per-node=4 --cpus-per-task=16 --gpus-per-task=1 --kill-on-bad-exit=1 --gpu-bind=none --cpu-bind=cores "$@"; }
every_node() { timeout 600 srun --nodes=16 --ntasks=16 --ntasks-per-node=1 --mpi=none "$@"; }
chain() { "$python" -m stemdl.launch.chain "$1" "$run" --chain 20260101-120000 --job "$SLURM_JOB_ID" "${@:2}"; }

# 3. Is anything left to do? An earlier job may have finished the run, or given it up (code 3).
begun=0
chain begin --seconds "$limit" --scheduler slurm || begun=$?
if [ "$begun" -eq 3 ]; then exit 0; fi
if [ "$begun" -ne 0 ]; then exit "$begun"; fi

# 4. The work; the first step that fails ends it.
train() {
  every_rank "$python" -m stemdl train "${experiment[@]}" "train.wall_limit=$(left)"
}
code=0
{
    every_rank "$python" -m stemdl check "${experiment[@]}" &&
    every_rank "$python" -m stemdl stage "${experiment[@]}" &&
    train &&
    every_rank "$python" -m stemdl evaluate "${experiment[@]}"
} || code=$?

# 5. Which nodes are well, if something failed; and purge what is on the nodes' disks.
# shellcheck disable=SC2016  # for the nodes' own shells
health='test "$(nvidia-smi --list-gpus | wc -l)" -eq 4 && hostname'
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
well=$nodes
if [ "$code" -ne 0 ] && [ "$code" -ne 75 ]; then well=$(every_node bash -c "$health" || true); fi

# 6. What comes next: the next job goes on, or the rest of the chain is taken back.
chain end --code "$code" --nodes "$nodes" --well "$well"
exit "$code"
