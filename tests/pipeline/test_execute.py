"""Stages that are up to date are not run again, changed ones and what depends on them are, and a kill loses nothing."""

import json
from pathlib import Path

import pytest

from tests.grids import taking_turns
from tests.pipeline.stand_in import PIPELINE, StandIn, jobs, play, write
from whet.base.errors import ConfigError, WhetError
from whet.config import RecipeError
from whet.pipeline.execute import planned
from whet.pipeline.plan import selected
from whet.pipeline.state import FILE, State

ALL = ["base", "sft", "sft.best", "tuned", "tuned.best", "result"]


class Killed(BaseException):
    """Ends a call at any place, as a kill does."""


def test_a_second_call_runs_nothing(tmp_path: Path) -> None:
    file = write(tmp_path)
    ran, outcomes = play(file)
    assert ran == ALL
    assert [each.name for each in outcomes] == ALL
    assert outcomes[-1].values == {"accuracy": 0.5, "low": 0.4, "high": 0.6}
    ran, outcomes = play(file)
    assert ran == []
    assert {each.action for each in outcomes} == {"up to date"}
    assert outcomes[-1].result.startswith("accuracy 50.0%")


def test_a_changed_setting_reruns_the_stage_and_what_reads_its_output(tmp_path: Path) -> None:
    file = write(tmp_path)
    play(file)
    stages = jobs(file, "stages.tuned.settings.seed=7")
    plan = planned(stages, tmp_path / "out", selected(stages, None, None))
    assert [(each.action, each.why) for each in plan[3:]] == [
        ("run", "seed was 0 and is 7"),
        ("run", "tuned runs before it"),
        ("run", "tuned.best runs before it"),
    ]
    ran, _ = play(file, "stages.tuned.settings.seed=7")
    assert ran == ["tuned", "tuned.best"], "the stand-in exports the same bytes, so nothing after it has changed"
    assert (tmp_path / "out/older/tuned-1/recipe.yaml").is_file()
    assert "seed: 7" in (tmp_path / "out/tuned.yaml").read_text()


def test_a_changed_file_reruns_the_stage_that_reads_it(tmp_path: Path) -> None:
    file = write(tmp_path)
    play(file)
    (tmp_path / "pairs.jsonl").write_text("{}\n{}\n")
    stages = jobs(file)
    plan = {each.name: each for each in planned(stages, tmp_path / "out", selected(stages, None, None))}
    assert plan["tuned"].why == f"its input {tmp_path}/pairs.jsonl changed"
    assert plan["sft"].action == "up to date"
    assert play(file)[0][0] == "tuned"
    (tmp_path / "out/base/model.safetensors").write_text("damaged")
    plan = {each.name: each for each in planned(stages, tmp_path / "out", selected(stages, None, None))}
    assert plan["base"].why == f"{tmp_path}/out/base/model.safetensors was changed"
    assert play(file)[0] == ["base"], "made again as it was"


def test_a_file_next_to_the_folder_is_an_input(tmp_path: Path) -> None:
    (tmp_path / "output.jsonl").write_text("{}\n")
    file = write(tmp_path, PIPELINE.replace("pairs.jsonl", "output.jsonl"))
    play(file)
    (tmp_path / "output.jsonl").write_text("{}\n{}\n")
    assert play(file)[0][0] == "tuned"


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = write(tmp_path / "a")
    play(file)
    text = file.read_text()
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()
    for name in ("rows.jsonl", "pairs.jsonl"):
        (tmp_path / "a" / name).write_text("{}\n")
    moved = tmp_path / "b/pipeline.yaml"
    assert moved.read_text() == text
    assert play(moved)[0] == []


def test_an_unfinished_run_is_resumed_and_other_stages_repeated(tmp_path: Path) -> None:
    file = write(tmp_path)
    with pytest.raises(WhetError, match="stage 'tuned': out of paper"):
        play(file, run=StandIn(WhetError("out of paper"), at="tuned"))
    assert play(file)[0] == ["resume tuned", "tuned.best", "result"]
    ran, _ = play(file, "stages.sft.settings.steps=4", run=StandIn())
    assert ran[0] == "sft", "begun with other settings, it starts from the beginning"


def test_other_settings_replace_an_unfinished_run(tmp_path: Path) -> None:
    file = write(tmp_path)
    with pytest.raises(WhetError):
        play(file, run=StandIn(WhetError("no"), at="sft"))
    assert play(file, "stages.sft.settings.steps=5")[0][0] == "sft"
    assert (tmp_path / "out/older/sft-1").is_dir()


@pytest.mark.parametrize("moment", taking_turns(range(19), range(0, 19, 3)))
def test_a_kill_at_any_write_loses_nothing(moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole writes happen or don't, because they are atomic."""
    file, write_state, count = write(tmp_path), State.write, iter(range(100))

    def dies(self: State, folder: Path) -> None:
        at = next(count)
        if at == moment and moment % 2:
            raise Killed
        write_state(self, folder)
        if at == moment:
            raise Killed

    monkeypatch.setattr(State, "write", dies)
    with pytest.raises(Killed):
        play(file)
    monkeypatch.undo()
    done = {name for name, record in State.read(tmp_path / "out").stages.items() if record.finished}
    after, outcomes = play(file)
    assert done.isdisjoint(name.removeprefix("resume ") for name in after), "what was finished is not run again"
    assert {each.name for each in outcomes if each.result} == set(ALL)
    assert play(file)[0] == []
    assert not (tmp_path / "out/older").exists()


@pytest.mark.parametrize("stage", ALL)
def test_a_kill_inside_of_a_stage_loses_only_that_stage(stage: str, tmp_path: Path) -> None:
    file = write(tmp_path)
    with pytest.raises(Killed):
        play(file, run=StandIn(Killed(), at=stage))
    resumed = f"resume {stage}" if stage in ("sft", "tuned") else stage
    assert play(file)[0] == [resumed, *ALL[ALL.index(stage) + 1 :]]


def test_parts_can_be_chosen(tmp_path: Path) -> None:
    file = write(tmp_path)
    with pytest.raises(
        ConfigError, match=r"stage 'sft\.best' needs stage 'sft', which is neither selected nor finished"
    ):
        play(file, only="tuned")
    assert play(file, only="base")[0] == ["base"]
    play(file)
    assert play(file, only="tuned")[0] == []
    assert play(file, only="tuned", force=True)[0] == ["tuned"]
    assert play(file, start="tuned", force=True)[0] == ["tuned", "tuned.best", "result"]
    with pytest.raises(ConfigError, match=r"--from tunde: no stage has this name\. Did you mean 'tuned'"):
        play(file, start="tunde")


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    file = write(tmp_path)
    (tmp_path / "out/sft").mkdir(parents=True)
    (tmp_path / "out/sft/thesis.txt").write_text("all of it")
    with pytest.raises(ConfigError, match=r"out/sft is not empty, and .*pipeline\.json has no record of it"):
        play(file)
    play(file, force=True)
    assert (tmp_path / "out/older/sft-1/thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize("name", ["base/thesis.txt", "base", "sft.best/thesis.txt", "sft.yaml"])
def test_force_keeps_what_is_not_of_the_pipeline(tmp_path: Path, name: str) -> None:
    file = write(tmp_path)
    (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "out" / name).write_text("all of it")
    with pytest.raises(ConfigError, match=r"pipeline\.json has no record of it; choose another --folder"):
        play(file)
    assert play(file, force=True)[0] == ALL
    first, _, rest = name.partition("/")
    assert (tmp_path / f"out/older/{first}-1" / rest).read_text() == "all of it"


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("all of it")
    with pytest.raises(WhetError, match=r"out can't be written: .*File exists"):
        play(write(tmp_path))


def test_a_stage_must_leave_the_folder_of_earlier_runs_alone(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"pipeline\.yaml:19: stages\.older\.type: older is the folder of earlier runs"
    ):
        jobs(write(tmp_path, PIPELINE.replace("base:", "older:").replace("base.model", "older.model")))


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    file = write(tmp_path)
    play(file)
    state = tmp_path / "out" / FILE
    written = state.read_text()
    for text, said in (
        ("{", ""),
        (written.replace('"seconds": ', '"seconds": "x", "was": '), "seconds: expected a num"),
    ):
        state.write_text(text)
        with pytest.raises(ConfigError, match=rf"pipeline\.json is damaged.*{said}"):
            play(file)


def test_the_state_is_small_and_holds_the_results(tmp_path: Path) -> None:
    play(write(tmp_path, PIPELINE))
    stages = json.loads((tmp_path / "out" / FILE).read_text())["stages"]
    assert stages["result"]["result"].startswith("accuracy 50.0%")
    assert stages["sft"]["settings"]["steps"] == 3
    assert stages["sft"]["inputs"].keys() == {"base.model", f"{tmp_path}/rows.jsonl"}
