import builtins
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.show.runs import evaluation_values, train_values
from whet.base.errors import ConfigError, WhetError
from whet.config import load
from whet.config.issues import RecipeError
from whet.metrics.sinks import OpenSinks, Sink, SinkConfig
from whet.metrics.sinks.base import SINKS
from whet.metrics.sinks.jsonl import FILE, JSONLSink, read_metrics
from whet.metrics.sinks.mlflow import MlflowSink
from whet.metrics.sinks.prometheus import PrometheusSink
from whet.metrics.sinks.swanlab import SwanlabSink
from whet.metrics.sinks.tensorboard import TensorBoardSink
from whet.metrics.sinks.trackio import TrackioSink
from whet.metrics.sinks.wandb import WandbSink
from whet.run.recipe import Recipe
from whet.show.console import ConsoleSink, ConsoleWriter


def test_every_registered_name_is_a_sink():
    for path in SINKS.values():
        module, _, name = path.partition(":")
        assert issubclass(getattr(importlib.import_module(module), name), SinkConfig)


def test_a_folder_of_tensorboard_that_is_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"tensorboard can't be written: .* or its file system is read-only"):
        TensorBoardSink().open(tmp_path, {"name": "x"})


def test_tensorboard_has_the_numbers_and_hides_repeated_steps(tmp_path):
    sink = TensorBoardSink().open(tmp_path, {"name": "x"})
    for step in range(1, 6):
        sink.write(step, {"loss": float(step), "run/device": "cpu", "kl": float("nan")})
    sink.close()
    sink = TensorBoardSink().open(tmp_path, {"name": "x"}, resume_step=3)
    sink.write(4, {"loss": 39.0})
    sink.write(4, {"loss": 40.0})  # a step's times are written again at its end
    sink.finish_step(4)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 40)]


@pytest.mark.parametrize(
    ("sink", "package", "extra"),
    [
        (TensorBoardSink(), "torch.utils.tensorboard", "tensorboard"),
        (WandbSink(), "wandb", "wandb"),
        (MlflowSink(), "mlflow.tracking", "mlflow"),
        (TrackioSink(), "trackio", "trackio"),
        (SwanlabSink(), "swanlab", "swanlab"),
        (PrometheusSink(), "prometheus_client", "prometheus"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(tmp_path, monkeypatch, sink, package, extra):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == package:
            raise ModuleNotFoundError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(WhetError, match=rf"whet\[{extra}\]"):
        sink.open(tmp_path, {})


def test_all_sinks_are_written_and_closing_closes_the_rest_when_one_fails(tmp_path):
    closed = []

    class Broken(Sink):
        def write(self, step, values, kind="train"): ...

        def close(self):
            raise OSError("disk gone")

    class Recording(Broken):
        def write(self, step, values, kind="train"):
            values.clear()  # which changes nothing for the others

        def close(self):
            closed.append(True)

    jsonl = JSONLSink().open(tmp_path, {})
    sinks = OpenSinks([Recording(), Broken(), jsonl])
    sinks.write(1, {"loss": 1.0})
    with pytest.raises(OSError, match="disk gone"):
        sinks.close()
    assert closed == [True]
    assert read_metrics(tmp_path / FILE)[0]["loss"] == 1.0


@pytest.mark.parametrize("method", ["write", "finish_step", "close"])
def test_a_sink_of_which_a_call_would_run_nothing_is_refused(tmp_path: Path, method: str) -> None:
    async def unawaited(self: object, *args: object) -> None: ...

    def yielding(self: object, *args: object) -> Iterator[None]:
        yield

    def none(self: object, *args: object) -> None: ...

    for function, words in ((unawaited, "is `async`"), (yielding, "contains `yield`")):
        sink = type("Own", (Sink,), {"write": none, method: function})

        class Config(SinkConfig):
            def open(self, folder: Path, recipe: dict[str, Any], resume_step: int | None = None) -> Sink:
                return sink()  # noqa: B023

        with pytest.raises(ConfigError, match=rf"Own\.{method} \(.*test_sinks.py:\d+\) {words}"):
            OpenSinks.of([Config()], tmp_path, {})


def test_a_config_that_opens_anything_but_a_sink_is_named_with_its_place(tmp_path: Path) -> None:
    class Config(SinkConfig):
        def open(self, folder: Path, recipe: dict[str, Any], resume_step: int | None = None) -> Sink:
            return None  # type: ignore[return-value]

    with pytest.raises(
        ConfigError, match=r"Config\.open \(.*test_sinks.py:\d+\) must return an open sink, .* not None"
    ):
        OpenSinks.of([Config()], tmp_path, {})


def test_sinks_that_opened_are_closed_when_a_later_one_does_not_open(tmp_path):
    closed = []

    class Good(SinkConfig):
        def open(self, folder, recipe, resume_step=None):
            class Opened(Sink):
                def write(self, step, values, kind="train"): ...

                def close(self):
                    closed.append(True)

            return Opened()

    class Bad(SinkConfig):
        def open(self, folder, recipe, resume_step=None):
            raise WhetError("no")

    with pytest.raises(WhetError):
        OpenSinks.of([Good(), Bad()], tmp_path, {})
    assert closed == [True]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {}])
def test_without_a_real_terminal_a_step_is_one_plain_line(tmp_path, monkeypatch, environment):
    monkeypatch.setenv("TERM", environment.get("TERM", "xterm-256color"))
    out = io.StringIO()
    console = Console(file=out, force_terminal=bool(environment) or None, width=60)
    writer = ConsoleWriter(ConsoleSink(), console, tmp_path, {"steps": 20})
    writer.write(0, {"run/device": "cpu"})
    writer.write(1, train_values(1))
    writer.write(1, evaluation_values(0.25) | {"evaluation/low": 0.2, "evaluation/high": 0.3}, "evaluation")
    writer.close()
    facts, first, second = out.getvalue().splitlines()
    assert facts == f"{tmp_path.name}: cpu"
    assert re.match(r"\d\d:\d\d:\d\d step 1/20  reward 0.1  accuracy 10.0%", first)
    assert "800 tokens/s" in first
    assert "step 1/20  evaluation: accuracy 25.0% (n=200, 95% 20.0 to 30.0%)" in second
    assert "\x1b" not in out.getvalue()


def test_no_color_leaves_the_live_display_without_colours(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    writer = ConsoleWriter(
        ConsoleSink(live=True), Console(file=out, force_terminal=True, width=80, height=24), tmp_path, {}
    )
    writer.write(1, train_values(1))
    writer.close()
    assert "reward" in out.getvalue()
    assert "38;2;" not in out.getvalue()
    assert "\x1b[38" not in out.getvalue()


def test_a_sink_that_is_named_twice_is_refused():
    with pytest.raises(RecipeError, match="wandb is named twice"):
        load(Recipe, "quickstart", ["sinks=[console,wandb,wandb]"])
