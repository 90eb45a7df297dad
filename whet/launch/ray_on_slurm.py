"""The part of a Slurm script that starts Ray on all nodes of a job; it wraps the array ``command`` in bash."""

RAY_ON_NODES = r"""
# One Ray per node, on nodes of this job alone: at the end `ray stop` ends every Ray process of the user on a node.
# A client needs this token to connect. Ray's traffic is not encrypted: the network between the nodes must be trusted.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}

# A node may resolve its name to loopback, so another one is asked. The port is below the ports that Linux gives out and
# above Ray's. HEAD_ADDRESS: the first node's address, where its name resolves to another one.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
asked=(srun --nodes=1 --ntasks=1 --nodelist="${nodes[-1]}" getent ahostsv4 "${nodes[0]}")
address=${HEAD_ADDRESS:-$("${asked[@]}" | awk 'NR == 1 {print $1}')}
address=${address:?no address was found for ${nodes[0]}, set HEAD_ADDRESS}:$((20000 + SLURM_JOB_ID % 10000))

on_each_node='
options=()
if [ "$SLURM_NODEID" = 0 ] && [ "$1" -gt 0 ]; then
    options+=(--num-gpus=$((SLURM_GPUS_ON_NODE - $1)))
fi
shift
exec ray symmetric-run --address "$0" --min-nodes "$SLURM_JOB_NUM_NODES" "${options[@]}" -- "$@"
'
# Starts Ray on every node, runs the command on the first, and stops Ray when it ends. All cores and GPUs of a node.
command+=(cluster.type=ray "cluster.address=$address")
command=(bash -c "$on_each_node" "$address" "$engine_gpus" bash -c "$keep_code" "$exit_file" "${command[@]}")"""
