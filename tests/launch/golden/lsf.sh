#!/usr/bin/env bash
#BSUB -J demo
#BSUB -nnodes 4600
#BSUB -W 2:00
#BSUB -P abc123
#BSUB -q batch
#BSUB -wa USR1
#BSUB -wt 5
#BSUB -o /shared/abc123/stemdl/runs/demo/logs/%J.log
#BSUB -e /shared/abc123/stemdl/runs/demo/logs/%J.log
#BSUB -alloc_flags "nvme smt4"
#
# demo on summit: 4600 nodes, 27600 ranks. Check, stage, train, evaluate, purge.
# Written by stemdl 0.1.0: stemdl launch configs/demo.yaml train.epochs=3 --on lsf
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
module load gcc/9.3.0
module load cuda/11.7.1
module load spectrum-mpi/10.4.0.3-20210112
export OMP_NUM_THREADS="4"
export OMPI_MCA_osc_pami_allow_thread_multiple="0"
export PAMI_ENABLE_STRIPING="0"
export NCCL_IB_HCA="mlx5_0,mlx5_1,mlx5_2,mlx5_3"
python=/shared/abc123/stemdl/.venv/bin/python
set -u  # from here on: modules use unset variables

# 2. How a command starts on every rank, and once on every node.
left() { local seconds=$((limit - SECONDS - notice)); echo $((seconds > 1 ? seconds : 1)); }  # to train [s]
# LSF warns this script, which runs on a launch node; jskill reaches the ranks.
trap 'warned=yes; jskill -s USR1 all' USR1
attend() {  # run a command; the warning does not end the wait for it
  "$@" &
  local step=$! code=0
  wait "$step" || code=$?
  if [ -n "${warned:-}" ]; then code=0; wait "$step" || code=$?; fi
  return "$code"
}
# A rank's cores, memory and network port, by its number on the node.
# shellcheck disable=SC2016  # for the ranks' own shells
bind='
case "${JSM_NAMESPACE_LOCAL_RANK:-${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-${FLUX_TASK_LOCAL_ID:-${MPI_LOCALRANKID}}}}}" in
  0) export PAMI_IBV_DEVICE_NAME=mlx5_0:1; set -- --physcpubind=0-27 --membind=0 "$@" ;;
  1) export PAMI_IBV_DEVICE_NAME=mlx5_1:1; set -- --physcpubind=28-55 --membind=0 "$@" ;;
  2) export PAMI_IBV_DEVICE_NAME=mlx5_0:1; set -- --physcpubind=56-83 --membind=0 "$@" ;;
  3) export PAMI_IBV_DEVICE_NAME=mlx5_3:1; set -- --physcpubind=88-115 --membind=8 "$@" ;;
  4) export PAMI_IBV_DEVICE_NAME=mlx5_2:1; set -- --physcpubind=116-143 --membind=8 "$@" ;;
  5) export PAMI_IBV_DEVICE_NAME=mlx5_3:1; set -- --physcpubind=144-171 --membind=8 "$@" ;;
  *) echo "more ranks on this node than the site file binds" >&2; exit 2 ;;
esac
exec numactl "$@"'
every_rank() { attend jsrun --nrs 4600 --rs_per_host 1 --tasks_per_rs 6 --cpu_per_rs 42 --gpu_per_rs 6 --bind none --launch_distribution packed --exit_on_error 1 bash -c "$bind" rank "$@"; }
every_node() { timeout 600 jsrun --nrs 4600 --rs_per_host 1 --tasks_per_rs 1 --cpu_per_rs 42 --gpu_per_rs 6 --bind none "$@"; }
chain() { "$python" -m stemdl.launch.chain "$1" "$run" --chain 20260101-120000 --job "$LSB_JOBID" "${@:2}"; }

# 3. Is anything left to do? An earlier job may have finished the run, or given it up (code 3).
begun=0
chain begin --seconds "$limit" --scheduler lsf || begun=$?
if [ "$begun" -eq 3 ]; then exit 0; fi
if [ "$begun" -ne 0 ]; then exit "$begun"; fi

# 4. The work; the first step that fails ends it.
submitting=$python
unpack() {  # the virtual environment, once to every node's own disk
  every_node mkdir -p "$scratch/env" &&
    every_node tar -xf "/shared/abc123/stemdl-env.tar" -C "$scratch/env" &&
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
health='test "$(nvidia-smi --list-gpus | wc -l)" -eq 6 && test -w /mnt/bb/$USER && hostname'
nodes=$(sort -u "$LSB_DJOB_HOSTFILE" | grep -v batch || true)
well=$nodes
if [ "$code" -ne 0 ] && [ "$code" -ne 75 ]; then well=$(every_node bash -c "$health" || true); fi
every_node rm -rf "$scratch" || true

# 6. What comes next: the next job goes on, or the rest of the chain is taken back.
chain end --code "$code" --nodes "$nodes" --well "$well"
exit "$code"
