"""Pictures show what they are asked about, and only a look at them pays."""

import asyncio
import json
from collections import Counter

import pytest
from PIL import Image

from whet.config import SettingsError
from whet.core.content import image_urls
from whet.core.types import Task
from whet.fetch.images import open_image
from whet.tasks.pictures import SHAPES, Pictures
from whet.tasks.validate import validate, wrong


def picture(task: Task) -> Image.Image:
    (url,) = image_urls(task.prompt)
    return open_image(url)


def painted(image: Image.Image) -> list[set[tuple[int, int]]]:
    """The connected areas of painted pixels."""
    pixels = image.load()
    colours = Counter(pixels[x, y] for x in range(image.width) for y in range(image.height))
    paper = colours.most_common(1)[0][0]
    left = {(x, y) for x in range(image.width) for y in range(image.height) if pixels[x, y] != paper}
    areas = []
    while left:
        area, todo = set(), [next(iter(left))]
        while todo:
            x, y = place = todo.pop()
            if place in left:
                left.remove(place)
                area.add(place)
                todo += [(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
        areas.append(area)
    return areas


def shape_of(area: set[tuple[int, int]]) -> str:
    """The shape that covers this share of its bounding box: all of it, three quarters, half."""
    width, height = (max(values) - min(values) + 1 for values in zip(*area, strict=True))
    covered = len(area) / (width * height)
    return "squares" if covered > 0.95 else "circles" if covered > 0.68 else "triangles"


@pytest.mark.parametrize("size", [32, 48, 64])
def test_a_picture_shows_as_many_shapes_as_the_answer_says(size: int):
    tasks = Pictures(kinds=("count",), size=size, train_size=60, test_size=0).tasks("train")
    for task in tasks:
        image = picture(task)
        assert image.size == (size, size)
        areas = painted(image)
        asked = next(name for name in SHAPES if name in task.prompt[0]["content"][1]["text"])
        count = int(task.data.answer)
        assert count <= len(areas) <= count + 2, "no shape touches another or is lost"
        if size == 64:  # large enough to tell shapes apart by their area
            assert sum(shape_of(area) == asked for area in areas) == count
    assert len({task.data.answer for task in tasks}) == 4


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_a_number_is_written_in_full(digits: int):
    tasks = Pictures(kinds=("digits",), size=64, digits=digits, train_size=9, test_size=0).tasks("train")
    for task in tasks:
        places = set().union(*painted(picture(task)))
        width, height = (max(values) - min(values) + 1 for values in zip(*places, strict=True))
        assert len(task.data.answer) == digits
        assert height >= 10
        assert width >= 8 * (digits - 1) + 2, "a digit is lost"


def test_pictures_depend_on_the_seed_alone_and_no_test_picture_is_trained_on():
    taskset = Pictures(train_size=40, test_size=10)
    train, test = taskset.tasks("train"), taskset.tasks("test")
    assert not {taskset.key(task) for task in train} & {taskset.key(task) for task in test}
    assert train == Pictures(train_size=40, test_size=10).tasks("train")
    assert train != Pictures(train_size=40, test_size=10, seed=1).tasks("train")
    assert len({task.uid for task in [*train, *test]}) == 50
    assert all(json.loads(json.dumps(task.columns)) == task.columns for task in train)
    assert {task.data.kind for task in train} == {"count", "digits"}


@pytest.mark.parametrize("settings", [{}, {"kinds": ("count",)}, {"kinds": ("digits",), "digits": 1}])
def test_every_case_earns_its_expected_reward(settings):
    graded = asyncio.run(validate(Pictures(train_size=30, test_size=5, **settings), samples=5))
    assert not wrong(graded)
    assert {one.kind for one in graded} >= {"good", "bad", "boundary", "adversarial", "gold"}


def test_a_constant_is_right_as_often_as_chance():
    tasks = Pictures(kinds=("count",), train_size=2000, test_size=0).tasks("train")
    counts = Counter(task.data.answer for task in tasks)
    assert set(counts) == {"1", "2", "3", "4"}
    assert max(counts.values()) < 0.3 * len(tasks)


def test_a_picture_too_small_for_its_shapes_is_an_error():
    with pytest.raises(SettingsError, match="size must be at least 24"):
        Pictures(size=16)
