"""Rows become groups whose tokens are those a rollout would have appended."""

import json

import pytest

from tests.rows import write_rows
from tests.tiny import tiny_tokenizer
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.data.row_kinds import Conversation, Preference
from whet.data.rows import FileRows, PreferenceRows, PromptRows, SupervisedRows
from whet.data.split import Tally
from whet.tasks.prompts import Prompts

RENDERER = Renderer(tiny_tokenizer())
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second"},
]


def group_of(kind: type[FileRows], values, **settings):
    rows = kind(path="rows.jsonl", **settings)
    return rows.group(rows.kind.of("rows.jsonl:4", values), RENDERER)


def supervised(train_on="assistant", **values):
    return group_of(SupervisedRows, values, train_on=train_on)


def pair_of(**values):
    return group_of(PreferenceRows, values)


def trained(trajectory):
    return [RENDERER.decode(span.tokens) for span in trajectory.spans if span.trained]


def test_a_supervised_row_is_a_group_of_one_that_trains_the_replies():
    group = supervised(messages=CHAT)
    (trajectory,) = group.trajectories
    assert trained(trajectory) == ["first<|im_end|>", "second<|im_end|>"]
    whole = tiny_tokenizer().apply_chat_template(CHAT, tokenize=False)
    assert RENDERER.decode(trajectory.tokens) + "\n" == whole
    last = supervised("last_assistant", messages=CHAT).trajectories[0]
    assert trained(last) == ["second<|im_end|>"]
    assert last.tokens == trajectory.tokens
    everything = supervised("all", messages=CHAT).trajectories[0]
    assert everything.tokens == trajectory.tokens
    assert everything.trained_tokens == len(everything.tokens) - 1


def test_prompt_and_completion_are_one_message_each_or_lists_of_them():
    texts = supervised(prompt="one", completion="first")
    lists = supervised(prompt=CHAT[1:2], completion=CHAT[2:3])
    assert texts.trajectories[0].tokens == lists.trajectories[0].tokens
    assert trained(texts.trajectories[0]) == ["first<|im_end|>"]


def test_a_preference_pair_is_a_group_of_two_with_rewards_one_and_nothing():
    pair = pair_of(prompt="one", chosen="good", rejected="bad")
    assert [trajectory.reward for trajectory in pair.episodes] == [1, 0]
    assert [trained(trajectory) for trajectory in pair.episodes] == [["good<|im_end|>"], ["bad<|im_end|>"]]
    batch = Batch.from_groups([pair])
    assert batch.sequences == 2
    assert int((batch.sequence == -1).sum()) == len(RENDERER.render_prompt([CHAT[1]]))


def test_the_prompt_of_a_pair_may_be_repeated_in_its_answers_or_be_left_out():
    good, bad = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
    forms = [
        {"prompt": CHAT[:4], "chosen": "good", "rejected": "bad"},
        {"prompt": CHAT[:4], "chosen": [*CHAT[:4], good], "rejected": [*CHAT[:4], bad]},
        {"chosen": [*CHAT[:4], good], "rejected": [*CHAT[:4], bad]},
    ]
    tokens = [[t.tokens for t in pair_of(**form).trajectories] for form in forms]
    assert tokens[0] == tokens[1] == tokens[2]


SYSTEM, ASKED, REPLY = CHAT[:3]


@pytest.mark.parametrize(
    "values",
    [
        {"system": "s", "prompt": "one", "completion": "first"},
        {"system": "s", "prompt": [SYSTEM, ASKED], "completion": [REPLY]},
        {"system": " s", "messages": [SYSTEM, ASKED, REPLY]},
        {"system": "s", "messages": [ASKED, REPLY]},
        {"system": "s", "instruction": "one", "output": "first"},
        {"system": "", "messages": [SYSTEM, ASKED, REPLY]},
    ],
)
def test_the_field_system_is_the_first_message_of_a_conversation(values):
    group = supervised(**values)
    assert group.trajectories[0].messages == [SYSTEM, ASKED, REPLY]
    assert trained(group.trajectories[0]) == ["first<|im_end|>"]
    assert group.task.data == {}


def test_the_field_system_is_the_first_message_of_a_pair():
    bad = {"role": "assistant", "content": "bad"}
    texts = {"chosen": "first", "rejected": "bad"}
    for values in (
        {"prompt": "one", **texts},
        {"prompt": [ASKED], "chosen": [ASKED, REPLY], "rejected": [ASKED, bad]},
        {"prompt": "one", "chosen": [SYSTEM, ASKED, REPLY], "rejected": [SYSTEM, ASKED, bad]},
        {"chosen": [ASKED, REPLY], "rejected": [ASKED, bad]},
        {"instruction": "one", "input": "", **texts},
        {"conversations": [{"from": "human", "value": "one"}], **texts},
    ):
        row = Preference.of("rows.jsonl:4", {"system": "s", **values})
        assert [answer.messages for answer in row.answers] == [[SYSTEM, ASKED, REPLY], [SYSTEM, ASKED, bad]]
        assert row.output() == {"prompt": [SYSTEM, ASKED], "chosen": [REPLY], "rejected": [bad]}
    with pytest.raises(DataError, match="field 'prompt' is missing"):
        pair_of(system="s", **texts)


def test_the_field_system_is_the_first_message_of_a_prompt_that_is_answered(tmp_path):
    values = {"system": "s", "prompt": "one", "answer": "first"}
    (task,) = Prompts(path=str(write_rows(tmp_path / "rows.jsonl", [values])), test_size=0).tasks("train")
    assert task.prompt == [SYSTEM, ASKED]
    assert task.data == {"answer": "first"}
    prepared = PromptRows(path="rows.jsonl").row("rows.jsonl:1", values)
    assert prepared.question == [SYSTEM, ASKED]
    assert prepared.output() == values


def test_two_system_messages_are_refused():
    other = [{"role": "system", "content": "another"}, ASKED]
    says = "must begin with the same system message as the field 'system', or without one, not"
    for name, values in {
        "prompt": {"prompt": other, "completion": "first"},
        "messages": {"messages": [*other, REPLY]},
    }.items():
        with pytest.raises(DataError, match=f"rows.jsonl:4: field '{name}' {says}"):
            supervised(system="s", **values)
    with pytest.raises(DataError, match=f"rows.jsonl:4: field 'chosen' {says}"):
        pair_of(system="s", chosen=[*other, REPLY], rejected=[ASKED, REPLY])
    with pytest.raises(DataError, match=r"rows\.jsonl:4: field 'system' must be a text, not 3"):
        supervised(system=3, prompt="one", completion="first")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prompt": "x"}, "'completion' is missing"),
        ({"messages": []}, "'messages' must be a text or a list"),
        ({"messages": CHAT[:4]}, "'messages' must end with a reply"),
        ({"messages": CHAT[2:3]}, "'messages' must have a message before"),
        ({"messages": [*CHAT[:3], CHAT[2]]}, "two replies in a row"),
        ({"messages": [{"role": "user"}]}, "'messages.0.' must be a message whose 'content' is a text"),
        ({"messages": ["hello"]}, "'messages.0.' must be an object, not \"hello\""),
        ({"prompt": "x", "completion": " "}, "'completion' must be a text or a list of messages that is not empty"),
        ({"messages": [CHAT[1], {"role": "assistant", "content": ""}]}, "'messages.1.' must not be an empty reply"),
    ],
)
def test_a_wrong_supervised_row_is_named_with_its_field(values, says):
    with pytest.raises(DataError, match=f"rows.jsonl:4: .*{says}"):
        supervised(**values)


def test_a_wrong_pair_is_named_with_its_field():
    with pytest.raises(DataError, match=r"rows\.jsonl:4: field 'rejected' is missing"):
        pair_of(prompt="x", chosen="y")


def test_files_are_rendered_when_drawn_and_long_rows_give_the_reason_for_leaving_them_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p" * 500, "chosen": "a", "rejected": "b"}]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    groups = PreferenceRows(path=str(path), max_tokens=200).groups(RENDERER)["train"]
    assert len(groups) == 2
    assert groups[0].uid.endswith("rows.jsonl:1")
    assert groups[1] == "longer than 200 tokens"
    with pytest.raises(DataError, match="can't read"):
        SupervisedRows(path=str(tmp_path / "none.jsonl")).groups(RENDERER)


def test_the_hint_to_whet_prep_keeps_the_dots_of_a_value_that_was_cut(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "?", "completion": ["x" * 100]}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*, not .*xxx\.\.\.; `whet prep` leaves out"):
        SupervisedRows(path=str(tmp_path / "rows.jsonl")).read()


def test_an_account_that_does_not_add_up_is_an_error():
    tally = Tally("rows", 5)
    tally.drop("too long", 2)
    tally.report(3)
    with pytest.raises(DataError, match="1 rows are unaccounted for"):
        tally.report(2)


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (Conversation, {"prompt": "Add.", "input": "1, 2", "completion": "3"}, "input' belongs to the question"),
        (Conversation, {"prompt": "Who?", "context": "Ada.", "completion": "Ada"}, "context' belongs to the question"),
        (Conversation, {"prompt": "1, 2", "instruction": "Add.", "completion": "3"}, "instruction' belongs to the"),
        (Preference, {"prompt": "q", "instruction": "Add.", "chosen": "3", "rejected": "4"}, "instruction' belongs"),
        (Preference, {"prompt": "Add.", "input": "1, 2", "chosen": "3", "rejected": "4"}, "input' belongs to the"),
        (Preference, {"prompt": "q", "chosen": "a", "rejected": "b", "overall_preference": -2}, "which of two answers"),
        (Preference, {"prompt": "q", "chosen": "a", "rejected": "b", "labels": 0}, "labels' says which"),
        *(
            (
                Preference,
                {"prompt": "q", "chosen": "a", "rejected": "b", **scores},
                "the rejected answer is the better one",
            )
            for scores in ({"chosen_score": 3, "rejected_score": 4.5}, {"score_chosen": "1", "score_rejected": "2"})
        ),
    ],
)
def test_a_field_that_changes_the_meaning_of_a_row_is_never_ignored(kind, values, says):
    with pytest.raises(DataError, match=f"rows:1: field .*{says}"):
        kind.of("rows:1", values)


@pytest.mark.parametrize("scores", [(4, 3), (4, 4), (None, 5), ("good", "bad"), (float("nan"), 5), ([1], [2])])
def test_scores_that_do_not_put_the_rejected_answer_first_are_columns_like_any_other(scores):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "chosen_score": scores[0], "rejected_score": scores[1]}
    assert [answer.reward for answer in Preference.of("rows:1", pair).answers] == [1.0, 0.0]


def test_empty_inputs_and_conversations_with_them_are_read():
    row = Conversation.of("rows:1", {"prompt": "Add 1, 2.", "input": " ", "context": None, "completion": "3"})
    assert [message["content"] for message in row.answers[0].messages] == ["Add 1, 2.", "3"]
    messages = [{"role": "user", "content": "Add 1, 2."}, {"role": "assistant", "content": "3"}]
    assert Conversation.of("rows:1", {"messages": messages, "input": "1, 2"}).answers[0].messages == messages
    row = Conversation.of("rows:1", {"prompt": "Below is a task.\nAdd.", "instruction": "Add.", "completion": "3"})
    assert len(row.answers[0].messages) == 2
    whole = {"chosen": messages, "rejected": [messages[0], {"role": "assistant", "content": "4"}], "input": "1, 2"}
    assert len(Preference.of("rows:1", whole).answers) == 2
