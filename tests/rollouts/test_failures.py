"""A failure that repeats is reported once, with the user's lines, and is not retried."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from tests.forks import finished, limited_whet_fork
from tests.rollouts.test_source import source
from tests.toy import Lowercase, toy_settings, write_settings
from whet.base.errors import WhetError
from whet.core.types import Task
from whet.rollouts.failures import Failures, is_mistake


class Mistaken(Lowercase):
    """A task set whose grader has a bug."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return {"reward": answer.nope}  # type: ignore[attr-defined]


class Half(Lowercase):
    """A task set whose grader can't read some answers."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        if task.uid.endswith(("0", "2", "4", "6", "8")):
            raise ValueError("could not read it")
        return await super().grade(task, answer)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "mistake"),
    [
        (AttributeError("x"), True),
        (TypeError("x"), True),
        (NameError("x"), True),
        (UnboundLocalError("x"), True),
        (ZeroDivisionError("x"), True),
        (KeyError("x"), True),
        (IndexError("x"), True),
        (ValueError("x"), True),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "x"), True),
        (NotImplementedError(), True),
        (RecursionError(), True),
        (ImportError("x"), True),
        (json.JSONDecodeError("x", "y", 0), False),  # of a server, perhaps
        (OSError("x"), False),
        (ConnectionResetError(), False),
        (TimeoutError(), False),
        (RuntimeError("x"), False),
        (raised(ValueError("x"), ConnectionRefusedError()), False),
    ],
)
def test_a_mistake_in_code_is_told_from_a_failure_of_infrastructure(error: BaseException, mistake: bool) -> None:
    assert is_mistake(error) is mistake


def test_a_bug_of_a_grader_is_told_once_with_its_line_and_ends_the_run(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with source(tiny_model, Mistaken(), retries=2, retry_delay=60.0, max_failed=1.0) as rollouts:
            with pytest.raises(WhetError, match=r"every episode so far .* the same error") as failure:
                await rollouts.next_groups()
            assert 'return {"reward": answer.nope}' in str(failure.value)
            assert "AttributeError: 'str' object has no attribute 'nope'" in str(failure.value)
            assert __file__ in str(failure.value)
            assert max(rollouts.player.failures.counts.values()) <= 3 * 4  # of groups and episodes: no retries

    with caplog.at_level(logging.INFO, "whet"):
        asyncio.run(go())
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("failed (attempt 1)" in text for text in warnings) == 1
    assert not any("attempt 2" in record.getMessage() for record in caplog.records)


def test_a_bug_that_some_answers_meet_costs_their_groups_and_no_more(tiny_model: Path) -> None:
    async def go() -> None:
        async with source(tiny_model, Half(), retries=2, retry_delay=60.0, max_failed=1.0) as rollouts:
            groups = await rollouts.next_groups()
            assert groups
            assert len(rollouts.player.failures.counts) <= 1

    asyncio.run(go())


def test_what_each_kind_says_is_the_users_line_and_not_the_librarys() -> None:
    failures = Failures()
    try:
        json.loads("{")
    except ValueError as error:
        failures.report("e", 1, error, "why")
    assert next(iter(failures.counts)).startswith(f"JSONDecodeError:{__file__}:")


def test_a_run_with_a_bug_in_its_grader_ends_in_few_words(tiny_model: Path, tmp_path: Path) -> None:
    recipe = write_settings(
        tmp_path / "recipe.yaml",
        toy_settings(tiny_model, steps=2, data={"type": "tests.rollouts.test_failures:Mistaken"}),
    )
    done = finished(limited_whet_fork("train", str(recipe), "--folder", "run", folder=tmp_path), 100)
    assert done.returncode == 1
    assert done.stdout.count('return {"reward": answer.nope}') == 1  # of the evaluation before the first step
    assert len(done.stdout.splitlines()) < 30
    assert "Traceback" not in done.stdout
