"""Commands as jobs of stand-in schedulers that queue, preempt, limit, fail, forget and hang."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grids import grid, taking_turns
from tests.launch.conftest import Schedulers, whet
from whet.launch.job import Record, launches, next_folder
from whet.launch.schedulers import SCHEDULERS
from whet.launch.submit import states
from whet.processes.machine import start_time

TRAIN = ("train", "quickstart", "steps=3", "--folder", "runs/a b")
KINDS = {"here": "local", "box": "docker", "cluster": "slurm", "pods": "kubernetes", "cloud": "skypilot"}


def record(run: str = "runs/a b") -> Record:
    return Record.read(launches(Path(run))[-1])


def phase(run: str = "runs/a b") -> str:
    each = record(run)
    return states([each])[each].phase


@pytest.mark.parametrize(("profile", "code"), grid([*KINDS], [0, 3]))
def test_an_attached_job_prints_its_output_and_passes_its_exit_code_on(
    schedulers: Schedulers, profile: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    schedulers.set("finish", str(code))
    passed_on = code if profile != "cloud" else min(code, 1)  # SkyPilot reports no exit code
    assert whet(*TRAIN, "--run", profile) == passed_on
    printed = capfd.readouterr()
    assert "whet train" in printed.out
    assert "trained" in printed.out
    assert "ended" in printed.err
    (call,) = schedulers.calls()
    assert call[0] == "train"
    assert call[1].endswith(".yaml")
    assert call[3].endswith("/a b")
    assert record().kind == KINDS[profile]


@pytest.mark.parametrize("profile", KINDS)
def test_a_detached_job_is_queued_runs_and_ends(
    schedulers: Schedulers, profile: str, capfd: pytest.CaptureFixture[str]
) -> None:
    schedulers.set("hold")
    assert whet(*TRAIN, "--batch", profile) == 0
    printed = capfd.readouterr().out
    job = record()
    assert f"job {job.id} was submitted" in printed
    assert "whet runs" in printed
    if profile != "here":
        assert phase() == "queued"
        assert whet("runs") == 0
        assert "queued" in capfd.readouterr().out
    schedulers.clear("hold")
    schedulers.wait(lambda: phase() == "running" and schedulers.calls())
    assert whet("runs", "--json") == 0
    (run,) = json.loads(capfd.readouterr().out)
    assert (run["job"]["id"], run["job"]["kind"], run["job"]["state"]) == (job.id, KINDS[profile], "running")
    schedulers.set("finish", "0")
    schedulers.wait(lambda: phase() == "ended")
    assert states([job])[job].code == 0


@pytest.mark.parametrize("profile", KINDS)
def test_what_was_sent_is_kept_with_the_run(schedulers: Schedulers, profile: str) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    Path("code.py").write_text("first\n")
    for words in (["init", "-q"], ["add", "code.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    Path("code.py").write_text("second\n")
    Path("new.py").touch()
    schedulers.set("finish", "0")
    assert whet(*TRAIN, "--batch", profile) == 0
    folder = launches(Path("runs/a b"))[-1]
    script = next(path for path in folder.iterdir() if path.name in ("script.sh", "manifest.yaml", "task.yaml"))
    assert "# whet train quickstart steps=3" in script.read_text() or profile == "cloud"
    assert "steps: 3" in (folder / "recipe.yaml").read_text()
    difference = (folder / "work.diff").read_text()
    assert "-first\n+second\n" in difference
    assert "# not tracked by git: new.py" in difference
    assert "pydantic==" in (folder / "packages.txt").read_text()
    job = record()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert job.commits[str(Path.cwd())] == head
    assert job.command == list(TRAIN)


@pytest.mark.parametrize("profile", KINDS)
def test_a_dry_run_prints_what_would_be_sent_and_sends_nothing(
    schedulers: Schedulers, profile: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert whet(*TRAIN, "--batch", profile, "--dry-run") == 0
    dry = capfd.readouterr().out
    assert not Path("runs").exists()
    schedulers.set("finish", "0")
    assert whet(*TRAIN, "--batch", profile) == 0
    folder = launches(Path("runs/a b"))[-1]
    kept = next(path for path in folder.iterdir() if path.name in ("script.sh", "manifest.yaml", "task.yaml"))
    assert kept.read_text() == dry


@pytest.mark.parametrize("profile", taking_turns(KINDS, ["here", "cluster"]))
def test_an_interrupt_without_a_terminal_cancels_the_job(schedulers: Schedulers, profile: str) -> None:
    process = attached(profile)
    assert process.stderr is not None
    while "running" not in process.stderr.readline():
        assert process.poll() is None
    schedulers.wait(schedulers.calls)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "was asked to end" in errors
    schedulers.wait(lambda: phase() == "ended")
    assert states([record()]).popitem()[1].code != 0


@pytest.mark.usefixtures("hangups_are_heard")
def test_a_terminal_that_is_closed_leaves_the_job(schedulers: Schedulers) -> None:
    process = attached("cluster")
    assert process.stderr is not None
    while "running" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (129, "ended by SIGHUP.\n")
    assert not list(schedulers.folder.glob("*.cancel"))
    launching = record()
    SCHEDULERS[launching.kind].cancel(launching)
    schedulers.wait(lambda: phase() == "ended")


def attached(profile: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "whet", *TRAIN, "--run", profile]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def test_an_interrupt_at_a_terminal_asks_first(
    schedulers: Schedulers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from whet.cli import launching

    assert whet(*TRAIN, "--batch", "cluster") == 0
    schedulers.wait(lambda: phase() == "running")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("whet.launch.attached.follow", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    assert launching._attach(record()) == 130
    assert "cancel job 4711? [y/N]" in asked[0]
    assert "job 4711 continues" in capsys.readouterr().err
    assert not (schedulers.folder / "4711.cancel").exists()
    monkeypatch.setattr("builtins.input", lambda text: "y")
    assert launching._attach(record()) == 130
    schedulers.wait(lambda: phase() == "ended")


def test_a_preempted_job_is_queued_again_and_resumes(schedulers: Schedulers) -> None:
    assert whet(*TRAIN, "--batch", "cluster") == 0
    schedulers.wait(schedulers.calls)
    schedulers.set("4711.preempt")
    schedulers.wait(lambda: len(schedulers.calls()) == 2)
    assert schedulers.calls()[1] == ["resume", str(Path("runs/a b").absolute())]
    assert phase() == "running"
    assert "saved" in record().log.read_text()
    assert record().log.read_text().index("whet train") < record().log.read_text().index("whet resume")
    schedulers.set("finish", "0")
    schedulers.wait(lambda: phase() == "ended")
    assert states([record()]).popitem()[1].code == 0


@pytest.mark.slow
def test_a_run_that_saves_before_its_time_is_over_is_queued_again(
    schedulers: Schedulers, tiny_model: Path, tmp_path: Path
) -> None:
    """The whole of whet: with an hour to save in and half an hour of time, each job makes one step."""
    (tmp_path / "bin" / "whet").unlink()
    schedulers.set("limit", "1800")
    small = (
        f"model={tiny_model}", "steps=2", "sampling.max_new_tokens=4", "sampling.max_prompt_tokens=1024",
        "evaluation.enabled=false", "rollouts.prompts_per_step=2", "checkpoints.every=0",
        "learner.precision=float32", "generator.dtype=float32",
    )  # fmt: skip
    assert whet("train", "quickstart", *small, "--folder", "runs/a b", "--batch", "limited") == 0
    schedulers.wait(lambda: phase() == "ended")
    log = record().log.read_text()
    assert states([record()]).popitem()[1].code == 0, log
    assert json.loads((schedulers.folder / "4711.job").read_text())["restarts"] == 1
    assert "the job's time is over in less than 3600 s" in log
    lines = [json.loads(line) for line in Path("runs/a b/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]


def test_a_job_without_accounts_ends_with_the_code_that_its_script_wrote(schedulers: Schedulers) -> None:
    schedulers.set("no_accounts")
    schedulers.set("finish", "7")
    assert whet(*TRAIN, "--run", "cluster") == 7


def test_a_killed_job_is_lost_where_its_scheduler_forgets_it(
    schedulers: Schedulers, capfd: pytest.CaptureFixture[str]
) -> None:
    assert whet(*TRAIN, "--batch", "here") == 0
    schedulers.wait(schedulers.calls)
    os.killpg(int(record().id), signal.SIGKILL)
    schedulers.wait(lambda: phase() == "lost")
    assert whet("runs") == 0
    assert "lost" in capfd.readouterr().out


def test_a_process_id_that_was_used_again_is_of_another_job(tmp_path: Path) -> None:
    process = os.getpid()
    facts = {"host": os.uname().nodename, "started": start_time(process)}
    jobs = [
        Record(str(process), "local", "here", {}, [], "", "", 0.0, extra=extra, folder=tmp_path / name)
        for name, extra in (("old", facts | {"started": "1"}), ("new", facts))
    ]
    assert [state.phase for state in states(jobs).values()] == ["lost", "running"]


def test_a_copy_of_a_launch_is_not_one(tmp_path: Path) -> None:
    for name in ("10", "9", "9 (copy)"):
        (tmp_path / "launch" / name).mkdir(parents=True)
        (tmp_path / "launch" / name / "job.json").touch()
    assert [folder.name for folder in launches(tmp_path)] == ["9", "10"]
    assert next_folder(tmp_path).name == "11"


def test_checkouts_of_one_name_have_a_difference_each(schedulers: Schedulers, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(Path("/a/code"), "1", "first"), (Path("/b/code"), "2", "second"), (Path("/c/more"), "3", "third")]
    monkeypatch.setattr("whet.launch.job._checkouts", lambda *_: found)
    schedulers.set("finish", "0")
    assert whet(*TRAIN, "--batch", "here") == 0
    texts = {path.name: path.read_text() for path in launches(Path("runs/a b"))[-1].glob("*.diff")}
    assert texts == {"code.diff": "first", "code-2.diff": "second", "more.diff": "third"}


def test_an_attached_job_that_is_lost_is_an_error(schedulers: Schedulers) -> None:
    process = attached("here")
    schedulers.wait(lambda: launches(Path("runs/a b")) and schedulers.calls())
    os.killpg(int(record().id), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "was lost: its scheduler does not list it" in errors


@pytest.mark.parametrize("profile", ["box", "cluster", "pods", "cloud"])
def test_a_scheduler_that_hangs_is_named(
    schedulers: Schedulers, profile: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert whet(*TRAIN, "--batch", profile) == 0
    schedulers.wait(schedulers.calls)
    monkeypatch.setattr("whet.launch.scheduler.DEADLINE", 0.3)
    schedulers.set("hang")
    assert whet("runs") == 0
    printed = capfd.readouterr().out
    assert "unknown" in printed
    assert f"the state of jobs of kind {KINDS[profile]} is unknown:" in printed
    assert "did not answer within" in printed
    schedulers.clear("hang")


def test_a_scheduler_that_fails_or_is_missing_is_named(
    schedulers: Schedulers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "work" / "whet.toml").open("a") as file:
        file.write('[profiles.closed]\nextends = "cluster"\npartition = "closed"\n')
        file.write('[profiles.bare]\nextends = "box"\ncontainer = "missing"\n')
    assert whet(*TRAIN, "--batch", "closed") == 1
    assert "Invalid partition name specified" in capfd.readouterr().err
    assert whet(*TRAIN, "--batch", "bare") == 1
    assert "pull access denied" in capfd.readouterr().err
    kept = sorted(Path("runs").rglob("*"))
    for program, profile in (("sky", "cloud"), ("sbatch", "cluster")):
        (tmp_path / "bin" / program).unlink()
        assert whet("train", "quickstart", "--batch", profile) == 1
        assert f"{program} is not installed here" in capfd.readouterr().err
    assert sorted(Path("runs").rglob("*")) == kept, "nothing was written"
    assert not launches(Path("runs/a b")), "nothing was launched"


def test_other_commands_run_as_jobs_with_the_same_words(schedulers: Schedulers) -> None:
    schedulers.set("finish", "0")
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/recipe.yaml").touch()
    assert whet("resume", "runs/first", "steps=9", "--run=cluster") == 0
    assert whet("resume", "runs/first", "--run", "cluster") == 0
    assert [each.name for each in launches(Path("runs/first"))] == ["1", "2"]
    assert whet("eval", "runs/first", "--limit", "3", "--run", "here") == 0
    assert whet("prep", "blend.yaml", "--out", "x", "--run", "here") == 0
    assert whet("pipeline", "rlhf", "-c", "tiny", "--run", "here") == 0
    first = str(Path("runs/first").absolute())
    assert schedulers.calls() == [
        ["resume", first, "steps=9"],
        ["resume", first],
        ["eval", "runs/first", "--limit", "3"],
        ["prep", "blend.yaml", "--out", "x"],
        ["pipeline", "rlhf", "-c", "tiny"],
    ]


def test_wrong_options_are_refused_before_anything_is_sent(
    schedulers: Schedulers, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        ((*TRAIN, "--run", "here", "--batch", "here"), "choose one of them"),
        ((*TRAIN, "--dry-run"), "add --run or --batch PROFILE"),
        ((*TRAIN, "--run", "her"), "Did you mean 'here'?"),
        (("train", "quickstart", "stesp=3", "--run", "here"), "Did you mean 'steps'?"),
        (("resume", "runs/none", "--run", "here"), "runs/none"),
    ):
        assert whet(*words) == 2
        assert message in capfd.readouterr().err
    assert schedulers.calls() == []
