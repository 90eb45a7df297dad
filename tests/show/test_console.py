import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.show.runs import evaluation_values, train_values
from whet.base.progress import Progress
from whet.metrics.sinks.jsonl import JSONLSink
from whet.show.console import ConsoleSink, ConsoleWriter, plain_line
from whet.show.curves import Curve, plot
from whet.show.dashboard import Dashboard
from whet.show.facts import RunFacts
from whet.show.metric_catalog import CATALOG, PHASES, show
from whet.show.summary import print_summary


def drawn(dashboard, width, height):
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(dashboard)
    return capture.get().rstrip("\n").split("\n")


def dashboard_after(tmp_path, steps, **values):
    dashboard = Dashboard(
        tmp_path / "tiny", {"steps": 20, "model": {"name": "someone/Tiny-1M"}}, progress=Progress(lambda: 0.0)
    )
    for step in range(1, steps + 1):
        dashboard.add(step, {**train_values(step), **values})
    return dashboard


@pytest.mark.parametrize("size", [(60, 18), (80, 24), (100, 30), (119, 33), (140, 40), (250, 70)])
@pytest.mark.parametrize("steps", [0, 1, 5, 700])
def test_the_display_fills_the_terminal_but_for_one_line_and_never_wraps(tmp_path, size, steps):
    dashboard = dashboard_after(tmp_path, steps)
    if steps:
        dashboard.add(steps, evaluation_values(0.5), "evaluation")
    lines = drawn(dashboard, *size)
    assert len(lines) == size[1] - 1
    assert max(len(line) for line in lines) <= size[0]


def test_the_display_says_what_is_trained_and_how_it_goes(tmp_path):
    dashboard = dashboard_after(tmp_path, 5, **{"run/device": "cpu", "run/parameters": 1_000_000, "time/eta": 82.0})
    dashboard.add(5, evaluation_values(0.5), "evaluation")
    text = "\n".join(drawn(dashboard, 100, 30))
    for words in ("tiny", "Tiny-1M", "1.0M parameters", "cpu", "step 5/20", "evaluation 50.0%", "800 tokens/s"):
        assert words in text
    for words in ("generate 36%", "other 9%", "1m 22s left", "1 s so far"):
        assert words in text
    dashboard.ended = True
    assert not any(words in "\n".join(drawn(dashboard, 100, 30)) for words in ("left", "so far"))


def test_a_run_that_trains_some_of_the_parameters_says_how_many(tmp_path):
    counts = {"run/parameters": 139_400_000, "run/trained_parameters": 4_884_480}
    facts = RunFacts.of(tmp_path, {}, counts)
    assert "139.4M parameters (4.9M trained)" in facts.line()
    assert dict(facts.rows())["parameters"] == "139.4M (4.9M trained)"
    assert "139.4M parameters" in (whole := RunFacts.of(tmp_path, {}, {"run/parameters": 139_400_000}).line())
    assert "trained" not in whole


def test_a_number_that_is_not_finite_is_shown_as_such_until_it_is_finite_again(tmp_path):
    dashboard = dashboard_after(tmp_path, 2, kl=float("nan"))
    assert "nan/inf" in "\n".join(drawn(dashboard, 100, 30))
    dashboard.add(3, {"kl": 0.1})
    assert "nan/inf" not in "\n".join(drawn(dashboard, 100, 30))


def test_a_run_without_rewards_shows_the_curves_it_has(tmp_path):
    dashboard = Dashboard(tmp_path / "sft", {}, progress=Progress(lambda: 0.0))
    dashboard.add(1, {"loss": 2.0, "gradient_norm": 1.0})
    text = "\n".join(drawn(dashboard, 80, 24))
    assert "loss" in text
    assert "gradient norm" in text
    assert "reward" not in text


def test_a_resumed_run_draws_its_curves_from_the_beginning(run_folder):
    console = Console(file=io.StringIO(), width=80, height=24)
    writer = ConsoleWriter(ConsoleSink(live=False), console, run_folder, {}, resume_step=4)
    assert "step 4" in "\n".join(drawn(writer.dashboard, 80, 24))
    writer.close()


def test_a_rising_curve_rises():
    lines = [line.plain for line in plot([Curve([0, 1, 2], [0.0, 0.5, 1.0], "")], 30, 10)]
    assert len(lines) == 10
    assert {len(line) for line in lines} == {30}
    columns = [line.split("┤")[-1].split("│")[-1] for line in lines[:-1]]
    filled = [i for line in reversed(columns) for i, c in enumerate(line) if c != " "]
    assert filled == sorted(filled)


def test_one_point_a_constant_and_many_points_can_be_drawn():
    for xs, ys in (([3], [1.0]), ([1, 2], [0.0, 0.0]), (range(10_000), [1e9] * 10_000), ([1, 2], [-1e-9, 1e-9])):
        assert len(plot([Curve(xs, ys, "", "◆")], 40, 8)) == 8


def test_numbers_are_short():
    for value in (0.0, 1.0, 1.0083, 99.99, 123.4, 12345.6, 1e-9, -0.000123, 1.5e12):
        assert len(show(value)) <= 8
        assert len(show(abs(value), "count")) <= 8
    assert all(len(entry.short) <= 9 for entry in CATALOG)


def test_the_summary_gives_accuracy_with_its_interval_and_commands_that_can_be_pasted(run_folder):
    spaced = run_folder.rename(run_folder.with_name("a run"))
    (spaced / "report.html").touch()
    console = Console(file=io.StringIO(), width=100)
    print_summary(spaced, console)
    text = console.file.getvalue()
    for words in (
        "8 steps in 44.0 s",
        "20.0% of 200   95%: 15.0 to 26.1%",
        "60.0% of 200   95%: 53.1 to 66.5%",
        "+40.0 points",
        "report.html",
    ):
        assert words in text
    for verb in ("resume", "eval", "view", "export"):
        assert f"whet {verb} '{spaced}'" in text
    assert f"--out '{spaced}/export'" in text


def test_the_summary_of_a_run_that_learns_from_rows_gives_its_held_out_loss(tmp_path):
    sink = JSONLSink().open(tmp_path, {})
    for step, loss in ((0, 5.0), (1, 2.5)):
        sink.write(step, {"evaluation/loss": loss, "evaluation/n": 8.0}, "evaluation")
    sink.close()
    console = Console(file=io.StringIO(), width=100)
    print_summary(tmp_path, console)
    assert "held-out loss   5.000 → 2.500   over 8 rows" in console.file.getvalue()
    assert plain_line(0, 2, {"evaluation/loss": 5.0}, "evaluation") == "step 0/2  evaluation: loss 5.000"


def test_the_summary_of_a_run_that_did_nothing_can_be_printed(tmp_path):
    console = Console(file=io.StringIO(), width=100)
    print_summary(tmp_path, console)
    assert "0 steps" in console.file.getvalue()


def test_every_metric_that_people_are_shown_is_explained():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [entry.key for entry in CATALOG if f"`{entry.key}`" not in text] == []


def test_a_phase_has_one_colour_in_the_terminal_and_in_a_dark_report():
    style = (Path(__file__).parents[2] / "whet/show/assets/page.css").read_text()
    for name, colour in PHASES.items():
        assert re.search(rf"--p-{name}: light-dark\(#\w+, {colour}\)", style), name


def test_names_of_models_and_scores_can_not_act_in_the_terminal(tmp_path):
    hostile = "\x1b[2J\u202e"
    dashboard = Dashboard(tmp_path, {"model": {"path": f"some/{hostile}"}}, progress=Progress(lambda: 0.0))
    line = plain_line(1, None, {"evaluation/accuracy": 0.5, f"evaluation/{hostile}": 1.0}, "evaluation")
    for text in ("\n".join(drawn(dashboard, 80, 24)), line):
        assert "\x1b[2J" not in text
        assert "\u202e" not in text
        assert "\\x1b[2J" in text


def test_a_run_without_a_sandbox_says_so_in_red(tmp_path: Path) -> None:
    recipe = {"data": {"of": {"code": {"type": "code", "sandbox": "none"}}}}
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=True, color_system="standard")
    writer = ConsoleWriter(ConsoleSink(live=False), console, tmp_path, recipe)
    writer.write(0, {"run/model": "tiny"})
    assert "\x1b[1;31m" in printed.getvalue()
    assert "sandbox: none: code of the model runs with your rights" in printed.getvalue()
