"""A stand-in for the processes of stages: it writes what a stage leaves, at once, and counts."""

import json
from pathlib import Path

from whet.pipeline.commands import Command
from whet.pipeline.config import load_pipeline
from whet.pipeline.execute import Outcome, execute
from whet.pipeline.graph import build
from whet.pipeline.job import Job
from whet.pipeline.plan import selected

PIPELINE = """\
stages:
  result:
    type: eval
    recipe: quickstart
    model: tuned.best
    against: sft.best
  tuned:
    type: train
    recipe: dpo
    model: sft.best
    data: {folder}/pairs.jsonl
  sft:
    type: train
    recipe: sft
    model: base.model
    data: {folder}/rows.jsonl
    settings:
      steps: 3
  base: {{type: random_model}}
"""


class StandIn:
    """Plays stages. ``stop``: an exception that is raised inside of the stage with the name ``at``."""

    def __init__(self, stop: BaseException | None = None, at: str = "") -> None:
        self.stop, self.at = stop, at
        self.ran: list[str] = []  # the stages, with the word ``resume`` for runs that are resumed

    def __call__(self, command: Command) -> None:
        words = list(command.words)
        place = command.output.parent if command.output else Path(words[-1])
        if "--out" in words:
            place = Path(words[words.index("--out") + 1])
        if words[0] == "random_model":
            place = Path(words[1])
        self.ran.append("resume " * (words[0] == "resume") + place.name)
        place.mkdir(exist_ok=True)
        if words[0] in ("train", "resume"):
            (place / "recipe.yaml").write_text("model: {}")
        if self.stop is not None and place.name == self.at:
            raise self.stop
        if words[0] in ("train", "resume"):
            checkpoint = place / "checkpoints" / "step-000003"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "manifest.json").write_text((place.parent / f"{place.name}.yaml").read_text())
            (place / "metrics.jsonl").write_text(json.dumps({"step": 3, "kind": "train"}) + "\n")
        elif command.output:
            command.output.write_text(json.dumps({"accuracy": 0.5, "low": 0.4, "high": 0.6}))
        else:
            (place / "model.safetensors").write_text(str(words))


def write(folder: Path, text: str = PIPELINE) -> Path:
    """Write a pipeline and the rows that it names; return its file."""
    for name in ("rows", "pairs"):
        if not (folder / f"{name}.jsonl").exists():
            (folder / f"{name}.jsonl").write_text("{}\n")
    file = folder / "pipeline.yaml"
    file.write_text(text.format(folder=folder))
    return file


def jobs(file: Path, *overrides: str, profile: str | None = None) -> dict[str, Job]:
    return build(load_pipeline(str(file), overrides, profile), file.parent / "out")


def play(file: Path, *overrides: str, run: StandIn | None = None, start: str | None = None, only: str | None = None,
         force: bool = False) -> tuple[list[str], list[Outcome]]:  # fmt: skip
    """Run a pipeline with a stand-in; return the stages that ran, and the outcome of all."""
    run, stages = run or StandIn(), jobs(file, *overrides)
    chosen = selected(stages, start, only)
    outcomes = execute(stages, file.parent / "out", chosen, force=force, say=lambda _: None, run=run)
    return run.ran, outcomes
