"""Instructions are checked as their row says, each turn's in its turn; what can't be checked is refused."""

import asyncio
import csv
import json
import sys

import pytest

from tests.cpu_time import cpu_seconds_below

pytest.importorskip("if_verifiable")

from whet.base.errors import ConfigError, DataError
from whet.core.types import Task
from whet.processes.pool import WorkerLimits
from whet.tasks.instructions.checks import check_instruction, follow_in_worker, registry
from whet.tasks.instructions.task_set import CAPITALS, CheckedTurn, Instructed, InstructionFollowing

pytestmark = pytest.mark.usefixtures("forked_children")

LIMITS = WorkerLimits(workers=1, cpu_s=2)
COMMAS = {"prompt": "No commas, and say apple.", "instruction_id_list": ["punctuation:no_comma", "keywords:existence"]}
ROW = {**COMMAS, "kwargs": [{}, {"keywords": ["apple"], "relation": None}]}


def load(path, *rows, **settings):
    path = path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    taskset = InstructionFollowing(path=str(path), test_size=0, limits=LIMITS, **settings)
    return taskset.tasks("train")


def test_rows_of_csv_hold_lists_as_json(tmp_path):
    path = tmp_path / "rows.csv"
    several = {"turns": [ROW, {**ROW, "prompt": "Again."}]}
    for row in (ROW, several):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, row)
            writer.writeheader()
            writer.writerow(
                {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
            )
        (task,) = InstructionFollowing(path=str(path), test_size=0, limits=LIMITS).tasks("train")
        assert task.data == load(tmp_path, row)[0].data


@pytest.fixture(scope="module")
def play():
    """Give replies to an episode of a task; all share one worker process."""
    grading = InstructionFollowing(limits=LIMITS).open()

    async def episode(task, replies):
        environment = grading.make(task)
        await environment.start()
        return [await environment.step({"role": "assistant", "content": reply}) for reply in replies]

    yield lambda task, *replies: asyncio.run(episode(task, replies))
    asyncio.run(grading.close())


@pytest.mark.parametrize(
    ("name", "arguments", "follows", "fails"),
    [
        ("punctuation:no_comma", {}, "one two", "one, two"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a b c", "a b"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", "a b c"),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Hi. You.", "Hi Mr. X"),
        ("startend:end_checker", {"end_phrase": "the end"}, "It is THE END", "the end."),
        ("startend:quotation", {}, '"hello"', "hello"),
        ("detectable_format:title", {}, "<<Title>> text", "<Title>"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a"),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
        ("change_case:english_lowercase", {}, "this is a sentence in english", "This is a sentence"),
        ("change_case:english_lowercase", {}, "this is a sentence in english", "123 456"),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "at least"},
            "A-B C d",
            "A b",
        ),
        ("language:response_language", {"language": "de"}, "Das ist ein deutscher Satz über das Wetter.", "Good day"),
        ("language:response_language", {"language": "de"}, "Das ist ein deutscher Satz über das Wetter.", "123 456"),
        ("combination:two_responses", {}, "one ****** two", "one ****** one"),
        ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b c", "a"),
        ("count:numbers", {"N": 2}, "1 and 2", "1"),
        ("words:palindrome", {}, "level civic radar refer rotor kayak madam stats tenet racecar", "no"),
        ("format:no_whitespace", {}, "abc", "a b"),
    ],
)
def test_checks_distinguish_answers_that_follow_an_instruction(name, arguments, follows, fails):
    check_instruction(name, arguments)
    for answer, expected in [(follows, 1), (fails, 0), ("", 0), (" \n", 0)]:
        assert follow_in_worker(answer, [(name, arguments)]) == {"0": expected}, answer


def test_no_answer_brings_a_check_down():
    hostile = [
        "",
        "\x00\x01",
        "\ud83d",
        "{" * 5000,
        "a" * 20_000,
        "[" * 20_000,
        "* " * 9000,
        "<<" * 9000,
        "مرحبا",
        "1" * 5000,
    ]
    for name, kind in registry().items():
        arguments = dict.fromkeys(kind(name).get_instruction_args_keys(), 2)
        try:
            check_instruction(name, arguments)
        except ValueError:
            continue
        with cpu_seconds_below(10):
            for answer in hostile:
                assert follow_in_worker(answer, [(name, arguments)])["0"] in (0, 1), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"instruction_id_list": ["punctuation:no_coma", "keywords:existence"]}, "can't be checked.*did you mean"),
        ({"instruction_id_list": ["words:start_verb", "keywords:existence"]}, "'words:start_verb' can't be checked"),
        ({"kwargs": [{}]}, "'instruction_id_list' has 2 items and 'kwargs' 1"),
        ({"kwargs": [{}, {}, {}]}, "'instruction_id_list' has 2 items and 'kwargs' 3"),
        ({"instruction_id_list": [], "kwargs": []}, "instruction_id_list"),
        ({"kwargs": [{}, {"keywords": None}]}, r"takes \['keywords'\], not \[\]"),
        ({"kwargs": [{}, None]}, r"takes \['keywords'\], not \[\]"),
        ({"kwargs": [{"num_words": 3}, {"keywords": ["apple"]}]}, "takes nothing"),
        ({"kwargs": [{}, {"keywords": ["c++ ("]}]}, "can't be checked"),
        ({"prompt": None}, "'prompt' is missing"),
        ({"grading_mode": "some"}, "grading_mode"),
    ],
)
def test_an_incomplete_or_uncheckable_row_is_an_error_naming_its_line(tmp_path, change, says):
    with pytest.raises(DataError, match=f"(?i)rows.jsonl:1: .*{says}"):
        load(tmp_path, {**ROW, **change})


def test_rows_with_unknown_instructions_can_be_left_out(tmp_path, caplog):
    unknown = {**ROW, "prompt": "Another.", "instruction_id_list": ["last_word:last_word_answer", "keywords:existence"]}
    with caplog.at_level("INFO"):
        tasks = load(tmp_path, ROW, unknown, skip_unknown=True)
    assert len(tasks) == 1
    assert "1 with an instruction that can't be checked" in caplog.text


@pytest.mark.parametrize(
    ("answer", "binary", "fraction"),
    [("an apple", 1, 1), ("one, two", 0, 0), ("a, apple", 0, 0.5), ("pear", 0, 0.5), ("", 0, 0), ("x" * 30_000, 0, 0)],
)
def test_all_instructions_count_or_the_share_of_them(play, tmp_path, answer, binary, fraction):
    for mode, reward in [("binary", binary), ("fraction", fraction)]:
        tasks = load(tmp_path, {**ROW, "grading_mode": mode})
        step = play(tasks[0], answer)[0]
        assert (step.reward, step.done) == (reward, True)
        assert step.scores == {"correct": binary, "followed": fraction}


def test_an_answer_that_is_only_the_prompt_again_follows_nothing(play, tmp_path):
    row = {"prompt": "Repeat this, then answer", "instruction_id_list": ["combination:repeat_prompt"]}
    tasks = load(tmp_path, {**row, "kwargs": [{"prompt_to_repeat": "Repeat this, then answer"}]})
    asked = row["prompt"]
    for echo in (asked, f"{asked}\n******\n{asked.upper()}"):
        assert play(tasks[0], echo)[0].reward == 0
    assert play(tasks[0], f"{asked}: done")[0].reward == 1


def test_each_turn_has_its_own_instructions_and_all_rewards_add_up_to_one(play, tmp_path):
    second = {"prompt": "Now in quotes.", "instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    tasks = load(tmp_path, {"turns": [ROW, second]})
    first, last = play(tasks[0], "an apple", '"an, apple"')
    assert (first.reward, first.done) == (0.5, False)
    assert first.messages == [{"role": "user", "content": "Now in quotes."}]
    assert (last.reward, last.done, last.scores["correct"]) == (0.5, True, 1)
    first, last = play(tasks[0], "one, two", '"x"')
    assert (first.reward, last.reward, last.scores["correct"]) == (0, 0.5, 0)


def test_a_keyword_that_is_an_endless_pattern_is_stopped(play):
    turn = CheckedTurn("?", [["keywords:existence", {"keywords": ["(a+)+$"]}]])
    step = play(Task("x", [], Instructed([turn], "binary")), "a" * 60 + "b")[0]
    assert (step.reward, step.scores["grading_timeout"]) == (0, 1)


def test_generated_questions_require_the_form_and_the_right_answer():
    taskset = InstructionFollowing(train_size=60, test_size=10, limits=LIMITS)
    for task in taskset.tasks("train"):
        answer, (turn,) = task.data.answer, task.data.turns
        followed = follow_in_worker(task.data.gold, turn.instructions)
        assert followed == {str(index): 1 for index in range(len(turn.instructions))}
        assert answer in task.data.gold
        assert answer in CAPITALS.values()


def test_languages_are_detected_the_same_in_every_run():
    checks = [("language:response_language", {"language": code}) for code in ("en", "fr", "it", "es", "de")]
    text = "de la casa in the die il"
    assert len({tuple(follow_in_worker(text, checks).values()) for _ in range(10)}) == 1


def test_without_the_package_the_error_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "if_verifiable.ifeval", None)
    registry.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'whet\[tasks\]'"):
        load(tmp_path, ROW)


@pytest.mark.parametrize(
    ("name", "arguments", "answer", "follows"),
    [
        ("words:words_position", {"keyword": "fox"}, "The Fox saw a fox there.", 1),
        ("words:words_position", {"keyword": "fox"}, "The fox saw a fox there", 1),
        ("words:words_position", {"keyword": "fox"}, "The fox saw a fox.", 0),
        ("words:keywords_specific_position", {"keyword": "fox", "n": 2, "m": 2}, "Hello. My, Fox is red.", 1),
        ("words:keywords_specific_position", {"keyword": "fox", "n": 2, "m": 2}, "Hello. Fox, my dear.", 0),
        ("format:title_case", {}, "A Plan For 2 Days", 1),
        ("format:title_case", {}, "A plan For Days", 0),
    ],
)
def test_changed_checks_of_ifbench_follow_its_current_version(name, arguments, answer, follows) -> None:
    from whet.tasks.instructions.checks import follow_in_worker

    assert follow_in_worker(answer, [(name, arguments)]) == {"0": follows}
