"""Rows with images: in the parts of their messages, in a column, in files and in tables, in each kind of row."""

import base64
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from tests.fetch.test_images import file_of
from tests.tiny_vision import save_tiny_vision
from whet.base.errors import DataError
from whet.chat.renderer import Renderer
from whet.core.content import image_urls, words_of
from whet.data.in_memory import as_rows, write_rows
from whet.data.row import read_rows
from whet.data.row_kinds import Conversation, Preference, Prompt
from whet.data.rows import PreferenceRows, SupervisedRows, question_key
from whet.fetch.images import data_url, open_image
from whet.models.config import ModelConfig
from whet.models.loading import load_images, load_tokenizer
from whet.prep.config import PrepConfig
from whet.prep.prepare import prepare
from whet.tasks.prompts import Prompts

RED, BLUE = file_of(size=(4, 4)), file_of(size=(6, 2))
URLS = [data_url(RED), data_url(BLUE)]
REPLY = {"role": "assistant", "content": "Two."}


def image(url: str) -> dict[str, str]:
    return {"type": "image", "url": url}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return tmp_path


def read(folder: Path, kind: Any, *rows: dict[str, Any], **options: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_rows(str(path), kind, **options)


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


FORMS = {
    "a path": {"type": "image", "image": "pictures/red.png"},
    "a path under path": {"type": "image", "path": "pictures/red.png"},
    "whet's own": {"type": "image", "url": URLS[0]},
    "OpenAI's": {"type": "image_url", "image_url": {"url": URLS[0], "detail": "low"}},
    "OpenAI's responses": {"type": "input_image", "image_url": URLS[0]},
    "Anthropic's": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_in_the_parts_of_a_message(folder: Path, form: str):
    (row,) = read(folder, Conversation, {"messages": [user(text("How many?"), FORMS[form]), REPLY]})
    assert row.question == [user(text("How many?"), image(URLS[0]))]


def test_images_of_a_column_need_places_where_parts_have_images_too(folder: Path):
    row = {"messages": [user(image(URLS[0]), text("How many?")), REPLY], "images": ["blue.png"]}
    with pytest.raises(
        DataError, match=r"field 'messages' has images in its parts, and the row has 1 more in a column"
    ):
        read(folder, Conversation, row)
    for place in ({"type": "image"}, text("<image>")):
        (read_row,) = read(folder, Conversation, {**row, "messages": [user(image(URLS[0]), place), REPLY]})
        assert image_urls(read_row.question) == URLS


def test_placeholders_take_the_images_of_the_column_in_order(folder: Path):
    place = {"type": "image", "text": None}
    row = {
        "images": ["pictures/red.png", {"path": "blue.png"}],
        "messages": [user(place, text("This?")), REPLY, user(text("And this?"), place), REPLY],
    }
    (row,) = read(folder, Conversation, row)
    (answer,) = row.answers
    assert answer.messages == [
        user(image(URLS[0]), text("This?")),
        REPLY,
        user(text("And this?"), image(URLS[1])),
        REPLY,
    ]
    assert "images" not in (row.model_extra or {})
    assert json.loads(json.dumps(row.output())) == {"messages": answer.messages}, "prepared rows hold their images"


@pytest.mark.parametrize("key", ["value", "content"])
def test_marks_in_the_texts_of_the_user_are_places(folder: Path, key: str):
    who = "from" if key == "value" else "role"
    turns = [{who: "user", key: "<image>\nThis, or <image>?"}, {who: "assistant", key: "Neither <image>."}]
    name = "conversations" if key == "value" else "messages"
    (row,) = read(folder, Conversation, {name: turns, "images": ["pictures/red.png", "blue.png"]})
    parts = [image(URLS[0]), text("\nThis, or "), image(URLS[1]), text("?")]
    assert row.answers[0].messages == [user(*parts), {"role": "assistant", "content": "Neither <image>."}]


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_without_places_come_before_the_question(folder: Path, column: str):
    rows = [
        {"prompt": "How many?", "completion": "Two.", column: "blue.png"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}, REPLY]}
        | {column: ["blue.png"]},
    ]
    first, second = read(folder, Conversation, *rows)
    assert first.question == [user(image(URLS[1]), text("How many?"))]
    assert second.question == [{"role": "system", "content": "Be brief."}, user(image(URLS[1]), text("How many?"))]


def test_a_pair_whose_answers_repeat_the_question_and_one_whose_answers_do_not(folder: Path):
    asked = [user({"type": "image"}, text("How many?"))]
    better, worse = REPLY, {"role": "assistant", "content": "One."}
    common = {"images": ["blue.png"]}
    rows = [
        {"prompt": asked, "chosen": [better], "rejected": [worse], **common},
        {"prompt": asked, "chosen": [*asked, better], "rejected": [*asked, worse], **common},
        {"chosen": [*asked, better], "rejected": [*asked, worse], **common},
        {"prompt": "How many?", "chosen": "Two.", "rejected": "One.", **common},
    ]
    pairs = read(folder, Preference, *rows)
    shown = user(image(URLS[1]), text("How many?"))
    for pair in pairs:
        assert [answer.messages for answer in pair.answers] == [[shown, better], [shown, worse]]
    without = [{"role": "user", "content": "How many?"}, better]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: field 'chosen' has places for 0 images, and the row has 1"):
        read(folder, Preference, {"chosen": without, "rejected": [*asked, worse], **common})


def test_questions_with_different_images_differ(folder: Path):
    rows = read(folder, Prompt, *({"prompt": "How many?", "image": name} for name in ("blue.png", "pictures/red.png")))
    assert len({question_key(row) for row in rows}) == 2
    answers = {
        "chosen": [user(FORMS["a path"], text("How many?")), REPLY],
        "rejected": [user({"type": "image", "path": "blue.png"}, text("How many?")), REPLY],
    }
    with pytest.raises(DataError, match="'chosen' and 'rejected' must begin with the same message"):
        read(folder, Preference, answers)


def test_a_prompt_keeps_its_other_columns_and_is_prepared_with_its_image(folder: Path):
    (row,) = read(folder, Prompt, {"prompt": "How many?", "image": "blue.png", "answer": "2"})
    assert row.output() == {"prompt": [user(image(URLS[1]), text("How many?"))], "answer": "2"}
    (again,) = read(folder, Prompt, row.output())
    assert again.question == row.question


def test_prompts_as_tasks(folder: Path):
    rows = [{"prompt": "How many?", "image": name, "answer": str(n)} for n, name in enumerate(["blue.png", URLS[0]])]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = Prompts(path=str(folder / "rows.jsonl"), test_size=0).tasks("train")
    assert [image_urls(task.prompt) for task in tasks] == [[URLS[1]], [URLS[0]]]
    assert [words_of(task.prompt[0]["content"]) for task in tasks] == ["How many?"] * 2
    assert [task.data for task in tasks] == [{"answer": "0"}, {"answer": "1"}]


@pytest.mark.parametrize("several", [False, True])
def test_a_table_of_datasets_holds_the_bytes(folder: Path, several: bool):
    feature = datasets.Image()
    column = {"images": [[{"bytes": RED, "path": "a.png"}, {"bytes": BLUE, "path": None}]]}
    if not several:
        column = {"images": [{"bytes": RED, "path": "a.png"}]}
    features = datasets.Features(
        images=datasets.List(feature) if several else feature,
        messages=datasets.List({
            "role": datasets.Value("string"),
            "content": datasets.List({"type": datasets.Value("string"), "text": datasets.Value("string")}),
        }),
        thumbnail=datasets.Image(),
    )  # fmt: skip
    places = [{"type": "image", "text": None}] * (1 + several)
    messages = [user(*places, {"type": "text", "text": "?"}), {"role": "assistant", "content": [text("Two.")]}]
    rows = {**column, "messages": [messages], "thumbnail": [{"bytes": RED, "path": None}]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "rows.parquet")
    (row,) = read_rows(str(folder / "rows.parquet"), Conversation)
    assert image_urls(row.question) == URLS[: 1 + several]
    assert row.given["thumbnail"] == {}, "bytes that are not used are left out"


@pytest.mark.parametrize("value", [None, "", []])
def test_an_empty_column_holds_no_image(folder: Path, value: Any):
    (row,) = read(folder, Prompt, {"prompt": "Why?", "image": value})
    assert row.question == [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize("several", [False, True])
def test_a_data_set_of_the_hub_holds_the_bytes(folder: Path, several: bool, monkeypatch: pytest.MonkeyPatch):
    """A folder stands for the hub, which is read by the same library."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    feature = datasets.List(datasets.Image()) if several else datasets.Image()
    value = {"bytes": RED, "path": None}
    rows = {"images": [[value] if several else value], "prompt": ["How many?"]}
    features = datasets.Features(images=feature, prompt=datasets.Value("string"))
    (folder / "set").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "set" / "train.parquet")
    (row,) = read_rows(f"hf:{folder}/set:train", Prompt)
    assert image_urls(row.question) == [URLS[0]], "byte for byte"


def test_a_column_of_another_name(folder: Path):
    (row,) = read(folder, Prompt, {"prompt": "How many?", "photo": "blue.png"}, columns={"images": "photo"})
    assert image_urls(row.question) == [URLS[1]]


def test_image_folder_replaces_the_folder_of_the_file(folder: Path):
    options = {"image_folder": str(folder / "pictures")}
    (row,) = read(folder, Prompt, {"prompt": "How many?", "image": "red.png"}, **options)
    assert image_urls(row.question) == [URLS[0]]
    with pytest.raises(DataError, match="outside of the folder"):
        read(folder, Prompt, {"prompt": "How many?", "image": "../blue.png"}, **options)


PLACE = {"type": "image"}
WRONG = {
    "no such file": ({"prompt": "?", "image": "none.png"}, r"field 'image\[0\]': can't read the image .*none\.png"),
    "a damaged file": ({"prompt": "?", "image": "cut.png"}, r"field 'image\[0\]': .*cut\.png: the image is damaged"),
    "outside": ({"prompt": "?", "image": "/etc/passwd"}, "outside of the folder"),
    "no hash": ({"prompt": "?", "image": "https://a.b/c.png"}, "must end in #sha256="),
    "too few": (
        {"prompt": [user(PLACE, PLACE)], "images": ["blue.png"]},
        "field 'prompt' has places for 2 images, and the row has 1",
    ),
    "none": ({"prompt": [user(PLACE)]}, "field 'prompt' has places for 1 images, and the row has 0"),
    "too many": (
        {"prompt": [user(PLACE)], "images": ["blue.png"] * 2},
        "field 'prompt' has places for 1 images, and the row has 2",
    ),
    "marks": ({"prompt": "<image>?", "images": ["blue.png"] * 2}, "1 marks <image>, and the row has 2 images"),
    "without a user": ({"prompt": [{"role": "system", "content": "?"}], "image": "blue.png"}, "no message of the user"),
    "in a part": ({"prompt": [user({"type": "image", "image": "none.png"})]}, r"'prompt\[0\]\.content\[0\]': can't"),
    "a number": ({"prompt": "?", "image": 3}, "an image must be a path"),
    "audio": ({"prompt": [user({"type": "input_audio", "data": "AAAA"})]}, "not a part of type 'input_audio'"),
    "video": ({"prompt": [user({"type": "video", "video": "a.mp4"})]}, "not a part of type 'video'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_named(folder: Path, name: str):
    (folder / "cut.png").write_bytes(RED[:50])
    row, message = WRONG[name]
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{message}"):
        read(folder, Prompt, {"prompt": "Fine?"}, row)


def test_rows_in_memory_hold_images_of_pillow_and_bytes(folder: Path):
    shown = Image.open(folder / "blue.png")
    rows = [{"prompt": "How many?", "image": image} for image in (shown, RED, {"bytes": RED, "path": None})]
    placed = as_rows(rows)
    assert [len(image_urls(Prompt.of(*row).question)) for row in placed] == [1, 1, 1]
    write_rows(folder / "written.jsonl", placed)
    urls = [image_urls(row.question) for row in read_rows(str(folder / "written.jsonl"), Prompt)]
    assert urls[1:] == [[URLS[0]], [URLS[0]]]
    assert open_image(urls[0][0]).tobytes() == shown.tobytes()
    with pytest.raises(DataError, match="row 0 of data: column 'sound': not an image in one of the formats"):
        write_rows(folder / "written.jsonl", as_rows([{"prompt": "How many?", "sound": b"RIFF"}]))
    with pytest.raises(DataError, match=r"row 0 of data: field 'image\[0\]': only an image itself or its data URL"):
        Prompt.of(*as_rows([{"prompt": "How many?", "image": "blue.png"}])[0])


def test_an_image_in_a_reply_is_refused(folder: Path):
    with pytest.raises(DataError, match="must hold text only"):
        read(folder, Conversation, {"messages": [user(text("?")), {"role": "assistant", "content": [image(URLS[0])]}]})


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("vision")
    save_tiny_vision(folder)
    return ModelConfig(path=str(folder), vision="frozen")


def write(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def test_groups_of_rows_have_the_tokens_of_their_images(folder: Path, vision: ModelConfig):
    renderer = Renderer(load_tokenizer(vision), images=load_images(vision))
    path = write(folder, {"prompt": "How many?", "chosen": "Two.", "rejected": "One.", "image": "blue.png"})
    (group,) = PreferenceRows(path=path, test_size=0).groups(renderer)["train"]
    assert not isinstance(group, str)
    for trajectory in group.trajectories:
        assert sum(token < 0 for token in trajectory.tokens) == 4
        assert image_urls(trajectory.messages) == [URLS[1]]


def test_a_model_without_vision_refuses_rows_with_images_before_the_first_step(folder: Path, vision: ModelConfig):
    rows = [{"prompt": "What?", "completion": "That."}, {"prompt": "How?", "completion": "So.", "image": "blue.png"}]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the row has an image; set model\.vision"):
        SupervisedRows(path=write(folder, *rows)).groups(Renderer(load_tokenizer(vision)))


def test_a_model_with_vision_warns_where_no_row_has_an_image(
    folder: Path, vision: ModelConfig, caplog: pytest.LogCaptureFixture
):
    renderer = Renderer(load_tokenizer(vision), images=load_images(vision))
    row = {"prompt": "<image>What?", "completion": "That.", "photo": "blue.png"}
    warning = "no row has an image, although model.vision is set"
    SupervisedRows(path=write(folder, row), columns={"images": "photo"}).groups(renderer)
    assert warning not in caplog.text
    SupervisedRows(path=write(folder, row)).groups(renderer)
    assert caplog.text.count(warning) == 1


def test_an_image_that_the_processor_refuses_is_named_with_its_row(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
):
    model = tmp_path_factory.mktemp("qwen")
    save_tiny_vision(model, "qwen2_5_vl")
    config = ModelConfig(path=str(model), vision="frozen")
    renderer = Renderer(load_tokenizer(config), images=load_images(config))
    Image.new("RGB", (1, 900)).save(folder / "line.png")
    path = write(folder, {"prompt": "?", "completion": "!", "image": "line.png"})
    groups = SupervisedRows(path=path, test_size=0).groups(renderer)["train"]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*processor can't read an image of 1 x 900 pixels: .*ratio"):
        groups[0]


@pytest.mark.parametrize("duplicates", ["drop", "drop_near", "drop_questions"])
def test_prepared_rows_hold_their_images_and_equal_images_are_duplicates(
    folder: Path, vision: ModelConfig, duplicates: str
):
    asked = "How many circles of any colour are in this picture, or are there only squares?"
    rows = [
        {"prompt": asked, "completion": "2", "image": name} for name in ("blue.png", "pictures/red.png", "blue.png")
    ]
    source = {"rows": {"type": "supervised", "path": write(folder, *rows, rows[0] | {"image": "none.png"})}}
    values = {"sources": {"a": source}, "duplicates": duplicates, "validation": 0, "max_dropped": 0.5}
    settings = PrepConfig.from_values(values | {"model": vision.model_dump()})
    tally = prepare(settings, folder / "out").sources["a"]
    assert (tally.kept, tally.dropped) == (2, {"wrong": 1, "duplicate": 1})
    prepared = read_rows(str(folder / "out" / "train-*.jsonl"), Conversation)
    assert [image_urls(row.question) for row in prepared] == [[URLS[1]], [URLS[0]]]
