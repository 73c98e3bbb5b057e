#!/usr/bin/env bash
#
# demo on laptop: 1 node, 2 ranks. Check, stage, train, evaluate, purge.
# Written by stemdl 0.1.0: stemdl launch configs/demo.yaml train.epochs=3 --on local
#
# Ends with 0 when the run is done, 75 when it stopped early with a checkpoint (the next job of the
# chain goes on), 2 for a mistake in the experiment, and anything else for a failure.
set -eo pipefail

cd /shared/abc123/stemdl
run=/shared/abc123/stemdl/runs/demo
limit=3600  # wall-time limit of this job [s]
notice=60  # kept for the last checkpoint and for tidying up [s]
experiment=(/shared/abc123/stemdl/configs/demo.yaml train.epochs=3)

# 1. Environment.
python=/shared/abc123/stemdl/.venv/bin/python
set -u  # from here on: modules use unset variables

# 2. How a command starts on every rank, and once on every node.
left() { local seconds=$((limit - SECONDS - notice)); echo $((seconds > 1 ? seconds : 1)); }  # to train [s]
every_rank() { mpirun -n 2 "$@"; }
every_node() { timeout 600  "$@"; }
chain() { "$python" -m stemdl.launch.chain "$1" "$run" --chain 20260101-120000 --job "$$" "${@:2}"; }

# 3. Is anything left to do? An earlier job may have finished the run, or given it up (code 3).
begun=0
chain begin --seconds "$limit" --scheduler local || begun=$?
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
health='true && hostname'
nodes=$(hostname)
well=$nodes
if [ "$code" -ne 0 ] && [ "$code" -ne 75 ]; then well=$(every_node bash -c "$health" || true); fi

# 6. What comes next: the next job goes on, or the rest of the chain is taken back.
chain end --code "$code" --nodes "$nodes" --well "$well"
exit "$code"
