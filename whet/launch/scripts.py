"""The text that a scheduler is given: a bash script, a manifest for Kubernetes or a task of SkyPilot."""

import shlex
import sys
from io import StringIO
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from whet.base.errors import ConfigError
from whet.base.strict_json import JsonObject
from whet.launch.job import EXIT, LOG, RECIPE, Job
from whet.launch.profiles import Docker, Kubernetes, Profile, SkyPilot, Slurm

RAY_ON_NODES = r"""
# One Ray per node, on nodes of this job alone: at the end `ray stop` ends every Ray process of the user on a node.
# A client needs this token to connect. Ray's traffic is not encrypted: the network between the nodes must be trusted.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=${RAY_worker_niceness:-0}  # Ray's own default, 15, starves workers next to other programs
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
"""The part of a Slurm script that starts Ray on all nodes of a job; it wraps the array ``command`` in bash."""

_SENT = "/etc/whet"  # the folder in pods and machines that holds what was sent

# Runs a command and writes its exit code to the file $0. SIGTERM reaches the command too, which saves and ends.
_KEEP_CODE = """keep_code='trap : TERM INT; code=0; "$@" || code=$?; echo "$code" >"$0"; exit "$code"'"""

_SLURM_END = """
code=0
srun --kill-on-bad-exit=1 --cpu-bind=none "${in_container[@]}" ${SLURM_GPUS_ON_NODE:+--gpu-bind=none} \\
    "${command[@]}" || code=$?
code=$(cat "$exit_file" 2>/dev/null || echo "$code")
# 143: the run has saved and ended before its time is over, or the job is ended; Slurm's state tells which.
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T) || state=unknown
if [ "$code" -eq 143 ] && [ "$state" = RUNNING ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ]; then
    rm -f "$exit_file"
    exec scontrol requeue "$SLURM_JOB_ID"
fi
echo "$code" >"$exit_file"
exit "$code"
"""


def file_name(profile: Profile) -> str:
    """Return the name of the file that ``render`` gives the text of."""
    names = {Kubernetes: "manifest.yaml", SkyPilot: "task.yaml"}
    return names.get(type(profile), "script.sh")


def render(job: Job) -> str:
    """Return the script, manifest or task of a job."""
    profile = job.profile
    if isinstance(profile, Slurm | Kubernetes) and profile.nodes > 1 and not job.trains:
        raise ConfigError(
            f"profile {job.profile_name} has nodes = {profile.nodes}, and whet {job.command[0]} runs on one: choose a "
            "profile of one node, as with extends and nodes = 1"
        )
    if isinstance(profile, Kubernetes):
        return _manifest(job, profile)
    if isinstance(profile, SkyPilot):
        return _task(job, profile)
    if isinstance(profile, Slurm):
        return _slurm(job, profile)
    head = ["#!/bin/bash", f"# {job.line}"]
    if isinstance(profile, Docker):
        head.append(f"# runs in: docker run --detach {shlex.join(docker_options(job))}")
    return "\n".join([*head, *_start(job), _KEEP_CODE, *_exit_file(job), _RUN, ""])


_RUN = 'exec bash -c "$keep_code" "$exit_file" "${command[@]}"'


def _exit_file(job: Job) -> list[str]:
    return [f"exit_file={shlex.quote(str(job.folder / EXIT))}", 'rm -f "$exit_file"']


def _start(job: Job, *settings: str) -> list[str]:
    """Return the lines of bash that prepare the environment and set ``command``, to train or, if the run has begun, to
    resume it."""
    profile = job.profile
    lines = ["set -euo pipefail"]
    if profile.sees_folder:
        lines.append(f"cd {shlex.quote(str(job.working_folder))}")
        if getattr(profile, "container", None) is None:
            lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
    if not isinstance(profile, Kubernetes):  # there all pods get the variables
        lines += [f"export {name}={shlex.quote(value)}" for name, value in profile.environment.items()]
    lines += profile.setup.strip().splitlines()
    words = [*job.sent, *settings]
    lines.append(f"command=({shlex.join(['whet', *words])})")
    if job.again:
        folder = job.again[1]
        lines += [
            f"if [ -e {shlex.quote(f'{folder}/recipe.yaml')} ]; then # the run has begun: its recipe has the settings",
            f"    command=({shlex.join(['whet', *job.again, *settings])})",
            "fi",
        ]
    return lines


def _slurm(job: Job, profile: Slurm) -> str:
    options = {
        "job-name": job.name, "account": profile.account, "partition": profile.partition, "nodes": profile.nodes,
        "ntasks-per-node": 1, "gpus-per-node": profile.gpus or None, "cpus-per-task": profile.cpus,
        "mem": profile.memory and profile.memory.rstrip("iB"), "time": profile.time,
        "chdir": job.working_folder, "output": str(job.folder / LOG).replace("%", "%%"), "open-mode": "append",
    }  # fmt: skip
    lines = [f"--{name}={_quoted(str(value))}" for name, value in options.items() if value is not None]
    lines += ["--requeue", *(["--exclusive"] if profile.nodes > 1 else []), *profile.options]
    before = [f"checkpoints.before={profile.save_before}"] if profile.time and job.saves else []
    container = []
    if profile.container is not None:
        here = {str(path): str(path) for path in (job.working_folder, job.run)}
        mounts = [f"{source.removesuffix(':ro')}:{inside}{':ro' * source.endswith(':ro')}"
                  for inside, source in (here | profile.mounts).items()]  # fmt: skip
        container = [f"--container-image={profile.container}", f"--container-mounts={','.join(mounts)}"]
        container.append(f"--container-workdir={job.working_folder}")
    alone = 'command=(bash -c "$keep_code" "$exit_file" "${command[@]}")'
    return "\n".join([
        "#!/bin/bash", f"# {job.line}", *(f"#SBATCH {line}" for line in lines), *_start(job, *before), _KEEP_CODE,
        *_exit_file(job), f"requeues={profile.requeues}", f"engine_gpus={profile.engine_gpus}",
        f"in_container=({shlex.join(container)})", RAY_ON_NODES if profile.nodes > 1 else alone, _SLURM_END,
    ])  # fmt: skip


def _quoted(value: str) -> str:
    """Return a value of an ``#SBATCH`` line; Slurm reads double quotes."""
    return f'"{value}"' if " " in value else value


def docker_options(job: Job) -> list[str]:
    """Return the options and the command of ``docker run`` for a job."""
    profile = job.profile
    assert isinstance(profile, Docker)
    here = {str(path): str(path) for path in dict.fromkeys((job.working_folder, job.run))}
    options = ["--name", job.name, "--init", "--ipc=host", "--workdir", str(job.working_folder)]
    for inside, source in (here | profile.mounts).items():
        only = ":ro" * source.endswith(":ro")
        options += ["--volume", f"{source.removesuffix(':ro')}:{inside}{only}"]
    limits = {"--gpus": profile.gpus, "--cpus": profile.cpus, "--memory": profile.memory and profile.memory.lower()}
    options += [part for name, value in limits.items() if value is not None for part in (name, str(value).rstrip("ib"))]
    options += [part for name in profile.secrets for part in ("--env", name)]
    return [*options, profile.container, "bash", str(job.folder / file_name(profile))]


def _manifest(job: Job, profile: Kubernetes) -> str:
    """Return a ConfigMap with what is sent and a RayJob that runs it."""
    many = profile.nodes > 1
    settings = ["cluster.type=ray", "cluster.address=auto"] if many else []
    script = "\n".join(["#!/bin/bash", f"# {job.line}", *_start(job, *settings), 'exec "${command[@]}"', ""])
    sent = {"job.sh": script} | ({RECIPE: job.recipe} if job.recipe is not None else {})
    metadata = {"name": job.name} | ({"namespace": profile.namespace} if profile.namespace else {})
    head = _pod(job, profile, "ray-head", gpus=0 if many else profile.gpus)
    cluster: JsonObject = {
        "rayVersion": profile.ray_version,
        "authOptions": {"mode": "token"},  # the operator makes the token and gives it to all pods
        # Where there are workers, the head has only the run's controller, and ranks and engines go to the workers.
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"} if many else {}, "template": {"spec": head}},
    }
    if many:
        count = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), profile.nodes)
        pod = _pod(job, profile, "ray-worker", gpus=profile.gpus)
        worker = {"groupName": "ranks", **count, "rayStartParams": {}, "template": {"spec": pod}}
        cluster["workerGroupSpecs"] = [worker]
    spec = {
        "entrypoint": f"bash {_SENT}/job.sh", "backoffLimit": profile.retries, "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 3600, "rayClusterSpec": cluster,
    }  # fmt: skip
    return _yaml(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": sent},
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec},
    )


def _pod(job: Job, profile: Kubernetes, name: str, gpus: int) -> dict[str, object]:
    volumes: list[JsonObject] = [
        {"name": "sent", "configMap": {"name": job.name}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": profile.shared_memory.rstrip("B")}},
    ]
    mounts: list[JsonObject] = [
        {"name": "sent", "mountPath": _SENT, "readOnly": True}, {"name": "memory", "mountPath": "/dev/shm"},
    ]  # fmt: skip
    for number, (inside, claim) in enumerate(profile.mounts.items()):
        only = {"readOnly": True} if claim.endswith(":ro") else {}
        volumes.append(
            {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim.removesuffix(":ro"), **only}}
        )
        mounts.append({"name": f"claim-{number}", "mountPath": inside, **only})
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"} | profile.environment
    resources = {"cpu": str(profile.cpus), "memory": profile.memory.rstrip("B")} | (
        {"nvidia.com/gpu": gpus} if gpus else {}
    )
    container: JsonObject = {
        "name": name, "image": profile.container,
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": {"limits": resources, "requests": dict(resources)}, "volumeMounts": mounts,
    }  # fmt: skip
    if profile.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in profile.secrets]
    pod: JsonObject = {"containers": [container], "volumes": volumes}
    if gpus:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # InfiniBand pins memory
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if profile.node_selector:
        pod["nodeSelector"] = profile.node_selector
    if profile.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in profile.image_pull_secrets]
    return pod


def _task(job: Job, profile: SkyPilot) -> str:
    """Return a task of SkyPilot. The working folder is copied to the machine, without files that git ignores."""
    resources = {
        "infra": profile.infra, "accelerators": profile.gpus, "cpus": profile.cpus, "memory": profile.memory,
        "use_spot": profile.spot or None, "image_id": profile.container and f"docker:{profile.container}",
    }  # fmt: skip
    mounts: JsonObject = {inside: {"source": bucket, "mode": "MOUNT"} for inside, bucket in profile.mounts.items()}
    if job.recipe is not None:
        mounts[f"{_SENT}/{RECIPE}"] = str(job.folder / RECIPE)
    task = {
        "name": job.name, "workdir": str(job.working_folder),
        "resources": {name: value for name, value in resources.items() if value is not None},
        "file_mounts": mounts, "run": "\n".join([*_start(job), 'exec "${command[@]}"', ""]),
    }  # fmt: skip
    return _yaml({name: value for name, value in task.items() if value})


def _yaml(*documents: dict[str, object]) -> str:
    yaml, stream = YAML(), StringIO()
    yaml.width, yaml.default_flow_style = 4096, False
    yaml.representer.ignore_aliases = lambda *_: True
    yaml.dump_all([_literal(document) for document in documents], stream)
    return stream.getvalue()


def _literal(value: object) -> object:
    """Return the values with texts of several lines as literal blocks, so that scripts stay readable."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return LiteralScalarString(value) if isinstance(value, str) and "\n" in value else value


def sent_recipe(profile: Profile, folder: Path) -> str:
    """Return the path of the recipe that is sent, where the job runs."""
    return str(folder / RECIPE) if profile.sees_folder else f"{_SENT}/{RECIPE}"
