"""The scripts and manifests of launch profiles, checked without Slurm and Kubernetes."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from whet.base.errors import ConfigError
from whet.cluster.config import RayClusterConfig
from whet.config import load
from whet.launch.job import Job
from whet.launch.profiles import KINDS
from whet.launch.scripts import docker_options, render
from whet.run.recipe import Recipe

ROOT = Path(__file__).parents[2]

# Fields of the ray.io/v1 API, from KubeRay's reference.
FIELDS = {
    "job": {
        "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata",
        "clusterSelector", "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId",
        "submissionMode", "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished",
        "shutdownAfterJobFinishes", "suspend",
    },
    "cluster": {
        "headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions",
        "headServiceAnnotations", "suspend", "managedBy", "gcsFaultToleranceOptions", "authOptions",
    },
    "head": {"serviceType", "headService", "enableIngress", "resources", "labels", "rayStartParams", "template"},
    "workers": {
        "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds", "resources",
        "labels", "rayStartParams", "template", "scaleStrategy", "suspend",
    },
}  # fmt: skip


Calls = dict[str, list[list[str]]]


def job_of(profile: dict[str, Any], *words: str, run: Path = Path("/runs/a b"), trains: bool = True) -> Job:
    """Return a job of ``whet train`` with a profile."""
    checked = KINDS[profile["kind"]].model_validate(profile)
    there = str(run) if checked.sees_folder else f"{profile['folder']}/{run.name}"
    return Job(
        command=("train", *words), sent=("train", *words, "--folder", there), run=run, folder=run / "launch" / "1",
        working_folder=Path.cwd(), profile_name="p", profile=checked, again=("resume", there) if trains else (),
        recipe="steps: 3\n", trains=trains, saves=True,
    )  # fmt: skip


def slurm(
    folder: Path, *words: str, nodes: int = 2, ends: int = 0, variables: dict[str, str] | None = None, **profile: Any
) -> tuple[subprocess.CompletedProcess[str], Calls]:
    """Run the script with stand-ins for Slurm, Ray and whet; return its process and the arguments of each call. The
    stand-in of srun runs its command on each node, the one of Ray the command after ``--`` on the first node; the one
    of whet exits with the code ``ends``."""
    run = folder / "runs" / "a b"
    (run / "launch" / "1").mkdir(parents=True, exist_ok=True)
    calls = folder / "calls"
    calls.mkdir()
    names = " ".join(f"node-{7 + number}" for number in range(nodes))
    stand_ins = {
        "scontrol": f'[ "$1" = show ] && printf "%s\\n" {names}',
        "squeue": 'echo "${JOB_STATE:-RUNNING}"',
        "getent": 'echo "10.1.2.3 STREAM node-7"; echo "10.1.2.3 DGRAM"',
        "srun": 'while [[ $1 == -* ]]; do shift; done; [ "$1" = getent ] && exec "$@"; code=0\n'
        f'for node in $(seq 0 {nodes - 1}); do SLURM_NODEID=$node "$@" || code=$?; done; exit $code',
        "ray": 'while [ "$1" != -- ]; do shift; done; shift; if [ "$SLURM_NODEID" = 0 ]; then "$@"; fi',
        "whet": f"exit {ends}",
    }
    for name, body in stand_ins.items():
        recorded = (
            f'printf "%q " "${{RAY_AUTH_MODE-}}" "${{RAY_AUTH_TOKEN-}}" "$@" >>{calls}/{name}; echo >>{calls}/{name}'
        )
        (folder / name).write_text(f"#!/bin/bash\n{recorded}\n{body}\n")
        (folder / name).chmod(0o755)
    path = {"setup": f"PATH={folder}:$PATH"}
    job = job_of({"kind": "slurm", "nodes": nodes, "gpus": 8, **path, **profile}, *words, run=run)
    given = {"SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "41234"}
    done = subprocess.run(
        ["bash", "-c", render(job)],
        env={"PATH": f"{folder}:{os.environ['PATH']}"} | given | (variables or {}),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )
    return done, {file.name: [shlex.split(line) for line in file.read_text().splitlines()] for file in calls.iterdir()}


def arguments_of(calls: Calls, name: str) -> list[list[str]]:
    """Return the arguments of each call of a command, without the token."""
    return [call[2:] for call in calls.get(name, [])]


def cluster_of(words: list[str]) -> RayClusterConfig:
    """Return the cluster settings of a ``whet train`` command; all its settings exist."""
    assert words[0] == "train"
    cluster = load(Recipe, words[1], [word for word in words[2:] if "=" in word and word[0] != "-"]).value.cluster
    assert isinstance(cluster, RayClusterConfig)
    return cluster


def test_the_slurm_script_starts_ray_on_all_nodes_and_trains_on_the_first(tmp_path: Path) -> None:
    done, calls = slurm(tmp_path, "quickstart", "steps=5")
    assert done.returncode == 0, done.stderr
    assert [call[:5] for call in arguments_of(calls, "ray")] == [
        ["symmetric-run", "--address", "10.1.2.3:21234", "--min-nodes", "2"] for _ in range(2)
    ]
    (train,) = arguments_of(calls, "whet")
    assert train[2:5] == ["steps=5", "--folder", str(tmp_path / "runs/a b")]
    assert cluster_of(train).address == "10.1.2.3:21234"
    assert "--nodelist=node-8" in arguments_of(calls, "srun")[0], "the first node may resolve its name to 127.0.1.1"
    assert arguments_of(calls, "getent") == [["ahostsv4", "node-7"]]
    assert "--cpu-bind=none" in arguments_of(calls, "srun")[1], "else the task of a node is bound to one core"


def test_a_given_address_needs_no_look_up(tmp_path: Path) -> None:
    _, calls = slurm(tmp_path, "quickstart", variables={"HEAD_ADDRESS": "10.9.9.9"})
    assert cluster_of(arguments_of(calls, "whet")[0]).address == "10.9.9.9:21234"
    assert "getent" not in calls


def test_one_node_needs_no_ray(tmp_path: Path) -> None:
    done, calls = slurm(tmp_path, "quickstart", nodes=1)
    assert done.returncode == 0, done.stderr
    assert arguments_of(calls, "whet") == [["train", "quickstart", "--folder", str(tmp_path / "runs/a b")]]
    assert "ray" not in calls


def test_gpus_of_the_engines_are_hidden_from_ray_on_the_first_node(tmp_path: Path) -> None:
    _, calls = slurm(tmp_path, "quickstart", engine_gpus=6, variables={"SLURM_GPUS_ON_NODE": "8"})
    options = [call[call.index("2") + 1 : call.index("--")] for call in arguments_of(calls, "ray")]
    assert options == [["--num-gpus=2"], []]
    assert "--gpu-bind=none" in arguments_of(calls, "srun")[1]


def test_a_run_whose_time_is_over_is_queued_again_and_resumed(tmp_path: Path) -> None:
    run = tmp_path / "runs/a b"
    run.mkdir(parents=True)
    (run / "recipe.yaml").touch()
    _, calls = slurm(
        tmp_path, "quickstart", "steps=5", ends=143, variables={"SLURM_RESTART_COUNT": "1"}, time="4:00:00"
    )
    assert arguments_of(calls, "scontrol")[-1] == ["requeue", "41234"]
    assert not (run / "launch/1/exit_code").exists()
    settings = ["checkpoints.before=10m", "cluster.type=ray", "cluster.address=10.1.2.3:21234"]
    assert arguments_of(calls, "whet") == [["resume", str(run), *settings]]


@pytest.mark.parametrize(
    ("ends", "state", "restarts"),
    [(0, "RUNNING", 0), (1, "RUNNING", 0), (143, "COMPLETING", 0), (143, "CANCELLED", 0), (143, "RUNNING", 20)],
)
def test_a_run_that_ended_or_was_cancelled_is_not_queued_again(
    tmp_path: Path, ends: int, state: str, restarts: int
) -> None:
    variables = {"JOB_STATE": state, "SLURM_RESTART_COUNT": str(restarts)}
    done, calls = slurm(tmp_path, "quickstart", ends=ends, variables=variables)
    assert done.returncode == ends
    assert ["requeue", "41234"] not in arguments_of(calls, "scontrol")
    assert (tmp_path / "runs/a b/launch/1/exit_code").read_text() == f"{ends}\n"


def test_a_run_without_a_recipe_in_its_folder_starts_from_scratch(tmp_path: Path) -> None:
    _, calls = slurm(tmp_path, "quickstart", variables={"SLURM_RESTART_COUNT": "1"})
    assert arguments_of(calls, "whet")[0][0] == "train"


def test_the_profile_becomes_options_of_sbatch() -> None:
    profile = {
        "kind": "slurm", "account": "me", "partition": "gpu", "gpus": 8, "cpus": 64, "memory": "500GiB",
        "time": "1-00:00:00", "options": ["--qos=high"], "container": "whet.sqsh",
        "mounts": {"/data": "/lustre/data:ro"}, "environment": {"NOTE": "it's here"},
    }  # fmt: skip
    script = render(job_of(profile, "quickstart"))
    lines = set(script.splitlines())
    options = ("account=me", "partition=gpu", "nodes=1", "gpus-per-node=8", "cpus-per-task=64", "mem=500G", "qos=high")
    assert {f"#SBATCH --{option}" for option in (*options, "time=1-00:00:00", "requeue")} <= lines
    assert '#SBATCH --output="/runs/a b/launch/1/log.txt"' in lines
    assert "export NOTE='it'\"'\"'s here'" in lines
    assert "--container-image=whet.sqsh" in script
    assert "/lustre/data:/data:ro" in script
    assert "export PATH=" not in script, "the container has another Python"


def test_a_command_that_runs_on_one_node_refuses_a_profile_of_more() -> None:
    with pytest.raises(ConfigError, match="profile p has nodes = 2, and whet train runs on one"):
        render(job_of({"kind": "slurm", "nodes": 2}, "x", trains=False))


def test_the_names_of_jobs_are_short_and_differ_where_runs_do() -> None:
    names = [
        job_of(
            {"kind": "local"}, run=Path("/runs", f"sft-of-eight-billion-filtered-{rate}-of-a-long-sweep-{seed}")
        ).name
        for rate in ("1e-5", "1e-6")
        for seed in (1, 2)
    ]
    assert len(set(names)) == 4
    assert all(re.fullmatch("whet-sft-of-eight-billion-filtered-[a-z0-9-]*[a-z0-9]", name) for name in names)
    assert all(len(name) <= 47 for name in names), "KubeRay refuses longer ones"
    assert job_of({"kind": "local"}, run=Path("/runs/first")).name == "whet-first-1"


def test_docker_gets_mounts_limits_and_the_names_of_secrets() -> None:
    profile = {
        "kind": "docker", "container": "whet:cpu", "gpus": 2, "cpus": 4.0, "memory": "32Gi", "secrets": ["HF_TOKEN"],
        "mounts": {"/data": "/srv/data:ro"},
    }  # fmt: skip
    job = job_of(profile, "quickstart")
    words = docker_options(job)
    pairs = list(itertools.pairwise(words))
    for pair in (("--gpus", "2"), ("--cpus", "4.0"), ("--memory", "32g"), ("--env", "HF_TOKEN"),
                 ("--volume", "/srv/data:/data:ro"), ("--volume", "/runs/a b:/runs/a b")):  # fmt: skip
        assert pair in pairs
    assert words[-3:] == ["whet:cpu", "bash", "/runs/a b/launch/1/script.sh"]
    assert f"# runs in: docker run --detach {shlex.join(words)}\n" in render(job), "so --dry-run prints it"


def test_skypilot_gets_resources_buckets_and_the_recipe() -> None:
    profile = {
        "kind": "skypilot", "infra": "aws/us-east-1", "gpus": "H100:8", "spot": True, "container": "whet:cuda",
        "mounts": {"/runs": "s3://my-runs"}, "folder": "/runs", "setup": "pip install whet",
    }  # fmt: skip
    task = YAML(typ="safe").load(render(job_of(profile, "/etc/whet/recipe.yaml")))
    assert task["resources"] == {
        "infra": "aws/us-east-1", "accelerators": "H100:8", "use_spot": True, "image_id": "docker:whet:cuda",
    }  # fmt: skip
    assert task["file_mounts"]["/runs"] == {"source": "s3://my-runs", "mode": "MOUNT"}
    assert task["file_mounts"]["/etc/whet/recipe.yaml"] == "/runs/a b/launch/1/recipe.yaml"
    assert "whet resume '/runs/a b'" in task["run"], "after a preemption the run continues from its bucket"
    assert "pip install whet\n" in task["run"]


def test_the_slurm_script_makes_a_new_token_for_each_job(tmp_path: Path) -> None:
    tokens = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _, calls = slurm(tmp_path / name, "quickstart")
        assert {(call[0], call[1]) for call in calls["ray"]} == {("token", calls["ray"][0][1])}
        tokens.append(calls["ray"][0][1])
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 and set(token) <= set("0123456789abcdef") for token in tokens)


@pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")
def test_ray_takes_the_options_of_the_slurm_script(tmp_path: Path) -> None:
    """In another process, because these modules must not be imported into the process of other tests."""
    _, calls = slurm(tmp_path, "quickstart", engine_gpus=1, variables={"SLURM_GPUS_ON_NODE": "8"})
    options, _ = (call[1 : call.index("--")] for call in arguments_of(calls, "ray"))
    code = (
        "import sys; from ray.scripts.symmetric_run import curate_and_validate_ray_start_args as left; "
        "print(left(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == "['--num-gpus=7']\n"
    )  # the other options are for `ray start`, and differ between head and workers


@pytest.fixture
def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The files that are sent to Kubernetes and the job of two workers."""
    profile = {
        "kind": "kubernetes", "container": "registry.example.com/whet:0.1.0", "nodes": 2, "gpus": 8, "cpus": 64,
        "memory": "512Gi", "folder": "/shared/runs", "mounts": {"/shared": "whet-shared", "/models": "whet-models:ro"},
        "namespace": "lab", "secrets": ["tokens"], "environment": {"HF_HOME": "/shared/huggingface"},
        "node_selector": {"nvidia.com/gpu.present": "true"},
    }  # fmt: skip
    sent, job = YAML(typ="safe").load_all(render(job_of(profile, "/etc/whet/recipe.yaml")))
    assert (sent["kind"], job["apiVersion"], job["kind"]) == ("ConfigMap", "ray.io/v1", "RayJob")
    assert sent["metadata"] == job["metadata"] == {"name": "whet-a-b-1", "namespace": "lab"}
    return sent["data"], job["spec"]


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def gpus(pod: dict[str, Any]) -> int:
    return pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)


Manifest = tuple[dict[str, Any], dict[str, Any]]


def test_the_manifest_for_kubernetes_has_only_fields_that_exist(manifest: Manifest) -> None:
    sent, job = manifest
    cluster = job["rayClusterSpec"]
    parts = {"job": [job], "cluster": [cluster], "head": [cluster["headGroupSpec"]]}
    parts["workers"] = cluster["workerGroupSpecs"]
    for name, entries in parts.items():
        for part in entries:
            assert set(part) <= FIELDS[name], name
    assert cluster["authOptions"] == {"mode": "token"}
    assert job["entrypoint"] == "bash /etc/whet/job.sh"
    assert sent["recipe.yaml"] == "steps: 3\n"
    assert "--folder '/shared/runs/a b' cluster.type=ray cluster.address=auto)" in sent["job.sh"]
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints-cuda.txt").read_text()


def test_the_pods_of_the_manifest_share_image_and_folders(manifest: Manifest) -> None:
    every = pods(manifest[1])
    containers = [pod["containers"][0] for pod in every]
    assert len({container["image"] for container in containers}) == 1
    assert all(pod["volumes"] == every[0]["volumes"] for pod in every)
    assert all(container["volumeMounts"] == containers[0]["volumeMounts"] for container in containers)
    assert all({"name": "HF_HOME", "value": "/shared/huggingface"} in container["env"] for container in containers)
    assert all(container["envFrom"] == [{"secretRef": {"name": "tokens"}}] for container in containers)
    mounts = {mount["mountPath"]: mount["name"] for mount in containers[0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in every[0]["volumes"]}
    assert set(volumes) == set(mounts.values())
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/models"]]["persistentVolumeClaim"] == {"claimName": "whet-models", "readOnly": True}


def test_the_head_needs_no_gpu_where_there_are_workers(manifest: Manifest) -> None:
    _, job = manifest
    head, worker = pods(job)
    assert (gpus(head), gpus(worker)) == (0, 8)
    assert "securityContext" not in head["containers"][0]
    assert worker["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2


def test_sizes_are_written_as_kubernetes_reads_them() -> None:
    profile = {"kind": "kubernetes", "container": "c", "folder": "/f", "memory": "64GiB", "shared_memory": "8GB"}
    _, job = YAML(typ="safe").load_all(render(job_of(profile)))
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "64Gi"
    assert pod["volumes"][1]["emptyDir"]["sizeLimit"] == "8G"


def test_a_job_of_one_node_has_its_gpus_in_the_head() -> None:
    profile = {"kind": "kubernetes", "container": "x", "gpus": 4, "folder": "/shared"}
    sent, job = YAML(typ="safe").load_all(render(job_of(profile, "x")))
    assert gpus(job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]) == 4
    assert "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]
    assert "cluster." not in sent["data"]["job.sh"]
