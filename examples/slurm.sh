#!/bin/bash
# A run on the nodes of a Slurm job. From a folder that all nodes share:
#     sbatch --nodes=4 examples/slurm.sh RECIPE [KEY=VALUE]... [--folder RUN]
# Slurm's options may stand here or on the command line, those for GPUs (--gpus-per-node=8) among them.
#SBATCH --job-name=whet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# One Ray per node, and no neighbours: at the end `ray stop` ends all that the user has of Ray on a node.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch --nodes=N $0 RECIPE [KEY=VALUE]... [--folder RUN]" >&2
    exit 2
fi

# Nobody without this token may connect. Ray's traffic is not encrypted: the network between the nodes must be trusted.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname -I | awk '{print $1}'):6379

# Starts Ray on every node, runs the command on the first, and stops Ray when it ends.
exec srun --kill-on-bad-exit=1 ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    whet train "$@" cluster.type=ray cluster.address="$address"
