"""Odd and hostile rows of every kind: an error that names file, line and field, before the first step, or a counted
drop with its reason. Never a silent change."""

import asyncio
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.data.files import read_file
from whet.data.jsonl import iterate_jsonl
from whet.data.order import TaskOrder
from whet.data.row import read_rows
from whet.data.row_kinds import Conversation, Example, Preference
from whet.data.rows import LabelledRows, PreferenceRows, Rows, ScoredRows, SupervisedRows
from whet.data.source import DatasetSource
from whet.tasks.prompts import PromptRow

USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
RENDERER = Renderer(tiny_tokenizer())
KINDS: dict[str, tuple[type[Rows], dict[str, Any]]] = {
    "supervised": (SupervisedRows, {"prompt": "p", "completion": "c"}),
    "preference": (PreferenceRows, {"prompt": "p", "chosen": "c", "rejected": "r"}),
    "scored": (ScoredRows, {"prompt": "p", "completion": "c", "score": 0.5}),
    "labelled": (LabelledRows, {"prompt": "p", "completion": "c", "label": True}),
}
FIELDS = [(kind, field) for kind, (_, row) in KINDS.items() for field in row]
WRONG = {
    "number": "7",
    "null": "null",
    "empty list": "[]",
    "list of numbers": "[1, 2]",
    "nested lists": '[[{"role": "user", "content": "x"}]]',
    "object": '{"role": "user", "content": "x"}',
    "empty text": '""',
    "blank text": '" \\n"',
    "half a surrogate pair": '"\\ud800"',
    "content is null": '[{"role": "user", "content": null}]',
    "content is a sound": '[{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]',
    "no role": '[{"content": "x"}]',
    "mistyped role": '[{"role": "usr", "content": "x"}]',
    "role is a number": '[{"role": 3, "content": "x"}]',
}


def read(tmp_path: Path, kind: str, *lines: str | bytes, **settings: Any) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return KINDS[kind][0](path=str(path), **settings).groups(RENDERER)["train"]


def good(kind: str, **changes: Any) -> str:
    return json.dumps(KINDS[kind][1] | changes)


def with_raw(kind: str, field: str, raw: str) -> str:
    parts = KINDS[kind][1] | {field: "@"}
    return "{" + ", ".join(f'"{name}": {raw if name == field else json.dumps(v)}' for name, v in parts.items()) + "}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_row_is_read(tmp_path: Path, kind: str) -> None:
    (group,) = read(tmp_path, kind, good(kind))
    assert [trajectory.trained_tokens for trajectory in group.episodes] == [2] * len(group.episodes)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_missing_field_is_named_with_its_line_before_the_first_step(tmp_path: Path, kind: str, field: str) -> None:
    lacking = {name: value for name, value in KINDS[kind][1].items() if name != field}
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: field '{field}' is missing"):
        read(tmp_path, kind, good(kind), json.dumps(lacking))


@pytest.mark.parametrize("raw", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(("kind", "field"), [(k, f) for k, f in FIELDS if f not in ("score", "label")])
def test_a_text_of_another_type_is_named_with_its_line_and_field(
    tmp_path: Path, kind: str, field: str, raw: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: field '{field}(\[0\])?' must"):
        read(tmp_path, kind, good(kind), with_raw(kind, field, raw))


@pytest.mark.parametrize("raw", ["null", '"1"', "true", "[1]", "{}", "1" * 400])
def test_a_score_that_is_not_a_finite_number_is_refused(tmp_path: Path, raw: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2: field 'score' must be a finite number"):
        read(tmp_path, "scored", good("scored"), with_raw("scored", "score", raw))


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999", "[NaN]"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_is_refused_in_any_field(tmp_path: Path, kind: str, raw: str) -> None:
    number = raw.strip("[]")
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{number} is not a finite number; write null"):
        read(tmp_path, kind, good(kind), with_raw(kind, "score", raw))


@pytest.mark.parametrize("kind", KINDS)
def test_a_duplicate_key_is_refused(tmp_path: Path, kind: str) -> None:
    for twice in (good(kind)[:-1] + ', "prompt": "again"}', good(kind, facts={})[:-2] + '"a": 1, "a": 2}}'):
        with pytest.raises(DataError, match=r"rows\.jsonl:2: .*duplicate key '(prompt|a)'"):
            read(tmp_path, kind, good(kind), twice)


@pytest.mark.parametrize("raw", ["null", '"true"', "1", "0", "0.0", "[true]", "{}", '""'])
def test_a_label_that_is_neither_true_nor_false_is_refused(tmp_path: Path, raw: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2: field 'label' must be true or false"):
        read(tmp_path, "labelled", good("labelled"), with_raw("labelled", "label", raw))


def test_labels_become_rewards(tmp_path: Path) -> None:
    groups = list(read(tmp_path, "labelled", good("labelled"), good("labelled", label=False)))
    assert [group.episodes[0].reward for group in groups] == [1.0, 0.0]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1, 2]",
        '"text"',
        "null",
        "nothing",
        '{"a": 1} {"b": 2}',
        "[" * 100_000,
        '{"score": ' + "1" * 5000 + "}",
        b'{"prompt": "\xff\xfe"}',
    ],
    ids=["torn", "list", "text", "null", "word", "two", "deep", "long number", "no UTF-8"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_is_not_an_object_is_named(tmp_path: Path, kind: str, line: str | bytes) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2: (not valid JSON|a row must be|not JSON that|not UTF-8)"):
        read(tmp_path, kind, good(kind), line)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "rows.json",
            '{"version": 1, "data": [{"prompt": "a"}]}',
            "if the list 'data' has the rows, write it",
        ),
        ("rows.jsonl", '[{"prompt": "a"}]', "not list; a file that is one list is read as .json"),
        ("rows.jsonl", "version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS, .* with: git lfs pull"),
    ],
    ids=["rows below a key", "one list", "pointer"],
)
def test_a_file_with_the_rows_elsewhere_says_where(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name}:1: .*{words}"):
        read_rows(str(tmp_path / name), PromptRow)


@pytest.mark.parametrize(
    ("kind", "row", "problem"),
    [
        (Conversation, {"messages": [USER, REPLY | {"weight": 0}]}, r"'messages\[1\]' must not have 'weight': 0"),
        (Conversation, {"messages": [USER, REPLY | {"train": False}]}, "must not have 'train': False"),
        (
            Conversation,
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "loss": False}]},
            r"'conversations\[1\]' must not have 'loss': False",
        ),
        (Conversation, {"messages": [USER, REPLY | {"function_call": {"name": "f"}}]}, "an item of 'tool_calls'"),
        (Conversation, {"messages": json.dumps([USER, REPLY])}, "'messages' must be a list of messages, not the text"),
        (Conversation, {"instruction": "i", "history": [["a", "b"]], "output": "o"}, "field 'history' has turns"),
        (Conversation, {"instruction": "i", "input": 5, "output": "o"}, "field 'input' must be a text, not 5"),
        (Preference, {"question": "q", "chosen": "a", "rejected": "b"}, "'prompt' is missing .*'question' is meant"),
        (
            Preference,
            {"chosen": [USER, REPLY], "rejected": [USER | {"content": "z"}, REPLY]},
            "'chosen' and 'rejected' must begin with the same message",
        ),
        (Preference, {"prompt": "z", "chosen": [USER, REPLY], "rejected": [USER, REPLY]}, "'chosen' must begin with"),
        (Conversation, {"prompt": b"q", "completion": "a"}, "field 'prompt' holds bytes, and must be a text"),
        (Conversation, {"Prompt": "q", "Zeta": 1, "A": 1}, "if 'Prompt' is meant"),
        (Conversation, {"Messages": [USER, REPLY], "A": 1}, "'Messages' holds .* set columns={messages: Messages}$"),
        (Conversation, {"prompt": "q", "talk": [USER, REPLY]}, "'talk' holds .* set columns={messages: talk}$"),
        (Conversation, {"Turns": [{"from": "human", "value": "q"}]}, "set columns={conversations: Turns}$"),
        (Conversation, {"Notes": [{"by": "me"}], "A": []}, "field 'prompt' is missing"),
        (Conversation, {"row": {"prompt": "q", "completion": "a"}}, r"this row: row; 'row' has it: write what is in"),
        (Conversation, {"row": {"text": "q"}}, r"\(fields of this row: row\)$"),
    ],
)
def test_what_a_published_form_means_is_read_or_refused(
    kind: type[Example], row: dict[str, object], problem: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:7: .*{problem}"):
        kind.of("rows.jsonl:7", row)


@pytest.mark.parametrize("mark", [{"weight": 1}, {"weight": None}, {"train": True}, {"function_call": None}])
def test_marks_that_change_nothing_are_read(mark: dict[str, object]) -> None:
    assert Conversation.of("rows.jsonl:7", {"messages": [USER, REPLY | mark]}).answers


@pytest.mark.parametrize("kind", KINDS)
def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_keep_their_numbers(tmp_path: Path, kind: str) -> None:
    groups = read(tmp_path, kind, b"\xef\xbb\xbf" + good(kind).encode(), "", " \t", good(kind) + "\r")
    assert [group.uid.rpartition(":")[2] for group in groups] == ["1", "4"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match="holds no rows"):
        read_file(tmp_path / "rows.jsonl")


def test_a_file_in_utf_16_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(good("supervised"), encoding="utf-16")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not UTF-8"):
        read_file(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_one_row_is_trained_on_and_nothing_is_held_out(tmp_path: Path, kind: str) -> None:
    rows = KINDS[kind][0](path=str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text(good(kind) + "\n")
    assert {split: len(groups) for split, groups in rows.groups(RENDERER).items()} == {"train": 1, "test": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_duplicate_rows_are_all_kept(tmp_path: Path, kind: str) -> None:
    groups = list(read(tmp_path, kind, *[good(kind)] * 3))
    assert len({group.uid for group in groups}) == 3
    assert groups[0].trajectories[0].tokens == groups[2].trajectories[0].tokens


def draw(groups: Any, batch_size: int = 2) -> tuple[list[str], DatasetSource]:
    source = DatasetSource(groups, batch_size, TaskOrder(len(groups), shuffle=False))
    drawn = asyncio.run(source.next_groups())
    return [group.uid.partition("@")[0].rpartition(":")[2] for group in drawn], source


@pytest.mark.parametrize("kind", KINDS)
def test_rows_over_the_limit_are_counted_named_and_left_out(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "whet")
    long, answer = good(kind, prompt="p" * 90), [name for name in KINDS[kind][1] if name in ("completion", "rejected")]
    long_answer = good(kind, **{answer[0]: "c" * 90})
    lines, source = draw(read(tmp_path, kind, good(kind), long, long_answer, good(kind), max_tokens=80))
    assert lines == ["1", "4"]
    assert source.tally()[0].result()["data/dropped"] == 2
    assert source.dropped == {"longer than 80 tokens": 2}
    told = [record for record in caplog.records if "left out" in record.message]
    assert [record.levelname for record in told] == ["WARNING", "INFO"]
    assert "rows.jsonl:2 is left out: longer than 80 tokens" in told[0].message
    assert "rows.jsonl:3 is left out: longer than 80 tokens" in told[1].message


@pytest.mark.parametrize(
    "same",
    [
        {"chosen": "x", "rejected": "x"},
        {"chosen": [{"role": "assistant", "content": "x"}], "rejected": "x"},
        {
            "prompt": [{"role": "user", "content": "p"}],
            "chosen": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "x"}],
            "rejected": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "x"}],
        },
    ],
)
def test_a_pair_of_equal_answers_is_counted_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, same: dict[str, Any]
) -> None:
    lines, source = draw(
        read(tmp_path, "preference", good("preference"), good("preference", **same), good("preference"))
    )
    assert lines == ["1", "3"]
    assert source.dropped == {"chosen and rejected are the same tokens": 1}
    assert "rows.jsonl:2 is left out: chosen and rejected are the same tokens" in caplog.text


def test_pairs_without_a_prompt_always_keep_an_answer(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    longer = json.dumps({"chosen": [asked, said], "rejected": [asked, said, asked, said]})
    (group,) = read(tmp_path, "preference", longer)
    assert [len(t.messages) for t in group.episodes] == [2, 4]
    only_the_prompt = json.dumps({"prompt": [asked], "chosen": [asked], "rejected": [asked, said]})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'chosen' must hold an answer after the prompt"):
        read(tmp_path, "preference", only_the_prompt)


def test_a_row_that_trains_nothing_is_counted_and_left_out(tmp_path: Path) -> None:
    class Untrained(SupervisedRows):
        def group(self, row: Any, renderer: Renderer) -> Any:
            group = super().group(row, renderer)
            if row.where.endswith(":2"):
                for span in group.episodes[0].spans:
                    span.trained = False
            return group

    path = tmp_path / "rows.jsonl"
    path.write_text((good("supervised") + "\n") * 3)
    lines, source = draw(Untrained(path=str(path)).groups(RENDERER)["train"])
    assert (lines, source.dropped) == (["1", "3"], {"without a token to train": 1})


def test_a_field_of_the_file_does_not_override_the_column_that_was_named(tmp_path: Path) -> None:
    lines = ['{"prompt": "wrong", "question": "right", "completion": "c"}'] * 2
    lines[1] = '{"question": "right", "prompt": "wrong", "completion": "c"}'
    groups = read(tmp_path, "supervised", *lines, columns={"prompt": "question"})
    assert [group.task.prompt[0]["content"] for group in groups] == ["right", "right"]


@pytest.mark.parametrize(
    "messages", ["a text", [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]]
)
def test_messages_of_the_file_do_not_override_the_columns_that_were_named(tmp_path: Path, messages: object) -> None:
    line = json.dumps({"messages": messages, "question": "right", "answer": "c"})
    for kind, more in (("supervised", ""), ("scored", ', "score": 1'), ("labelled", ', "label": true')):
        columns = {"prompt": "question", "completion": "answer"}
        [group] = read(tmp_path, kind, line.removesuffix("}") + more + "}", columns=columns)
        assert [message["content"] for message in group.task.prompt] == ["right"]


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        (
            '{"question": "q", "completion": "c"}',
            "questoin",
            "the row has no 'questoin' (columns.prompt); it has question, completion. Did you mean 'question'?",
        ),
        ('{"question": 7, "completion": "c"}', "question", "field 'prompt' (column 'question') must be"),
    ],
)
def test_a_wrong_renamed_column_is_named_as_the_file_names_it(
    tmp_path: Path, line: str, column: str, message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read(tmp_path, "supervised", line, columns={"prompt": column})


@pytest.mark.parametrize("kind", KINDS)
def test_roles_that_do_not_alternate_are_refused(tmp_path: Path, kind: str) -> None:
    prompt = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    field = "chosen" if kind == "preference" else "completion"
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: field '{field}' must not hold two replies in a row"):
        read(tmp_path, kind, good(kind, prompt=prompt))


@pytest.mark.parametrize(("name", "kind"), [("pipe", "a device or a pipe"), ("folder", "a folder")])
def test_a_path_that_is_not_a_file_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=f"{name}: it is {kind}"):
        list(iterate_jsonl(tmp_path / name))
    with pytest.raises(DataError, match="/dev/zero: it is a device"):
        list(iterate_jsonl("/dev/zero"))
