"""Rows are read from the usual formats, and a damaged file is named with its place and the cure."""

import csv
import gzip
import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from pyarrow import feather, ipc, parquet

from whet.base.errors import DataError
from whet.data.files import read_file
from whet.data.row import Row, read_rows
from whet.data.row_kinds import Conversation, Labelled, Scored
from whet.tasks.choice.task_set import Choice
from whet.tasks.structured.task_set import SchemaRow

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "first"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "completion": "first"},
    {"prompt": "two\nlines", "completion": 'a "b", c'},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the name says."""
    name = path.name.removesuffix(".gz")
    text = ""
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif name.endswith(".feather"):
        feather.write_feather(pyarrow.Table.from_pylist(rows), path, compression="uncompressed")
    elif name.endswith(".arrow"):
        table = pyarrow.Table.from_pylist(rows)
        with ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    elif name.endswith((".csv", ".tsv")):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list((rows or ROWS)[0]), delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writeheader()
            writer.writerows(rows)
        text = path.read_text()
    elif name.endswith(".json"):
        text = json.dumps(rows, indent=1)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    if text:
        path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


FORMATS = ("jsonl", "jsonl.gz", "json", "json.gz", "csv", "csv.gz", "tsv", "parquet", "feather", "arrow")


@pytest.mark.parametrize("suffix", FORMATS)
def test_all_formats_hold_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows.{suffix}", ROWS)
    placed = read_file(path)
    assert [row for _, row in placed] == ROWS
    first = 2 if suffix.startswith(("csv", "tsv")) else 1  # after the header
    assert placed[0][0] == f"{path}:{first}"
    assert [row.answers for row in read_rows(str(path), Conversation)] == [Conversation(**row).answers for row in ROWS]


def test_a_table_may_be_separated_by_semicolons(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question;"the answer"\nOne, two?;three\n"a;b";"c\nd"\ne;f\n')
    assert read_file(path) == [
        (f"{path}:2", {"question": "One, two?", "the answer": "three"}),
        (f"{path}:3", {"question": "a;b", "the answer": "c\nd"}),
        (f"{path}:5", {"question": "e", "the answer": "f"}),
    ]
    path.write_text("a,b;c\n1,2\n")
    assert read_file(path) == [(f"{path}:2", {"a": "1", "b;c": "2"})]


def test_what_is_no_data_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"rows\.xlsx: spreadsheets are not read; save the sheet as CSV"):
        read_file(tmp_path / "rows.xlsx")
    with pytest.raises(DataError, match=r"there is no such file\. Did you mean 'rows\.jsonl'\?"):
        read_file(tmp_path / "row.jsonl")
    with pytest.raises(DataError, match=rf"there is no folder {tmp_path}/nowhere$"):
        read_file(tmp_path / "nowhere" / "rows.jsonl")
    with pytest.raises(DataError, match=r"^set data\.path to a file of yours"):
        read_file("your-rows.jsonl")


def test_places_in_csv_are_lines_even_after_cells_of_several_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", [ROWS[1], ROWS[0], ROWS[0]])
    assert [where for where, _ in read_file(path)] == [f"{path}:{line}" for line in (2, 4, 5)]


def test_tables_hold_messages(tmp_path: Path) -> None:
    calls = [{"role": "user", "content": "?", "tool_calls": None}, {"role": "assistant", "content": "!"}]
    for name in ("rows.parquet", "rows.arrow"):
        (_, row), *_ = read_file(write(tmp_path / name, [{"messages": CHAT}, {"messages": calls}]))
        assert row == {"messages": CHAT}, "fields that only other rows have are absent"
    (row,) = read_rows(str(write(tmp_path / "rows.csv", [{"messages": json.dumps(CHAT)}])), Conversation)
    assert row.answers[0].messages == CHAT
    with pytest.raises(DataError, match=r"rows.csv:2: field 'messages' holds a list in Python's notation"):
        read_file(write(tmp_path / "rows.csv", [{"messages": str(CHAT)}]))


def test_numbers_and_truth_values_of_csv_are_read_from_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", [{"prompt": "12", "completion": "0012", "score": "1.5", "label": "true"}])
    (scored,), (labelled,) = read_rows(str(path), Scored), read_rows(str(path), Labelled)
    assert (scored.score, labelled.label) == (1.5, True)
    assert scored.answers[0].messages[-1]["content"] == "0012", "a text that looks like a number stays a text"
    path = write(tmp_path / "rows.csv", [{"prompt": "12", "completion": "x", "score": "high"}])
    with pytest.raises(DataError, match=r"rows.csv:2: field 'score' .*high"):
        read_rows(str(path), Scored)


def test_a_cell_with_json_is_a_text_unless_it_holds_messages(tmp_path: Path) -> None:
    said = ['{"city": "Paris"}', '[{"name": "Paris"}]', "[]", "[{'a': 1}]"]
    rows = read_rows(
        str(write(tmp_path / "rows.csv", [{"prompt": "{}", "completion": each} for each in said])), Conversation
    )
    assert [row.answers[0].messages[-1]["content"] for row in rows] == said
    turns = '[ {"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]'
    (row,) = read_rows(str(write(tmp_path / "rows.csv", [{"conversations": turns}])), Conversation)
    assert len(row.answers[0].messages) == 2


def test_a_cell_with_json_is_decoded_for_a_field_that_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", [{"question": "2+2?", "options": '{"A": "3", "B": "4"}', "answer": "B"}])
    assert read_rows(str(path), Choice)[0].options == {"A": "3", "B": "4"}
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    path = write(tmp_path / "rows.csv", [{"prompt": "?", "schema_str": schema, "expected": '{"a": 1}'}])
    (row,) = read_rows(str(path), SchemaRow)
    assert (row.schema_str, row.expected) == (schema, {"a": 1})
    path = write(tmp_path / "rows.csv", [{"question": "2+2?", "options": "{'A': 3}", "answer": "B"}])
    with pytest.raises(DataError, match=r"rows.csv:2: field 'options' must be an object"):
        read_rows(str(path), Choice)


def test_tables_as_spreadsheets_and_pandas_write_them(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}]
    for name, text in (
        ("numbers of rows", ",prompt,completion\n0,a,b\n"),
        ("empty columns and rows", "prompt,completion,,\na,b,,\n,,,\n"),
        ("tabs", "prompt\tcompletion\na\tb\n"),
    ):
        (tmp_path / "rows.csv").write_text(text)
        assert [row for _, row in read_file(tmp_path / "rows.csv")] == rows, name


def test_tables_with_other_first_lines_or_separators_are_refused(tmp_path: Path) -> None:
    for name, text, problem in (
        ("rows.csv", "sep=;\r\nprompt;completion\r\na;b\r\n", "'sep=;' is a note for Excel, .*; delete this line"),
        ("rows.csv", "prompt|completion\na|b\n", r"the columns are separated by '\|', .* commas"),
        ("rows.tsv", "prompt|completion\na|b\n", r"the columns are separated by '\|', .* commas"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"{name}:1: {problem}"):
            read_file(tmp_path / name)


def test_only_the_first_of_many_fields_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{f"column {number}": 1 for number in range(9999)}])
    with pytest.raises(DataError, match=r"fields of this row: column 0, .*\.\.\. \(9999 fields\)") as caught:
        read_rows(str(path), Conversation)
    assert len(str(caught.value)) < 2000


def test_a_field_that_is_read_in_place_of_its_column_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "system": "c", "rules": "d"}])
    assert read_rows(str(path), Conversation, {"system": "rule"})[0].system == "c"
    assert "no row has 'rule' (columns.system), so the field 'system' itself is read" in caplog.text
    caplog.clear()
    assert read_rows(str(path), Conversation, {"system": "rules"})[0].system == "d"
    assert not caplog.text


def test_rows_that_lack_the_column_of_others_are_not_read_from_another_field(tmp_path: Path) -> None:
    """The column of a shard that has other columns, or a null in a table, was replaced by the field without a word."""
    renamed, own = {"q": "a", "completion": "b"}, {"prompt": "id-7", "completion": "d"}
    for name, rows, place in (("first", [renamed, own], 2), ("last", [own, renamed], 1)):
        path = write(tmp_path / f"{name}.jsonl", rows)
        with pytest.raises(
            DataError, match=rf"{name}.jsonl:{place}: the row has no 'q' \(columns.prompt\), which .*:\d has"
        ):
            read_rows(str(path), Conversation, {"prompt": "q"})
        with pytest.raises(DataError, match=rf"{name}.jsonl:{place}: the row has no 'q' \(columns.prompt\); it has"):
            read_rows(str(path), Conversation, {"prompt": "q", "other": "prompt"})


def test_a_folder_of_tables_of_texts_is_read_as_each_of_them(tmp_path: Path) -> None:
    """Numbers and truth values were read from texts only where the path itself ended in .csv."""
    for name, label, score in (("train-0.csv", True, 0.5), ("train-1.csv", False, 2.0)):
        write(tmp_path / name, [{"prompt": name, "completion": "a", "label": label, "score": score}])
    for path in (tmp_path, tmp_path / "train-*"):
        assert [row.label for row in read_rows(str(path), Labelled)] == [True, False]
        assert [row.score for row in read_rows(str(path), Scored)] == [0.5, 2.0]


def test_a_file_next_to_its_compressed_copy_is_refused(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        write(tmp_path / name, ROWS)
    with pytest.raises(DataError, match=r"the folder holds rows.jsonl and rows.jsonl.gz, the same rows twice"):
        read_file(tmp_path)


def test_a_column_that_no_row_has_is_an_error(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d", "s": "e"}]
    )
    assert read_rows(str(path), Conversation, {"system": "s"})[1].system == "e"
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: the row has no 'sytem' \(columns.system\); .* No other row has it"
    ):
        read_rows(str(path), Conversation, {"system": "sytem"})
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: field 'prompt' is missing .*in columns.prompt instead of columns.promt"
    ):
        read_rows(str(path), Conversation, {"promt": "prompt"})


def test_values_of_tables_become_values_of_json(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "when": date(2026, 1, 2), "image": b"\0", "weight": float("nan")}]
    path = write(tmp_path / "rows.parquet", rows)
    assert read_file(path)[0][1] == {"prompt": "a", "when": "2026-01-02", "image": b"\0"}
    assert read_rows(str(path), Row)[0].given == {"prompt": "a", "when": "2026-01-02"}


def test_several_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, row in (("train-1.parquet", ROWS[1]), ("train-0.parquet", ROWS[0])):
        write(tmp_path / name, [row])
    assert [row for _, row in read_file(tmp_path)] == ROWS
    write(tmp_path / "test-0.parquet", ROWS)
    assert [row for _, row in read_file(tmp_path / "train-*.parquet")] == ROWS
    with pytest.raises(DataError, match=r"several splits \(test, train\); name one by a pattern: .*/test\*\.parquet"):
        read_file(tmp_path)
    write(tmp_path / "rows.csv", ROWS)
    with pytest.raises(DataError, match=r"several formats \(\.csv, \.parquet\); name those to read by a pattern"):
        read_file(tmp_path)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json", ".parquet", ".jsonl.gz"])
def test_some_of_several_files_may_hold_no_rows(tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("part-0", "part-1"):
        (tmp_path / f"{name}{suffix}").touch()
    write(tmp_path / f"part-1{suffix}", [])
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(DataError, match=rf"{tmp_path} holds no rows"):
        read_file(tmp_path)
    write(tmp_path / f"part-2{suffix}", ROWS)
    caplog.clear()
    assert [row for _, row in read_file(tmp_path)] == [row for _, row in read_file(tmp_path / "*")] == ROWS
    assert f"files are empty, such as part-0{suffix}" in caplog.text
    with pytest.raises(DataError, match=rf"part-1{suffix} holds no rows"):
        read_file(tmp_path / f"part-1{suffix}")


def test_data_sets_saved_to_disk_are_read(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert [row for _, row in read_file(tmp_path / "saved")] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.csv", b"prompt,completion\na\n", r"rows.csv:2: the row has 1 cells, and the header 2"),
        ("rows.csv", b"prompt,prompt\na,b\n", r"rows.csv:1: the header must name each column once"),
        ("rows.csv", b'prompt,completion\na,"b\n', r"rows.csv:2: not valid CSV"),
        ("rows.csv", b"prompt\n\xff\n", r"rows.csv:2: not UTF-8 text"),
        ("rows.csv", b"prompt,completion\n", r"rows.csv holds no rows"),
        ("rows.csv", b"", r"rows.csv holds no rows"),
        ("rows.json", b'[{"prompt": "a"}, 3]', r"rows.json: element 2 must be a JSON object, not int"),
        ("rows.json", b'[{"prompt": "a"},\n {"prompt" "b"}]', r"rows.json:2: not valid JSON"),
        ("rows.json", b'[{"prompt": "a", "prompt": "b"}]', r"duplicate key 'prompt'"),
        ("rows.json", b"[]", r"rows.json holds no rows"),
        ("rows.parquet", b"PAR1 and no more", r"can't read .*rows.parquet as Parquet"),
        ("rows.arrow", b"ARROW1 and no more", r"can't read .*rows.arrow as Arrow"),
        ("rows.jsonl.gz", b"not compressed", r"can't read .*rows.jsonl.gz: Not a gzipped file"),
        (
            "rows.jsonl.gz",
            gzip.compress(b"{}\n" * 999, mtime=0)[:-9],
            r"can't read .*rows.jsonl.gz: Compressed file ended before",
        ),
        (
            "rows.csv.gz",
            gzip.compress(b"a\n" * 999, mtime=0)[:-9],
            r"can't read .*rows.csv.gz: Compressed file ended before",
        ),
        ("rows.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9, r"can't read .*rows.jsonl.gz: Error -3"),
        ("rows.jsonl.zst", b"\x28\xb5\x2f\xfd", r"only gzip \(.gz\) is read; unpack it first"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\n", r"rows.parquet:1: a pointer of Git LFS"),
        ("rows.jsonl", b'{\n "prompt": "a"\n}\n', r"rows.jsonl:1: not valid JSON: .*; write each row on one line"),
        ("rows.jsonl", b'[\n{"prompt": "a"}\n]\n', r"whose name ends in .json"),
        ("notes.md", b"# rows", r"notes.md:1: not valid JSON"),
        (
            "rows.txt",
            b"prompt,completion\n",
            r"rows.txt:1: not valid JSON, .* end in none of .*.csv.*; name it by its fo",
        ),
        ("rows.csv", b"prompt,\na,b\n", r"rows.csv:2: the cell 'b' has a column without a name"),
        ("rows.jsonl", '{"prompt": "a"}'.encode("utf-16"), r"rows.jsonl:1: not UTF-8: .*; save the file as UTF-8"),
        ("rows.json", b'{"rows": [\n{"prompt": "a"}\n]}', r"one object with rows; write the list 'rows' alone into"),
        (
            "rows.json",
            b'{"prompt": {"0": "a"}}',
            r"one object with a whole table; with pandas write df.to_json\(path, orient",
        ),
        ("rows.json", b'{"0": {"prompt": "a"}, "1": {"prompt": "b"}}', r"one object with a whole table; with pandas"),
        ("rows.json", b'{"columns": ["prompt"], "index": [0], "data": [["a"]]}', r"one object with a whole table; wi"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (
            pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"]),
            "several columns 'prompt'",
        ),
        (pyarrow.table({"time": pyarrow.array([2**62], pyarrow.timestamp("us"))}), "after row 0: .*out of range"),
        (
            pyarrow.table({"prompt": pyarrow.array([b"\xff"]).view(pyarrow.string())}),
            "after row 0: 'utf-8' codec can't decode",
        ),
    ],
)
def test_a_table_whose_values_python_can_not_hold_is_named(tmp_path: Path, table: pyarrow.Table, problem: str) -> None:
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=problem):
        read_file(tmp_path / "rows.parquet")


@pytest.mark.parametrize("pattern", ["", "*", "*.jsonl"])
def test_a_link_to_a_file_that_is_gone_is_not_left_out(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.jsonl").symlink_to("gone/b.jsonl")
    with pytest.raises(DataError, match=r"b.jsonl: it is a link to gone/b.jsonl, which does not exist"):
        list(read_file(tmp_path / pattern))


def test_hidden_files_of_a_folder_are_no_data(tmp_path: Path) -> None:
    for name, row in ((".train-0.jsonl.PID-7", ROWS[0]), (".train-1.jsonl", ROWS[0]), ("train-2.jsonl", ROWS[1])):
        write(tmp_path / name, [row])
    for path in (tmp_path, tmp_path / "*.jsonl"):
        assert [row for _, row in read_file(path)] == [ROWS[1]]


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link.jsonl").symlink_to("gone.jsonl")
    for name, problem in (
        ("rows.csv", "can't read .*rows.csv: there is no such file"),
        ("rows.parquet", "can't read .*rows.parquet: there is no such file"),
        ("*.parquet", r"no file matches .*\*.parquet"),
        (".", "holds no data file"),
        ("a" * 300, "File name too long|there is no such file"),  # the latter from Python 3.14 on
        ("links/link.jsonl", "it is a link to gone.jsonl, which does not exist"),
    ):
        with pytest.raises(DataError, match=problem):
            read_file(tmp_path / name)
