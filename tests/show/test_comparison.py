"""Two runs side by side: their curves in the terminal, and a page with both."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.forks import whet
from tests.show.browser import browse, needs_browser
from tests.show.test_runs import made
from whet.show.comparison import print_comparison, write_comparison
from whet.show.runs import RunState


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunState, RunState]:
    """Two runs of the same name that differ in a rate."""
    folders = [made(tmp_path / where / "run", right, optimizer={"lr": lr})
               for where, right, lr in (("a", 0.5, 1e-5), ("b", 0.8, 3e-5))]  # fmt: skip
    return RunState.of(folders[0]), RunState.of(folders[1])


def test_curves_are_below_the_table(runs: tuple[RunState, RunState]) -> None:
    console = Console(file=StringIO(), width=100)
    print_comparison(*runs, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    table, curves = printed.split("95% +")
    assert "20.0% → 50.0% (40.4 to 59.6%)" in table
    assert "accuracy  run 50.0%  run 80.0%" in curves
    assert "loss  run 0.25  run 0.25" in curves
    assert curves.count("◆") == 3  # evaluations, of which the first ones are equal


def test_a_page_has_both_runs_and_needs_nothing_else(runs: tuple[RunState, RunState], tmp_path: Path) -> None:
    first, second = (str(run.folder) for run in runs)
    done = whet("runs", "compare", first, second, "--html", str(tmp_path / "both.html"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"written: {tmp_path / 'both.html'}\n")
    data = json.loads(page_data(tmp_path / "both.html"))
    assert [run["folder"] for run in data["runs"]] == ["run", "run"]
    assert ["optimizer.lr", "1e-05", "3e-05"] in data["comparison"]["table"]
    assert "+30.0 points" in data["comparison"]["lines"][0]
    alone = whet("runs", str(tmp_path / "a"), "--html", "x.html")
    assert alone.returncode == 2
    assert "whet runs compare A B --html FILE" in alone.stderr


def page_data(path: Path) -> str:
    return path.read_text().split('<script type="application/json" id="data">')[1].split("</script>")[0]


@needs_browser
def test_a_browser_draws_both_runs_in_the_same_charts(runs: tuple[RunState, RunState], tmp_path: Path) -> None:
    write_comparison(*runs, tmp_path / "both.html")
    result = browse(
        (tmp_path / "both.html").as_uri(),
        "document.querySelectorAll('[data-key=loss] .line').length",
        "document.body.textContent.includes('optimizer.lr') && document.body.textContent.includes('+30.0 points')",
        "document.querySelectorAll('#legend input').length",
    )
    assert result["values"] == [2, True, 2]
    assert result["messages"] == []
