"""The examples that start Ray on many nodes: as far as that can be checked without Slurm and Kubernetes."""

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from whet.cluster.config import RayClusterConfig
from whet.config import load
from whet.recipe import Recipe

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


def slurm(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run the script with stand-ins for Slurm and Ray; what it did, and the commands that would run on nodes."""
    calls = folder / "calls"
    stand_ins = {
        "scontrol": 'printf "node-7\\nnode-8\\n"',
        "srun": f'printf "%q " "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN" "$@" >>{calls}; echo >>{calls}; '
        'case "$*" in *hostname*) echo "10.1.2.3 172.17.0.1 ";; esac',
    }
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[7-8]"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh"), *arguments],
        env=environment | {"SLURM_JOB_NUM_NODES": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, [shlex.split(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def check_command(command: list[str]) -> None:
    """A command that trains on a Ray cluster, with settings that exist."""
    assert command[:3] == ["whet", "train", "quickstart"]
    overrides = [word for word in command[3:] if "=" in word]
    cluster = load(Recipe, "quickstart", overrides).value.cluster
    assert isinstance(cluster, RayClusterConfig)
    assert cluster.address is not None


def test_the_slurm_script_starts_ray_on_all_nodes_and_trains_on_the_first(tmp_path: Path) -> None:
    done, calls = slurm(tmp_path, "quickstart", "steps=5", "--folder", "runs/a b")
    assert done.returncode == 0, done.stderr
    command = calls[-1]
    assert command[command.index("--address") + 1] == "10.1.2.3:6379"
    assert command[command.index("--min-nodes") + 1] == "2"
    train = command[command.index("--") + 1 :]
    assert train[3:] == ["steps=5", "--folder", "runs/a b", "cluster.type=ray", "cluster.address=10.1.2.3:6379"]
    check_command(train)
    assert "--nodelist=node-7" in calls[0]


def test_the_slurm_script_makes_a_new_token_for_each_job(tmp_path: Path) -> None:
    tokens = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        _, calls = slurm(tmp_path / name, "quickstart")
        assert {(call[0], call[1]) for call in calls} == {("token", calls[0][1])}
        tokens.append(calls[0][1])
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 and set(token) <= set("0123456789abcdef") for token in tokens)


def test_the_slurm_script_without_a_recipe_says_how_it_is_used(tmp_path: Path) -> None:
    done, calls = slurm(tmp_path)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr
    assert calls == []


@pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")
def test_ray_takes_the_options_of_the_slurm_script(tmp_path: Path) -> None:
    """In another process: these modules must not be imported into that of the other tests."""
    _, calls = slurm(tmp_path, "quickstart")
    options = calls[-1][calls[-1].index("symmetric-run") + 1 : calls[-1].index("--")]
    code = (
        "import sys; from ray.scripts.symmetric_run import curate_and_validate_ray_start_args as left; "
        "print(left(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"  # what is left is for `ray start`, and differs between head and workers


def test_the_manifest_for_kubernetes_has_only_fields_that_exist() -> None:
    job: dict[str, Any] = YAML(typ="safe").load((EXAMPLES / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    parts = {"job": [job["spec"]], "cluster": [cluster], "head": [cluster["headGroupSpec"]]}
    parts["workers"] = cluster["workerGroupSpecs"]
    for name, found in parts.items():
        for part in found:
            assert set(part) <= FIELDS[name], name
    assert cluster["authOptions"] == {"mode": "token"}
    check_command(shlex.split(job["spec"]["entrypoint"]))


def test_the_pods_of_the_manifest_share_image_and_folder() -> None:
    cluster = YAML(typ="safe").load((EXAMPLES / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    assert all(pod["volumes"] == pods[0]["volumes"] for pod in pods)
    assert all(pod["containers"][0]["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}] for pod in pods)
