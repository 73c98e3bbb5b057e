#!/usr/bin/env bash
#SBATCH --job-name=demo
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --time=120
#SBATCH --account=abc123
#SBATCH --partition=batch
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/abc123/stemdl/runs/demo/logs/%j.log
#SBATCH --constraint=nvme
#SBATCH --exclusive
#
# demo on frontier: 64 nodes, 512 ranks. Check, stage, train, evaluate, purge.
# Written by stemdl 0.1.0: stemdl launch configs/demo.yaml train.epochs=3 --on slurm
#
# Ends with 0 when the run is done, 75 when it stopped early with a checkpoint (the next job of the
# chain goes on), 2 for a mistake in the experiment, and anything else for a failure.
set -eo pipefail

cd /shared/abc123/stemdl
run=/shared/abc123/stemdl/runs/demo
limit=7200  # wall-time limit of this job [s]
notice=300  # kept for the last checkpoint and for tidying up [s]
scratch="/mnt/bb/$USER/stemdl-demo"  # on each node's own disk
experiment=(/shared/abc123/stemdl/configs/demo.yaml train.epochs=3 "stage.dir=$scratch/data")

# 1. Environment.
module load PrgEnv-gnu
module load rocm
module load craype-accel-amd-gfx90a
export OMP_NUM_THREADS="7"
export MPICH_GPU_SUPPORT_ENABLED="0"
export NCCL_SOCKET_IFNAME="hsn0,hsn1,hsn2,hsn3"
export MIOPEN_USER_DB_PATH="/tmp/$USER-miopen"
python=/shared/abc123/stemdl/.venv/bin/python
set -u  # from here on: modules use unset variables

# 2. How a command starts on every rank, and once on every node.
left() { local seconds=$((limit - SECONDS - notice)); echo $((seconds > 1 ? seconds : 1)); }  # to train [s]
every_rank() { srun --nodes=64 --ntasks=512 --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-task=1 --kill-on-bad-exit=1 --gpu-bind=closest "$@"; }
every_node() { timeout 600 srun --nodes=64 --ntasks=64 --ntasks-per-node=1 --mpi=none "$@"; }
chain() { "$python" -m stemdl.launch.chain "$1" "$run" --chain 20260101-120000 --job "$SLURM_JOB_ID" "${@:2}"; }

# 3. Is anything left to do? An earlier job may have finished the run, or given it up (code 3).
begun=0
chain begin --seconds "$limit" --scheduler slurm || begun=$?
if [ "$begun" -eq 3 ]; then exit 0; fi
if [ "$begun" -ne 0 ]; then exit "$begun"; fi

# 4. The work; the first step that fails ends it.
submitting=$python
unpack() {  # the virtual environment, once to every node's own disk
  every_node mkdir -p "$scratch/env" &&
    sbcast --force "/shared/abc123/stemdl-env.tar" "$scratch/env.tar" &&
    every_node tar -xf "$scratch/env.tar" -C "$scratch/env" &&
    python=$scratch/env/bin/python
}
train() {
  # RUN is on the first node's own disk; it is copied back while ranks train, and at the end.
  local code=0
  every_rank "$python" -m stemdl.launch.mirror "$scratch/run" "$run" --every 120 -- \
    "$python" -m stemdl train "${experiment[@]}" "run=$scratch/run" "train.wall_limit=$(left)" || code=$?
  every_node "$python" -m stemdl.launch.mirror "$scratch/run" "$run" || code=1
  return "$code"
}
code=0
{
  unpack &&
    every_rank "$python" -m stemdl check "${experiment[@]}" &&
    every_rank "$python" -m stemdl stage "${experiment[@]}" &&
    train &&
    every_rank "$python" -m stemdl evaluate "${experiment[@]}"
} || code=$?
python=$submitting

# 5. Which nodes are well, if something failed; and purge what is on the nodes' disks.
# shellcheck disable=SC2016  # for the nodes' own shells
health='test "$(rocm-smi --showid | grep -c '"'"'Device ID'"'"')" -ge 8 && test -w /mnt/bb/$USER && hostname'
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
well=$nodes
if [ "$code" -ne 0 ] && [ "$code" -ne 75 ]; then well=$(every_node bash -c "$health" || true); fi
every_node rm -rf "$scratch" || true

# 6. What comes next: the next job goes on, or the rest of the chain is taken back.
chain end --code "$code" --nodes "$nodes" --well "$well"
exit "$code"
