"""The ledger counts each prompt once, and the audit notices when it doesn't."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.base.errors import DataError, WhetError
from whet.checkpoint.store import CheckpointStore
from whet.cli.main import main
from whet.metrics.rollout_file import RolloutRecord, write_rollouts
from whet.metrics.sinks.jsonl import truncate_after
from whet.rollouts.audit import audit
from whet.rollouts.ledger import FILE, Entry, Ledger, expanded

COUNT = 3  # tasks of an epoch
Lines = list[dict[str, Any]]


def entry(ticket: int, step: int = 1, **changes: Any) -> Entry:
    values = {"epoch": ticket // COUNT, "uid": f"task/{ticket % COUNT}", "version": 0, "outcome": "trained"}
    return Entry(step=step, ticket=ticket, **(values | changes))


def save(folder: Path, step: int, ledger: Ledger, pending: list[int], **order: Any) -> None:
    source = {"next_ticket": len(ledger.marks), "ledger": ledger.state(), "pending": [{"number": n} for n in pending]}
    source |= order or {"order": {"count": COUNT}}
    store = CheckpointStore(folder / "checkpoints")
    asyncio.run(store.save(step, lambda _: None, {"step": step, "source": source}))


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps over tickets 0 to 6; 2 was filtered, 6 is in flight; the ends of step 3 are not in the checkpoint."""
    folder, ledger = tmp_path_factory.mktemp("ledger"), Ledger()
    for ticket in range(7):
        ledger.dispatched(ticket)
        ledger.finished(ticket)
    for ticket, step in ((0, 1), (1, 1), (3, 2), (4, 2)):
        ledger.ended(entry(ticket, step))
    ledger.ended(entry(2, 1, outcome="filtered", why="DynamicSampling"))
    ledger.ended(entry(5, 2, outcome="failed", why="the grader is away"))
    ledger.write(folder)
    for step, tickets in ((1, (0, 1)), (2, (3, 4))):
        write_rollouts(folder, step, [RolloutRecord(step, uid=f"{n:07d}:task/{n % COUNT}") for n in tickets])
    save(folder, 2, ledger, [6])
    ledger.ended(entry(6, 3))
    ledger.write(folder)
    (folder / "recipe.yaml").write_text("{}")
    return folder


def test_a_ticket_ends_once() -> None:
    ledger = Ledger()
    ledger.dispatched(0)
    ledger.ended(entry(0))
    for again in (lambda: ledger.ended(entry(0)), lambda: ledger.finished(0), lambda: ledger.ended(entry(1))):
        with pytest.raises(WhetError, match="not in flight"):
            again()
    with pytest.raises(WhetError, match="lost or drawn twice"):
        ledger.dispatched(2)


def test_the_state_is_short_and_comes_back() -> None:
    ledger, again = Ledger(), Ledger()
    for ticket in range(1000):
        ledger.dispatched(ticket)
    for ticket in range(998):
        ledger.ended(entry(ticket, outcome="filtered" if ticket == 7 else "trained"))
    assert ledger.state() == "7t1f990t2d"
    again.load_state(ledger.state())
    assert again.marks == ledger.marks == expanded("7t1f990t2d").encode()


def test_a_run_in_which_each_prompt_ended_once_passes(a_run: Path) -> None:
    found = audit(a_run)
    assert not found.violations
    assert (found.step, found.drawn, found.in_flight, len(found.entries), found.later) == (2, 7, 1, 6, 1)
    assert found.by_epoch() == {0: {"trained": 2, "filtered": 1}, 1: {"trained": 2, "failed": 1}}
    assert found.dropped() == {("filtered", "DynamicSampling"): 1, ("failed", "the grader is away"): 1}


def test_a_torn_line_and_what_a_resumed_run_does_again_are_dropped(a_run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(a_run, tmp_path / "run"))
    with (copy / FILE).open("a") as file:
        file.write('{"step": 4, "tick')
    assert audit(copy).later == 1
    truncate_after(copy / FILE, 2)
    assert audit(copy).later == 0
    assert not audit(copy).violations


def without(ticket: int) -> Callable[[Lines], Lines]:
    return lambda lines: [line for line in lines if line["ticket"] != ticket]


def changed(ticket: int, /, **values: Any) -> Callable[[Lines], Lines]:
    return lambda lines: [line | values if line["ticket"] == ticket else line for line in lines]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(1), "ticket 1 was trained in the checkpoint, but never ended in the ledger"),
        (lambda lines: [*lines, lines[0] | {"step": 2}], "ticket 0 was trained in step 1 and trained in step 2"),
        (changed(4, uid="task/0"), "prompt task/0 of epoch 1 was trained in step 2 and trained in step 2"),
        (changed(2, outcome="trained"), "ticket 2 was filtered in the checkpoint, but was trained in step 1"),
        (changed(3, epoch=0), "ticket 3 is of epoch 1, not 0"),
        (changed(6, step=2), "ticket 6 (task/0) was trained in step 2, but is in flight in the checkpoint"),
        (changed(6, step=2, ticket=9), "ticket 9 has ended but was never drawn"),
        (
            changed(1, uid="task/2", epoch=None),
            "task/1 was trained on in step 1 according to the rollouts, but the ledger",
        ),
        (changed(1, step=2), "task/1 was trained on in step 2 according to the ledger, but the rollouts"),
    ],
)
def test_whatever_is_wrong_in_the_file_is_found(
    a_run: Path, tmp_path: Path, change: Callable[[Lines], Lines], said: str
) -> None:
    copy = Path(shutil.copytree(a_run, tmp_path / "run"))
    lines = [json.loads(line) for line in (copy / FILE).read_text().splitlines()]
    (copy / FILE).write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    assert said in "\n".join(audit(copy).violations)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step": "1"}, "step: expected the number of a step, got text '1' in quotes"),
        ({"ticket": "1"}, "ticket: expected a whole number, got text '1' in quotes"),
        ({"epoch": [0]}, "epoch: expected a whole number, got a list of 1"),
        ({"uid": None}, "uid: expected text, got null (nothing)"),
        ({"outcome": "lost"}, "outcome: expected 'trained', 'filtered' or 'failed', got text 'lost'"),
        ({"why": {}}, "why: expected text, got a mapping of 0"),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_its_line_and_key(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any], said: str
) -> None:
    copy = Path(shutil.copytree(a_run, tmp_path / "run"))
    first, second, *lines = (copy / FILE).read_text().splitlines()
    (copy / FILE).write_text("\n".join([first, json.dumps(json.loads(second) | wrong), *lines, ""]))
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(copy)])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {copy / FILE}:2: invalid line ({said}); remove it to continue\n"


@pytest.mark.parametrize(
    ("marks", "pending", "said"),
    [
        ("7t", [6], "it counts twice"),
        ("2t1f2t1x1g", [], "ticket 6 is lost"),
        ("2t1f2t1x", [6], "7 tickets were drawn, but the checkpoint's ledger has 6"),
    ],
)
def test_whatever_is_wrong_in_the_checkpoint_is_found(
    a_run: Path, tmp_path: Path, marks: str, pending: list[int], said: str
) -> None:
    copy = Path(shutil.copytree(a_run, tmp_path / "run"))
    state = next((copy / "checkpoints").glob("step-*/state.json"))
    changed = json.loads(state.read_text())
    changed["source"] |= {"ledger": marks, "pending": [{"number": n} for n in pending]}
    shutil.rmtree(copy / "checkpoints")
    asyncio.run(CheckpointStore(copy / "checkpoints").save(2, lambda _: None, changed))
    assert said in "\n".join(audit(copy).violations)


def test_a_curriculum_may_draw_a_prompt_again(tmp_path: Path) -> None:
    ledger = Ledger()
    for ticket in (0, 1):
        ledger.dispatched(ticket)
        ledger.ended(entry(ticket, epoch=None, uid="task/0"))
    ledger.write(tmp_path)
    save(tmp_path, 1, ledger, [], curriculum={})
    assert not audit(tmp_path).violations


def test_the_command_says_so_and_its_exit_code_too(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as good:
        main(["audit", str(a_run)])
    said = capsys.readouterr().out
    assert good.value.code == 0
    assert "7 drawn = 6 trained or dropped + 1 in flight: each exactly once" in said
    assert "1 failed: the grader is away" in said
    copy = Path(shutil.copytree(a_run, tmp_path / "run"))
    (copy / FILE).write_text("")
    with pytest.raises(SystemExit) as bad:
        main(["audit", str(copy)])
    assert bad.value.code == 1
    assert "VIOLATION: ticket 0 was trained in the checkpoint" in capsys.readouterr().out
    assert json.loads((copy / "recipe.yaml").read_text()) == {}


def test_a_run_without_a_checkpoint_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no checkpoint yet"):
        audit(tmp_path)


def test_a_file_that_lacks_ends_which_the_checkpoint_knows_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger()
    ledger.compare(tmp_path)
    for ticket in range(3):
        ledger.dispatched(ticket)
        ledger.ended(Entry(1, ticket, 0, f"t{ticket}", 0, "trained"))
    ledger.write(tmp_path)
    ledger.compare(tmp_path)
    assert not caplog.messages
    (tmp_path / "ledger.jsonl").unlink()
    ledger.compare(tmp_path)
    assert "lists the ends of 0 prompts, but the checkpoint 3" in caplog.text
