"""An answer that fits its schema earns the share of its fields that are right; another answer earns nothing."""

import asyncio
import json

import pytest

from tests.cpu_time import cpu_seconds_below
from whet.base.errors import DataError
from whet.processes.pool import WorkerLimits
from whet.tasks.prompts import Example
from whet.tasks.structured.grader import grade_in_worker
from whet.tasks.structured.json_schema import open_schema, strict_schema
from whet.tasks.structured.task_set import StructuredOutput, written
from whet.tasks.structured.text import parse

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}
GOLD = {"name": "Ada", "age": 34, "tags": ["x", "y"]}
FITS = json.dumps(GOLD)


def tasks_of(path, *rows, **settings):
    path = path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    taskset = StructuredOutput(path=str(path), test_size=0, **settings)
    return taskset, taskset.tasks("train")


def row(**changes):
    return {"prompt": "Who is it?", "schema": SCHEMA, "expected": GOLD, **changes}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    limits = WorkerLimits(workers=1, cpu_s=1, memory_gib=1.0)
    taskset, tasks = tasks_of(tmp_path_factory.mktemp("rows"), row(), limits=limits)
    grading = taskset.open()
    yield lambda answer, **data: asyncio.run(grading.grade(tasks[0], answer))
    asyncio.run(grading.close())


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (FITS, 1),
        (f"```json\n{FITS}\n```", 1),
        (f"\n {FITS} \n", 1),
        (FITS.replace("Ada", " ADA "), 1),
        (FITS.replace("34", "34.0"), 1),
        (FITS.replace("34", "35"), 0.75),
        (FITS.replace('["x", "y"]', '["x"]'), 0.75),
        (FITS.replace('["x", "y"]', '["x", "y", "x", "y"]'), 4 / 6),
        ('{"name": "", "age": 0, "tags": []}', 0),
        ("{}", 0),
        ("null", 0),
        ("[]", 0),
        ("", 0),
        ('{"zzz": 1}', 0),
        (FITS[:-1] + ', "zzz": 1}', 0),
        (FITS.replace("34", '"34"'), 0),
        (FITS.replace("34", "true"), 0),
        (FITS[:-1] + ', "age": 34}', 0),
        (FITS.replace("34", "NaN"), 0),
        (f"Here: {FITS}", 0),
        (f"{FITS} {FITS}", 0),
        (f"```json\n{FITS}\n```\nDone.", 0),
        (f"```json\n{FITS}", 0),
        (FITS.replace("Ada", "A\x00da"), 0),
        (FITS.replace("Ada", "A\\ud800da"), 0.75),
        ("[" * 15_000, 0),
        ('{"a":' * 3000 + "1" + "}" * 3000, 0),
        ('{"name": "' + "x" * 30_000 + '"}', 0),
        (FITS.replace("34", "1" * 19_000), 0),
    ],
)
def test_an_answer_fits_or_is_worth_nothing_and_then_counts_by_field(strict, answer, reward):
    with cpu_seconds_below(10):
        assert strict(answer)["reward"] == pytest.approx(reward)


def test_a_fence_can_be_forbidden_and_content_taken_as_a_whole():
    def grade(answer, fence=True, content="share", gold=GOLD):
        return grade_in_worker(answer, "json", fence, SCHEMA, SCHEMA, gold, content)

    fenced = f"```json\n{FITS}\n```"
    assert grade(fenced)["reward"] == 1
    assert grade(fenced, fence=False) == {"reward": 0, "correct": 0, "format": 0}
    wrong = FITS.replace("34", "35")
    assert grade(wrong) == {"reward": 0.75, "correct": 0, "format": 1}
    assert grade(wrong, content="exact") == {"reward": 0, "correct": 0, "format": 1}
    assert grade('{"name": "", "age": 0, "tags": []}', content="filled", gold=None)["reward"] == pytest.approx(1 / 3)
    assert grade('{"name": " ", "age": 3, "tags": ["", ""]}', content="filled", gold=None)["reward"] == 0.25


ALL = {"name": "Ada & <b>", "age": 34, "height": 1.5, "married": True}
KINDS = {"name": "string", "age": "integer", "height": "number", "married": "boolean"}
FLAT = {"type": "object", "properties": {name: {"type": kind} for name, kind in KINDS.items()}}


@pytest.mark.parametrize("form", ["json", "yaml", "toml", "xml", "csv"])
def test_every_format_reads_what_it_writes(form):
    assert parse(written(ALL, form), form, FLAT) == ALL


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        (
            "yaml",
            "name: Ada\nage: 34\nborn: 2020-01-02\ntags:\n- x\n- no\n",
            {"born": "2020-01-02", "tags": ["x", "no"]},
        ),
        ("toml", 'name = "Ada"\nage = 34\nborn = 2020-01-02\ntags = ["x", "no"]', {"born": "2020-01-02"}),
        ("xml", "<p><name>Ada</name><age>34</age><tags>x</tags><tags>y</tags></p>", {"tags": ["x", "y"]}),
        ("xml", "<p><name>Ada</name><age>34</age><tags><tag>x</tag><tag>y</tag></tags></p>", {"tags": ["x", "y"]}),
        ("xml", "<p><name>Ada</name><age>34</age><tags/></p>", {"tags": []}),
        ("xml", "<p id='3'><name>Ada</name>hidden<age>34</age></p>", {"@id": "3", "#text": "hidden"}),
        ("csv", "name,age\nAda,34\n", {}),
    ],
)
def test_values_take_the_types_of_their_schema(form, text, value):
    found = parse(text, form, SCHEMA)
    assert found["name"] == "Ada"
    assert found["age"] == 34
    for name, part in value.items():
        assert found[name] == part


OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
WHOLE = {"$ref": "#/$defs/n"}
OF_XML = [
    (OPTIONAL, "<v>5</v>", 5),
    (OPTIONAL, "<v/>", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "<v/>", None),
    ({"type": ["string", "null"]}, "<v/>", None),
    ({"oneOf": [{"type": "number"}, {"type": "string"}]}, "<v>2.5</v>", 2.5),
    ({"oneOf": [{"type": "number"}, {"type": "string"}]}, "<v>two</v>", "two"),
    ({"enum": [1, 2]}, "<v>2</v>", 2),
    ({"enum": ["1", "2"]}, "<v>2</v>", "2"),
    ({"const": True}, "<v>true</v>", True),
    ({"allOf": [WHOLE]}, "<v>2</v>", 2),
    ({"anyOf": [{"type": "array", "items": WHOLE}, {"type": "null"}]}, "<v><i>1</i><i>2</i></v>", [1, 2]),
    ({"type": "array", "items": {"type": "object", "properties": {"n": WHOLE}}}, "<v><n>1</n></v>", [{"n": 1}]),
    ({"type": "array", "items": {"type": "object", "properties": {"n": WHOLE}}}, "<v><i><n>1</n></i></v>", [{"n": 1}]),
    ({"type": "object", "additionalProperties": WHOLE}, "<v><a>1</a><b>2</b></v>", {"a": 1, "b": 2}),
    ({"type": "string"}, "<v><![CDATA[a & b]]></v><!-- said -->", "a & b"),
]


@pytest.mark.parametrize("form", ["json", "xml"])
@pytest.mark.timeout(60)
def test_branches_that_lead_to_one_definition_do_not_double_the_work_with_each_level(form):
    """Two kinds of nodes, whose children are nodes of any kind."""
    levels, node = 40, {"$ref": "#/$defs/node"}
    inner = [{"type": "object", "properties": {"child": node, "kind": {"const": kind}}} for kind in ("a", "b")]
    leaf = {"type": "object", "properties": {"leaf": {"type": "integer"}}}
    schema = node | {"$defs": {"node": {"anyOf": [*inner, leaf]}}}
    value = {"leaf": 1}
    for _ in range(levels):
        value = {"child": value, "kind": "b"}
    text = f"<r>{'<child>' * levels}<leaf>1</leaf>{'</child><kind>b</kind>' * levels}</r>"
    right, kind, other = (json.dumps(value), '"b"', '"c"') if form == "json" else (text, "<kind>b", "<kind>c")
    for answer, reward in ((right, 1.0), (right.replace(kind, other, 1), 0.0)):
        scores = grade_in_worker(answer, form, True, strict_schema(schema), open_schema(schema), value, "exact")
        assert scores["reward"] == reward


@pytest.mark.parametrize(("schema", "text", "value"), OF_XML)
def test_texts_are_converted_by_every_form_of_a_schema(schema, text, value):
    root = {"type": "object", "properties": {"v": schema, "w": {"type": "string"}}, "$defs": {"n": {"type": "integer"}}}
    answer = f"<r>{text}<w>3</w></r>"
    for whole in (root, {"$ref": "#/$defs/all", "$defs": {"all": root, **root["$defs"]}}):
        strict, opened = strict_schema(whole), open_schema(whole)
        assert grade_in_worker(answer, "xml", True, strict, opened, {"v": value, "w": "3"}, "exact")["reward"] == 1


@pytest.mark.parametrize(
    ("form", "text"),
    [("yaml", "at: 2020-01-02T10:00:00Z"), ("toml", "at = 2020-01-02T10:00:00Z"), ("csv", "at\n2020-01-02T10:00:00Z")],
)
def test_times_are_the_texts_that_json_has_for_them(form, text):
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}}
    assert parse(text, form, schema) == {"at": "2020-01-02T10:00:00Z"}


def test_several_rows_of_csv_are_a_list_and_one_row_is_the_object_that_the_schema_asks_for():
    rows = {"type": "array", "items": FLAT}
    assert parse("name,age\nAda,34\nBen,x\n", "csv", rows) == [{"name": "Ada", "age": 34}, {"name": "Ben", "age": "x"}]
    assert parse("name,age\n", "csv", rows) == []
    assert parse("name,age\n\nAda,34\n\n", "csv", rows) == [{"name": "Ada", "age": 34}]
    people = {"type": "object", "properties": {"people": rows}}
    assert parse("name,age\nAda,34\n", "csv", people) == {"people": [{"name": "Ada", "age": 34}]}
    assert parse("name,age\nAda,34\n", "csv", FLAT) == {"name": "Ada", "age": 34}
    assert isinstance(parse("name,age\nAda,34\nBen,5\n", "csv", FLAT), list)


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9))
OPEN: dict[str, object] = {"type": "object"}
LAUGHS = "<!DOCTYPE x [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]><x>&b;</x>"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("yaml", BOMB),
        ("yaml", "a: 1\na: 2"),
        ("yaml", "!!python/object/apply:os.system ['touch pwned']"),
        ("yaml", "? [1, 2]\n: x\n? {a: b}\n: y"),
        ("yaml", "a: .nan"),
        ("yaml", "[" * 5000),
        ("xml", LAUGHS),
        ("xml", "<!DOCTYPE x SYSTEM 'file:///etc/passwd'><x>&e;</x>"),
        ("xml", "<a>" * 15_000),
        ("xml", "<p><name>Ada</name>"),
        ("toml", "a = 1\na = 2"),
        ("toml", "a." * 9000 + "b = 1"),
        ("csv", "name,age\nAda"),
        ("csv", "name,name\nAda,Ben"),
        ("csv", 'name,age\n"Ada'),
        ("csv", ""),
        ("json", "\ud800"),
    ],
)
def test_expanding_or_ambiguous_texts_earn_nothing(form, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with cpu_seconds_below(10):
        assert grade_in_worker(text, form, True, FLAT, FLAT, ALL, "share")["reward"] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("levels", [90, 600, 900, 5_000])
@pytest.mark.parametrize("form", ["json", "toml", "xml"])
def test_a_deep_answer_to_an_open_schema_is_graded(form, levels):
    texts = {
        "json": '{"a": ' * levels + "1" + "}" * levels,
        "toml": "a." * (levels - 1) + "a = 1",
        "xml": "<a>" * levels + "1" + "</a>" * levels,
    }
    with cpu_seconds_below(20):
        scores = grade_in_worker(texts[form], form, True, OPEN, OPEN, {"b": 1}, "share")
    assert scores["reward"] == 0
    if form != "xml":
        assert scores["format"] == (levels == 90)


def test_a_pattern_that_never_ends_is_stopped_and_the_next_answer_graded(tmp_path):
    schema = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^(a+)+$"}}}
    limits = WorkerLimits(workers=1, cpu_s=1, memory_gib=1.0)
    taskset, tasks = tasks_of(tmp_path, row(schema=schema, expected={"name": "aaa"}), limits=limits)
    grading = taskset.open()

    async def both():
        try:
            bomb = await grading.grade(tasks[0], json.dumps({"name": "a" * 60 + "b"}))
            return bomb, await grading.grade(tasks[0], '{"name": "aaa"}')
        finally:
            await grading.close()

    bomb, after = asyncio.run(both())
    assert (bomb["reward"], bomb["grading_timeout"]) == (0, 1)
    assert after["reward"] == 1


def test_rows_of_gym_are_read_also_with_invalid_original_schemas(tmp_path):
    gym = {
        "responses_create_params": {"input": [{"role": "user", "content": "Fill it in."}]},
        "schema_str": json.dumps({**FLAT, "additionalProperties": "false", "required": {"item": ["name"]}}),
        "schema_type": "csv",
    }
    _, tasks = tasks_of(tmp_path, gym, content="filled")
    assert tasks[0].data.format == "csv"
    assert tasks[0].data.schema["required"] == list(FLAT["properties"])
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'expected' is missing.*content=filled"):
        tasks_of(tmp_path, gym)
    with pytest.raises(DataError, match="asks for a tool call"):
        tasks_of(tmp_path, {**gym, "response_mode": "tool_call"}, content="filled")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": "{"}, "'schema_str' can't be used"),
        ({"schema": {"$ref": "#"}}, "'schema_str' can't be used: it refers to itself without end"),
        ({"expected": {"name": "Ada"}}, "'expected' doesn't fit the strict form of the schema"),
        ({"prompt": None}, "'prompt' is missing"),
        ({"schema_type": "ini"}, "schema_type"),
    ],
)
def test_a_row_that_cannot_be_graded_is_an_error_naming_its_line(tmp_path, change, says):
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{says}"):
        tasks_of(tmp_path, row(**change))


def test_generated_facts_are_all_in_the_text_and_empty_values_earn_nothing():
    taskset = StructuredOutput(facts=3, train_size=50, test_size=10)
    for task in taskset.tasks("train"):
        gold, schema = task.data.gold, task.data.schema
        assert all(str(value) in task.prompt[-1]["content"] for value in gold.values())
        empty = json.dumps({name: "" if isinstance(value, str) else 0 for name, value in gold.items()})
        assert grade_in_worker(empty, "json", True, schema, schema, gold, "share") == {
            "reward": 0,
            "correct": 0,
            "format": 1,
        }


def test_examples_are_shown_as_earlier_turns_before_each_task() -> None:
    example = Example(question="Write Zoe as JSON.", answer='{"name": "Zoe"}')
    tasks = StructuredOutput(train_size=3, test_size=1, system="JSON only.", examples=(example,)).tasks("train")
    for task in tasks:
        assert [message["role"] for message in task.prompt] == ["system", "user", "assistant", "user"]
        assert task.prompt[2]["content"] == example.answer


def test_a_number_larger_than_floats_is_a_wrong_answer_not_an_error() -> None:
    schema = {"type": "object", "properties": {"price": {"type": "number", "multipleOf": 0.01}}, "required": ["price"]}
    answer = '{"price": 1' + "0" * 400 + "}"
    assert grade_in_worker(answer, "json", False, schema, schema, {"price": 1}, "share")["reward"] == 0.0


def test_fences_of_every_kind_are_taken_off() -> None:
    gold = '{"a": 1}'
    schema = {"properties": {"a": {"type": "integer"}}}
    for answer in (
        "```json\r\n{}\r\n```", "```json5\n{}\n```", "````json\n{}\n````", "~~~\n{}\n~~~", "\n```json \n{}\n  ```\n",
    ):  # fmt: skip
        text = answer.replace("{}", gold)
        assert grade_in_worker(text, "json", True, schema, schema, {"a": 1}, "share")["reward"] == 1, answer
    for answer in ("```json\n{}\n~~~", "```json\n{}\n```\n```json\n{}\n```", "````json\n{}\n```"):
        text = answer.replace("{}", gold)
        assert grade_in_worker(text, "json", True, schema, schema, {"a": 1}, "share")["reward"] == 0, answer
