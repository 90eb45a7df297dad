#!/bin/bash
# A run on the nodes of a Slurm job. From a folder that all nodes share:
#     sbatch --nodes=4 examples/slurm.sh RECIPE [KEY=VALUE]... --folder RUN
#     sbatch --nodes=4 examples/slurm.sh resume RUN [KEY=VALUE]...
# Slurm's options may stand here or on the command line, as --gpus-per-node=0 where there are none. Variables:
#     ENGINE_GPUS=8        the last 8 GPUs of the first node are kept from Ray: generator.devices names them
#     HEAD_ADDRESS=...     the first node's address, if its name resolves to another one
# With checkpoints.before=10m the run saves before its time is over, is queued again, and resumes.
#SBATCH --job-name=whet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# One Ray per node, on nodes of this job alone: at the end `ray stop` ends every Ray process of the user on a node.
set -euo pipefail

folder="" previous=""
for word in "$@"; do
    case $previous in --folder | resume) folder=$word ;; esac
    case $word in --folder=*) folder=${word#--folder=} ;; esac
    previous=$word
done
if [ $# -eq 0 ] || [ -z "$folder" ]; then
    echo "usage: sbatch --nodes=N $0 RECIPE [KEY=VALUE]... --folder RUN, or resume RUN [KEY=VALUE]..." >&2
    exit 2
fi
command=(train "$@")
if [ "$1" = resume ]; then
    command=("$@")
elif [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e "$folder/recipe.yaml" ]; then
    command=(resume "$folder") # the run's own recipe has the settings
fi

# Nobody without this token may connect. Ray's traffic is not encrypted: the network between the nodes must be trusted.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}

# A node may know its own name as loopback, so another one is asked. Below the ports that Linux gives out, above Ray's own.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=127.0.0.1
if [ ${#nodes[@]} -gt 1 ]; then
    asked=(srun --nodes=1 --ntasks=1 --nodelist="${nodes[-1]}" getent ahostsv4 "${nodes[0]}")
    address=${HEAD_ADDRESS:-$("${asked[@]}" | awk 'NR == 1 {print $1}')}
fi
address=${address:?no address was found for ${nodes[0]}, set HEAD_ADDRESS}:$((20000 + SLURM_JOB_ID % 10000))

on_each_node='
options=()
if [ "$SLURM_NODEID" = 0 ] && [ "${ENGINE_GPUS:-0}" -gt 0 ]; then
    options+=(--num-gpus=$((SLURM_GPUS_ON_NODE - ENGINE_GPUS)))
fi
exec ray symmetric-run --address "$0" --min-nodes "$SLURM_JOB_NUM_NODES" "${options[@]}" -- "$@"
'
# On the first node. 143: the run has saved and ended on its own, or because the job is ended; only then Slurm says so.
on_the_first='
code=0; "$@" || code=$?
if [ "$code" -eq 143 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
'
# Starts Ray on every node, runs the command on the first, and stops Ray when it ends. All cores of a node, all its GPUs.
exec srun --kill-on-bad-exit=1 --cpu-bind=none ${SLURM_GPUS_ON_NODE:+--gpu-bind=none} bash -c "$on_each_node" "$address" \
    bash -c "$on_the_first" whet whet "${command[@]}" cluster.type=ray cluster.address="$address"
