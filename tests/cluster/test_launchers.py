"""The examples that start Ray on many nodes, checked without Slurm and Kubernetes."""

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from ruamel.yaml import YAML

from whet.cluster.config import RayClusterConfig
from whet.config import load
from whet.run.recipe import Recipe

EXAMPLES = Path(__file__).parents[2] / "examples"

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


def slurm(
    folder: Path, *arguments: str, nodes: int = 2, ends: int = 0, **variables: str
) -> tuple[subprocess.CompletedProcess[str], Calls]:
    """Run the script with stand-ins for Slurm, Ray and whet; return its process and the arguments of each call. The
    stand-in of srun runs its command on each node, the one of Ray the command after ``--`` on the first node; the one
    of whet exits with the code ``ends``."""
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
    job = {"SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "41234"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh"), *arguments],
        env={"PATH": f"{folder}:{os.environ['PATH']}"} | job | variables,
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
    done, calls = slurm(tmp_path, "quickstart", "steps=5", "--folder", "runs/a b")
    assert done.returncode == 0, done.stderr
    assert [call[:5] for call in arguments_of(calls, "ray")] == [
        ["symmetric-run", "--address", "10.1.2.3:21234", "--min-nodes", "2"] for _ in range(2)
    ]
    (train,) = arguments_of(calls, "whet")
    assert train[2:5] == ["steps=5", "--folder", "runs/a b"]
    assert cluster_of(train).address == "10.1.2.3:21234"
    assert "--nodelist=node-8" in arguments_of(calls, "srun")[0], "the first node may resolve its name to 127.0.1.1"
    assert arguments_of(calls, "getent") == [["ahostsv4", "node-7"]]
    assert "--cpu-bind=none" in arguments_of(calls, "srun")[1], "else the task of a node is bound to one core"


def test_one_node_or_a_given_address_needs_no_look_up(tmp_path: Path) -> None:
    for folder, nodes, given, address in (
        ("one", 1, {}, "127.0.0.1"),
        ("two", 2, {"HEAD_ADDRESS": "10.9.9.9"}, "10.9.9.9"),
    ):
        (tmp_path / folder).mkdir()
        _, calls = slurm(tmp_path / folder, "quickstart", "--folder=run", nodes=nodes, **given)
        assert cluster_of(arguments_of(calls, "whet")[0]).address == f"{address}:21234"
        assert "getent" not in calls


def test_gpus_of_the_engines_are_hidden_from_ray_on_the_first_node(tmp_path: Path) -> None:
    _, calls = slurm(tmp_path, "quickstart", "--folder", "run", ENGINE_GPUS="6", SLURM_GPUS_ON_NODE="8")
    options = [call[call.index("2") + 1 : call.index("--")] for call in arguments_of(calls, "ray")]
    assert options == [["--num-gpus=2"], []]
    assert "--gpu-bind=none" in arguments_of(calls, "srun")[1]


def test_a_run_whose_time_is_over_is_queued_again_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "runs/a b").mkdir(parents=True)
    (tmp_path / "runs/a b/recipe.yaml").touch()
    words = ("quickstart", "steps=5", "--folder", "runs/a b")
    done, calls = slurm(tmp_path, *words, ends=143, SLURM_RESTART_COUNT="1")
    assert done.returncode == 143
    assert arguments_of(calls, "scontrol")[-1] == ["requeue", "41234"]
    assert arguments_of(calls, "whet") == [["resume", "runs/a b", "cluster.type=ray", "cluster.address=10.1.2.3:21234"]]


@pytest.mark.parametrize(("ends", "state"), [(0, "RUNNING"), (1, "RUNNING"), (143, "COMPLETING"), (143, "CANCELLED")])
def test_a_run_that_ended_or_was_cancelled_is_not_queued_again(tmp_path: Path, ends: int, state: str) -> None:
    done, calls = slurm(tmp_path, "quickstart", "--folder", "run", ends=ends, JOB_STATE=state)
    assert done.returncode == ends
    assert ["requeue", "41234"] not in arguments_of(calls, "scontrol")


def test_a_run_without_a_recipe_in_its_folder_starts_from_scratch(tmp_path: Path) -> None:
    _, calls = slurm(tmp_path, "quickstart", "--folder", "run", SLURM_RESTART_COUNT="1")
    assert arguments_of(calls, "whet")[0][0] == "train"


def test_a_run_is_resumed_by_hand(tmp_path: Path) -> None:
    _, calls = slurm(tmp_path, "resume", "run", "steps=9")
    assert arguments_of(calls, "whet")[0][:3] == ["resume", "run", "steps=9"]


def test_the_slurm_script_makes_a_new_token_for_each_job(tmp_path: Path) -> None:
    tokens = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _, calls = slurm(tmp_path / name, "quickstart", "--folder", "run")
        assert {(call[0], call[1]) for call in calls["ray"]} == {("token", calls["ray"][0][1])}
        tokens.append(calls["ray"][0][1])
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 and set(token) <= set("0123456789abcdef") for token in tokens)


@pytest.mark.parametrize("words", [(), ("quickstart",)])
def test_the_slurm_script_without_a_recipe_or_a_folder_prints_its_usage(tmp_path: Path, words: tuple[str]) -> None:
    done, calls = slurm(tmp_path, *words)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr
    assert calls == {}


@pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")
def test_ray_takes_the_options_of_the_slurm_script(tmp_path: Path) -> None:
    """In another process, because these modules must not be imported into the process of other tests."""
    _, calls = slurm(tmp_path, "quickstart", "--folder", "run", ENGINE_GPUS="1", SLURM_GPUS_ON_NODE="8")
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
def manifest() -> tuple[dict[str, Any], Recipe]:
    """The job for Kubernetes and the recipe that it trains."""
    recipe, job = YAML(typ="safe").load_all((EXAMPLES / "kuberay.yaml").read_text())
    assert (recipe["kind"], job["apiVersion"], job["kind"]) == ("ConfigMap", "ray.io/v1", "RayJob")
    return job["spec"], load_text(recipe["data"]["run.yaml"])


def load_text(text: str) -> Recipe:
    with TemporaryDirectory() as folder:
        (Path(folder) / "run.yaml").write_text(text)
        return load(Recipe, Path(folder) / "run.yaml").value


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def gpus(pod: dict[str, Any]) -> int:
    return pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)


def test_the_manifest_for_kubernetes_has_only_fields_that_exist(manifest: tuple[dict[str, Any], Recipe]) -> None:
    job, recipe = manifest
    cluster = job["rayClusterSpec"]
    parts = {"job": [job], "cluster": [cluster], "head": [cluster["headGroupSpec"]]}
    parts["workers"] = cluster["workerGroupSpecs"]
    for name, entries in parts.items():
        for part in entries:
            assert set(part) <= FIELDS[name], name
    assert cluster["authOptions"] == {"mode": "token"}
    assert shlex.split(job["entrypoint"])[:3] == ["whet", "train", "/recipe/run.yaml"]
    assert f"ray=={cluster['rayVersion']}\n" in (EXAMPLES.parent / "constraints-cuda.txt").read_text()
    assert isinstance(recipe.cluster, RayClusterConfig)
    assert recipe.cluster.address == "auto"


def test_the_pods_of_the_manifest_share_image_and_folders(manifest: tuple[dict[str, Any], Recipe]) -> None:
    job, recipe = manifest
    every = pods(job)
    assert len({pod["containers"][0]["image"] for pod in every}) == 1
    assert all(pod["volumes"] == every[0]["volumes"] for pod in every)
    mounts = {mount["mountPath"]: mount["name"] for mount in every[0]["containers"][0]["volumeMounts"]}
    assert all(pod["containers"][0]["volumeMounts"] == every[0]["containers"][0]["volumeMounts"] for pod in every)
    volumes = {volume["name"]: volume for volume in every[0]["volumes"]}
    assert set(volumes) == set(mounts.values())
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert job["entrypoint"].split()[-1].startswith("/shared/")
    assert recipe.model.path.startswith("/models/")


def test_the_head_needs_no_gpu_and_the_workers_have_the_gpus_of_ranks_and_engines(
    manifest: tuple[dict[str, Any], Recipe],
) -> None:
    job, recipe = manifest
    head, *workers = pods(job)
    assert gpus(head) == 0
    assert recipe.generator.on_cluster
    replicas = [group["replicas"] for group in job["rayClusterSpec"]["workerGroupSpecs"]]
    taken = recipe.parallel.ranks + recipe.generator.replicas * recipe.generator.ranks
    assert sum(gpus(pod) * number for pod, number in zip(workers, replicas, strict=True)) == taken
