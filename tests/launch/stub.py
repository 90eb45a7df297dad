"""Stand-ins for sbatch, squeue, sacct, scancel, scontrol, srun, docker, kubectl, sky and whet, which behave like the
real ones. ``install`` links this file under these names. Their state is in the folder ``$STUB``:

- ``hold``: jobs stay queued; ``hang``: no tool answers; ``no_accounts``: sacct fails
- ``ID.preempt``: the job is preempted and queued again; ``ID.cancel``, ``ID.requeue``: as Slurm's own commands write
- ``limit``: seconds of every Slurm job
- ``finish``: the stand-in of whet ends with the exit code in it; until then it trains
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun", "docker", "kubectl", "sky", "whet")
HERE = Path(os.environ.get("STUB", "."))
GRACE = 20.0  # seconds between SIGTERM and SIGKILL


def install(folder: Path) -> None:
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        (folder / name).chmod(0o755)


def jobs() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in HERE.glob("*.job")}


def write(id: str, **changes: Any) -> None:
    path = HERE / f"{id}.job"
    values = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.with_suffix(".new").write_text(json.dumps(values))
    path.with_suffix(".new").replace(path)


def taken(name: str) -> bool:
    """Remove a request, if it was made."""
    try:
        (HERE / name).unlink()
    except FileNotFoundError:
        return False
    return True


def start(id: str, **values: Any) -> None:
    """Write a job and start its controller, which outlives this process."""
    write(id, state="PENDING", restarts=0, code=None, **values)
    words = [sys.executable, __file__, "controller", id]
    null = subprocess.DEVNULL
    subprocess.Popen(words, stdin=null, stdout=null, stderr=null, start_new_session=True)


def controller(id: str) -> None:
    """Run a job until it has ended, as often as it is queued again."""
    while True:
        write(id, state="PENDING")
        while (HERE / "hold").exists():
            time.sleep(0.05)
            if taken(f"{id}.cancel"):
                write(id, state="CANCELLED", code=0)
                return
        outcome, code = run(id)
        if outcome == "REQUEUED":
            write(id, restarts=jobs()[id]["restarts"] + 1)
            continue
        write(id, state=outcome, code=code)
        return


def run(id: str) -> tuple[str, int]:
    """Run a job once and return how it ended."""
    job = jobs()[id]
    limit = float((HERE / "limit").read_text()) if (HERE / "limit").exists() else None
    variables = {"SLURM_JOB_ID": id, "SLURM_RESTART_COUNT": str(job["restarts"]), "SLURM_JOB_NUM_NODES": "1"}
    if limit is not None:
        variables["SLURM_JOB_END_TIME"] = str(int(time.time() + limit))
    (HERE / f"{id}.steps").unlink(missing_ok=True)
    began = time.monotonic()
    write(id, state="RUNNING")  # before the script, which may ask for it
    with open(job["log"], "ab") as log:
        script = subprocess.Popen(
            job["words"], cwd=job["cwd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **(variables if job["slurm"] else {})},
        )  # fmt: skip
        while script.poll() is None:
            time.sleep(0.05)
            if taken(f"{id}.requeue"):
                end(id, script, signal.SIGKILL)
                return "REQUEUED", 0
            if taken(f"{id}.preempt"):
                write(id, state="COMPLETING")
                end(id, script, signal.SIGTERM)
                return "REQUEUED", 0
            if taken(f"{id}.cancel"):
                write(id, state="COMPLETING")
                return "CANCELLED", end(id, script, signal.SIGTERM)
            if limit is not None and time.monotonic() - began > limit:
                end(id, script, signal.SIGTERM)
                return "TIMEOUT", 0
    return ("COMPLETED" if script.returncode == 0 else "FAILED"), script.returncode


def end(id: str, script: "subprocess.Popen[bytes]", number: signal.Signals) -> int:
    """Signal the steps of a job, as Slurm does, or its only process; kill all after the grace time."""
    steps = HERE / f"{id}.steps"
    groups = [int(line) for line in steps.read_text().splitlines()] if steps.exists() else [script.pid]
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)
    with suppress(subprocess.TimeoutExpired):
        script.wait(GRACE if number == signal.SIGTERM else 0.01)
    for group in (*groups, script.pid):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return script.wait()


def sbatch(words: list[str]) -> None:
    text = Path(words[-1]).read_text()
    options = dict(re.findall(r'^#SBATCH --([\w-]+)=?"?(.*?)"?$', text, re.MULTILINE))
    if options.get("partition") == "closed":
        sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
    id = str(4711 + len(jobs()))
    assert options["open-mode"] == "append"
    assert "requeue" in options
    start(id, slurm=True, words=["bash", words[-1]], log=options["output"], cwd=options["chdir"])
    print(id)


def squeue(words: list[str]) -> None:
    if "--me" not in words:  # the job's own script asks for its state
        print(jobs()[words[words.index("--jobs") + 1]]["state"])
        return
    for id, job in jobs().items():
        if job["code"] is None:  # a job that has ended is forgotten after a while
            print(f"{id}|{job['state']}")


def sacct(words: list[str]) -> None:
    if (HERE / "no_accounts").exists():
        sys.exit("Slurm accounting storage is disabled")
    asked = next(word for word in words if word.startswith("--jobs=")).removeprefix("--jobs=").split(",")
    for id, job in jobs().items():
        if id in asked:
            by = " by 1000" if job["state"] == "CANCELLED" else ""
            print(f"{id}|{job['state']}{by}|{job['code'] or 0}:0")


def scancel(words: list[str]) -> None:
    (HERE / f"{words[0]}.cancel").touch()


def scontrol(words: list[str]) -> None:
    assert words[0] == "requeue"
    (HERE / f"{words[1]}.requeue").touch()
    time.sleep(60)  # the job ends meanwhile


def srun(words: list[str]) -> None:
    while words[0].startswith("--"):
        words.pop(0)
    steps = HERE / f"{os.environ['SLURM_JOB_ID']}.steps"
    noted = ["sh", "-c", 'echo $$ >> "$0"; exec "$@"', str(steps), *words]  # before the step does anything
    sys.exit(subprocess.Popen(noted, start_new_session=True).wait() % 256)


def docker(words: list[str]) -> None:
    if words[0] == "run":
        script = words[words.index("bash") + 1]
        if words[words.index("bash") - 1] == "missing":
            sys.exit("docker: Error response from daemon: pull access denied for missing")
        id = f"{len(jobs()) + 1:064x}"[::-1]
        start(id, slurm=False, words=["bash", script], log=str(HERE / f"{id}.log"), cwd=str(HERE))
        print(id)
        return
    id = next((id for id in jobs() if id.startswith(words[-1])), None)
    if id is None:
        sys.exit(f"Error response from daemon: No such container: {words[-1]}")
    names = {"PENDING": "created", "RUNNING": "running", "COMPLETING": "running"}
    if words[0] == "inspect":
        job = jobs()[id]
        print(names.get(job["state"], "exited"), job["code"] or 0)
    elif words[0] == "logs":
        follow(id)
    elif words[0] == "kill":
        (HERE / f"{id}.cancel").touch()


def kubectl(words: list[str]) -> None:
    words = [word for word in words if not word.startswith(("--context=", "--namespace="))]
    if words[0] == "create":
        from ruamel.yaml import YAML

        sent, job = YAML(typ="safe").load_all(Path(words[-1]).read_text())
        name = job["metadata"]["name"]
        (HERE / name).mkdir()
        for file, text in sent["data"].items():
            (HERE / name / file).write_text(text.replace("/etc/whet", str(HERE / name)))
        script = job["spec"]["entrypoint"].replace("/etc/whet", str(HERE / name)).split()
        start(name, slurm=False, words=script, log=str(HERE / f"{name}.log"), cwd=str(HERE))
    elif words[0] == "get":
        if words[2] not in jobs():
            sys.exit(f'Error from server (NotFound): rayjobs.ray.io "{words[2]}" not found')
        state, code = jobs()[words[2]]["state"], jobs()[words[2]]["code"]
        status = {"PENDING": {"jobDeploymentStatus": "Initializing"}}.get(
            state, {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
        )
        if code is not None:
            message = "" if code == 0 else f"Job entrypoint command failed with exit code {code}, last logs follow"
            ended = "Complete" if code == 0 else "Failed"
            result = "SUCCEEDED" if code == 0 else "FAILED"
            status = {"jobDeploymentStatus": ended, "jobStatus": result, "message": message}
        print(json.dumps({"status": status}))
    elif words[0] == "logs":
        follow(words[-1].removeprefix("job/"))
    elif words[0] == "delete":
        (HERE / f"{words[-1].removeprefix('configmap/')}.cancel").touch()


def sky(words: list[str]) -> None:
    if words[:2] == ["jobs", "launch"]:
        from ruamel.yaml import YAML

        task = YAML(typ="safe").load(Path(words[-1]).read_text())
        id = str(len(jobs()) + 1)
        script = task["run"]
        for there, source in task.get("file_mounts", {}).items():
            inside = HERE / f"{id}{Path(there).suffix}"
            if isinstance(source, str):
                inside.write_text(Path(source).read_text())
            script = script.replace(there, str(inside))
        start(
            id, slurm=False, words=["bash", "-c", script], log=str(HERE / f"{id}.log"), cwd=str(HERE), name=task["name"]
        )
        print(f"Managed job {id} submitted")
    elif words[:2] == ["jobs", "queue"]:
        names = {"COMPLETED": "SUCCEEDED", "COMPLETING": "RECOVERING"}
        rows = [{"job_id": int(id), "job_name": job["name"], "status": names.get(job["state"], job["state"])}
                for id, job in jobs().items()]  # fmt: skip
        print("Fetching jobs...", json.dumps(rows), sep="\n")
    elif words[:2] == ["jobs", "cancel"]:
        (HERE / f"{words[-1]}.cancel").touch()
    elif words[:2] == ["jobs", "logs"]:
        follow(words[-1])


def follow(id: str) -> None:
    """Print a job's output until the job has ended. Fails for a job that has not begun."""
    position = 0
    while True:
        job = jobs()[id]
        if job["state"] == "PENDING":
            sys.exit("the job has not begun")
        text = Path(job["log"]).read_text()
        print(text[position:], end="", flush=True)
        position = len(text)
        if job["code"] is not None:
            return
        time.sleep(0.05)


def whet(words: list[str]) -> None:
    """Train until the file ``finish`` appears; at SIGTERM save and end."""

    def stop(*_: object) -> None:
        print("saved", flush=True)
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    print("whet", *words, flush=True)
    with open(HERE / "calls", "a") as calls:
        calls.write(json.dumps(words) + "\n")
    if words[0] == "train":
        assert Path(words[1]).is_file(), "the recipe was sent"
        folder = Path(words[words.index("--folder") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").touch()
    while not (HERE / "finish").exists():
        time.sleep(0.05)
    print("trained", flush=True)
    sys.exit(int((HERE / "finish").read_text() or 0))


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    if (HERE / "hang").exists() and name not in ("controller", "whet", "srun"):
        time.sleep(600)
    globals()[name](rest[0] if name == "controller" else rest)
