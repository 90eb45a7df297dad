"""The schedulers that take jobs: this machine, Docker, Slurm, Kubernetes and SkyPilot."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from whet.base.strict_json import JsonObject
from whet.launch.job import LOG, Job, Record
from whet.launch.profiles import Kubernetes, SkyPilot
from whet.launch.scheduler import SUBMIT, Scheduler, SchedulerError, State, ask
from whet.launch.scripts import docker_options, file_name
from whet.processes.machine import start_time


class LocalScheduler(Scheduler):
    """Processes of this machine. A job is a session of processes that outlives the terminal."""

    poll = 0.2

    def submit(self, job: Job) -> tuple[str, dict[str, object]]:
        with (job.folder / LOG).open("wb") as log:
            words = ["bash", str(job.folder / file_name(job.profile))]
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=dict(os.environ)
            )
        return str(process.pid), {"started": start_time(process.pid), "host": os.uname().nodename}

    def states(self, records: Sequence[Record]) -> dict[str, State]:
        answers: dict[str, State] = {}
        for each in records:
            with suppress(ChildProcessError, ValueError):
                os.waitpid(int(each.id), os.WNOHANG)  # of a process that this one started
            if each.extra.get("host") != os.uname().nodename and each.exit_code() is None:
                answers[each.id] = State("unknown", f"it was started on {each.extra.get('host')}")
            elif (started := start_time(int(each.id))) and started == each.extra.get("started"):
                answers[each.id] = State("running")
        return answers

    def cancel_words(self, record: Record) -> list[str]:
        return ["kill", "-TERM", "--", f"-{record.id}"]

    def cancel(self, record: Record) -> None:
        if self.states([record]).get(record.id) == State("running"):
            with suppress(ProcessLookupError):
                os.killpg(int(record.id), signal.SIGTERM)


class DockerScheduler(Scheduler):
    """Containers of this machine."""

    program = "docker"
    poll = 1.0
    writes_log = False
    gone = ("is not running", "No such")
    _PHASES: ClassVar[Mapping[str, Any]] = {"created": "queued", "exited": "ended", "dead": "ended"}

    def submit(self, job: Job) -> tuple[str, JsonObject]:
        printed = ask("docker", "run", "--detach", *docker_options(job), times=SUBMIT)
        return printed.split()[-1][:12] if printed.split() else job.name, {}

    def states(self, records: Sequence[Record]) -> dict[str, State]:
        answers: dict[str, State] = {}
        for each in records:
            words = ("docker", "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", each.id)
            if printed := ask(*words, missing=("No such",)).split():
                phase = self._PHASES.get(printed[0], "running")
                answers[each.id] = State(phase, printed[0], int(printed[1]) if phase == "ended" else None)
        return answers

    def cancel_words(self, record: Record) -> list[str]:
        return ["docker", "kill", "--signal", "TERM", record.id]

    def follow_words(self, record: Record) -> list[str]:
        return ["docker", "logs", "--follow", record.id]


class SlurmScheduler(Scheduler):
    """Slurm, by ``squeue`` for jobs that wait or run and ``sacct`` for jobs that have ended."""

    program = "sbatch"
    gone = ("Invalid job id",)
    _QUEUED: ClassVar = (
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
    )
    _RUNNING: ClassVar = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

    def submit(self, job: Job) -> tuple[str, dict[str, object]]:
        printed = ask("sbatch", "--parsable", str(job.folder / file_name(job.profile)), times=SUBMIT)
        id = printed.strip().split("\n")[-1].split(";")[0]
        if not id.isdecimal():
            raise SchedulerError(f"sbatch printed no job id: {printed.strip()[-300:]!r}")
        return id, {}

    def states(self, records: Sequence[Record]) -> dict[str, State]:
        ids = {each.id for each in records}
        listed = ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T")
        states = {id: self._state(word, None) for id, word in _fields(listed) if id in ids}
        ended = {each.id: each for each in records if each.id not in states or states[each.id].final}
        if not ended:
            return states
        try:
            listed = ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(sorted(ended))}",
                         "--format=JobIDRaw,State,ExitCode")  # fmt: skip
        except SchedulerError:  # many clusters keep no accounts; the job's script wrote how it ended
            listed = ""
        for id, word, code in _fields(listed, 3):
            if id in ended:
                states[id] = self._state(word.split()[0], _slurm_code(code))
        for id, each in ended.items():
            if id in states and states[id].phase == "ended" and states[id].code is None:
                states[id] = State("ended", states[id].detail, each.exit_code())
        return states

    def _state(self, word: str, code: int | None) -> State:
        if word in self._QUEUED or word in self._RUNNING:
            return State("queued" if word in self._QUEUED else "running", word)
        return State("ended", word, 0 if word == "COMPLETED" else code or (None if code is None else 1))

    def cancel_words(self, record: Record) -> list[str]:
        return ["scancel", record.id]


def _fields(text: str, count: int = 2) -> list[list[str]]:
    return [line.strip().split("|") for line in text.splitlines() if line.count("|") == count - 1]


def _slurm_code(text: str) -> int:
    """Return the exit code of Slurm's ``CODE:SIGNAL``."""
    code, _, number = text.partition(":")
    return 128 + int(number) if number not in ("", "0") else int(code)


class KubernetesScheduler(Scheduler):
    """A RayJob of KubeRay, by ``kubectl``."""

    program = "kubectl"
    writes_log = False
    _PHASES: ClassVar[Mapping[str, Any]] = {
        "Running": "running", "Complete": "ended", "Failed": "ended", "ValidationFailed": "ended",
    }  # fmt: skip

    def submit(self, job: Job) -> tuple[str, JsonObject]:
        assert isinstance(job.profile, Kubernetes)
        place = _place(job.profile.model_dump())
        ask(
            "kubectl",
            *place,
            "create",
            "--filename",
            str(job.folder / file_name(job.profile)),
            times=SUBMIT,
        )
        return job.name, {}

    def states(self, records: Sequence[Record]) -> dict[str, State]:
        answers: dict[str, State] = {}
        for each in records:
            words = ("kubectl", *_place(each.profile), "get", "rayjob", each.id, "--output=json")
            if printed := ask(*words, missing=("NotFound", "not found")):
                answers[each.id] = self._state(json.loads(printed).get("status") or {})
        return answers

    def _state(self, status: JsonObject) -> State:
        deployment, word = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
        phase = self._PHASES.get(deployment, "queued")
        if phase != "ended":
            return State(phase, word or deployment)
        match = re.search(r"exit code (\d+)", status.get("message", ""))
        code = 0 if word == "SUCCEEDED" else int(match[1]) if match else 1
        return State("ended", word or deployment, code)

    def cancel_words(self, record: Record) -> list[str]:
        words = ["kubectl", *_place(record.profile), "delete", "--ignore-not-found", "--wait=false"]
        return [*words, f"rayjob/{record.id}", f"configmap/{record.id}"]

    def follow_words(self, record: Record) -> list[str]:
        return ["kubectl", *_place(record.profile), "logs", "--follow", f"job/{record.id}"]


def _place(profile: Mapping[str, object]) -> list[str]:
    return [f"--{name}={profile[name]}" for name in ("context", "namespace") if profile.get(name)]


class SkyPilotScheduler(Scheduler):
    """Managed jobs of SkyPilot, by ``sky jobs``."""

    program = "sky"
    poll = 15.0
    writes_log = False

    def submit(self, job: Job) -> tuple[str, JsonObject]:
        assert isinstance(job.profile, SkyPilot)
        secrets = [part for name in job.profile.secrets for part in ("--secret", name)]
        task = str(job.folder / file_name(job.profile))
        ask("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, task, times=SUBMIT)
        ids = [str(each["job_id"]) for each in self._queue() if each.get("job_name") == job.name]
        if not ids:
            raise SchedulerError(f"sky jobs launch ended well, and sky jobs queue lists no job {job.name}")
        return max(ids, key=int), {}

    def _queue(self) -> list[dict[str, object]]:
        printed = ask("sky", "jobs", "queue", "--output", "json", times=4)
        try:
            return list(json.loads(printed[printed.index("[") :]))
        except ValueError:
            raise SchedulerError(f"sky jobs queue printed no JSON: {printed.strip()[:200]!r}") from None

    def states(self, records: Sequence[Record]) -> dict[str, State]:
        return {str(each["job_id"]): self._state(str(each["status"])) for each in self._queue()}

    def _state(self, status: str) -> State:
        word = status.rpartition(".")[2]
        if word in ("PENDING", "SUBMITTED", "STARTING", "RECOVERING"):
            return State("queued", word)
        if word in ("RUNNING", "CANCELLING"):
            return State("running", word)
        return State("ended", word, 0 if word == "SUCCEEDED" else 1)

    def cancel_words(self, record: Record) -> list[str]:
        return ["sky", "jobs", "cancel", "--yes", record.id]

    def follow_words(self, record: Record) -> list[str]:
        return ["sky", "jobs", "logs", "--follow", record.id]


SCHEDULERS: dict[str, Scheduler] = {
    "local": LocalScheduler(), "docker": DockerScheduler(), "slurm": SlurmScheduler(),
    "kubernetes": KubernetesScheduler(), "skypilot": SkyPilotScheduler(),
}  # fmt: skip
