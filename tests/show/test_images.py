"""Images of rollouts: stored once, shown small on pages and as labels in the terminal."""

import json
import random
from io import BytesIO, StringIO
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from tests.show.runs import record, small_run
from whet.core.content import image_urls
from whet.fetch.images import data_url, open_image
from whet.metrics.rollout_file import RolloutRecord, read_rollouts, rollout_path, write_rollouts
from whet.prep.rollouts import write_rows
from whet.show.images import label, shown, thumbnails
from whet.show.report import write_report
from whet.show.transcript import transcript
from whet.show.view import view
from whet.watch.search import Query, search, whole_episode


def photograph(seed: int = 0, extent: int = 400) -> str:
    """An image of several hundred kilobytes."""
    noise = random.Random(seed).randbytes(3 * extent * extent)
    file = BytesIO()
    Image.frombytes("RGB", (extent, extent), noise).save(file, "PNG")
    return data_url(file.getvalue())


def answers(url: str, count: int, step: int = 8) -> list[RolloutRecord]:
    records = [record(step, sample, correct=bool(sample % 2), pieces=["So", f" {sample}"]) for sample in range(count)]
    for one in records:
        one.messages[1]["content"] = [{"type": "image", "url": url}, {"type": "text", "text": "How many legs?"}]
    return records


def test_an_image_is_stored_once_and_read_back(tmp_path: Path) -> None:
    url = photograph()
    records = answers(url, 8)
    path = write_rollouts(tmp_path, 8, records)
    assert path.stat().st_size < 20_000 < len(url)
    (stored,) = (tmp_path / "rollouts" / "images").iterdir()
    assert data_url(stored.read_bytes()) == url
    assert list(read_rollouts(tmp_path, 8)) == records
    stored.unlink()
    (first, *_) = read_rollouts(tmp_path, 8)
    assert shown(first.messages[1]["content"]) == "[image]\nHow many legs?"


@pytest.mark.parametrize(
    "name", ["images/../../secret.png", "../secret.png", "/etc/passwd", "images/x.png", "file:///x"]
)
def test_a_name_of_an_image_leads_to_no_other_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    path = write_rollouts(tmp_path, 8, answers(name, 1))
    (read,) = read_rollouts(tmp_path, 8)
    assert image_urls(read.messages) == [name]
    assert "secret" not in json.dumps([part.images for part in transcript(read)])
    assert path.parent == rollout_path(tmp_path, 8).parent


def test_labels_and_thumbnails() -> None:
    url = photograph(extent=300)
    assert label(url) == "[image 300 x 300]"
    assert label("data:image/png;base64,AAAA") == "[image]"
    (small,) = thumbnails([{"type": "image", "url": url}])
    assert len(small) < 8_000
    assert open_image(small).size == (96, 96)
    assert thumbnails("no image") == thumbnails([{"type": "image", "url": "data:image/png;base64,AAAA"}]) == []
    assert len(thumbnails([{"type": "image", "url": url}] * 20)) == 4


def test_a_report_shows_thumbnails_and_grows_by_little(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    before = write_report(run).stat().st_size
    for step in range(5, 9):
        write_rollouts(run, step, answers(photograph(step), 16, step))
    html = write_report(run).read_text()
    assert html.count("data:image/") >= 20
    assert len(html) - before < 500_000
    assert photograph(8)[:200] not in html, "whole images stay in their files"
    assert "img-src data:" in html


def test_the_terminal_shows_labels(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 8, answers(photograph(), 2))
    console = Console(record=True, width=120, file=StringIO())
    view(tmp_path, console=console, page=False)
    text = console.export_text()
    assert "[image 400 x 400]" in text
    assert "How many legs?" in text
    assert "base64" not in text


def test_watch_finds_and_opens_answers_to_images(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 8, answers(photograph(), 3))
    found = search(tmp_path, [8], Query(text="how many LEGS"))["rollouts"]
    assert len(found) == 3
    assert not search(tmp_path, [8], Query(text="base64"))["rollouts"]
    (card, *_) = whole_episode(tmp_path, (8, 0))["cards"]
    (part,) = (part for part in card["parts"] if part["label"] == "user")
    assert part["text"] == "[image 400 x 400]\nHow many legs?"
    assert part["images"][0].startswith("data:image/jpeg")


def test_answers_to_images_become_rows_with_images(tmp_path: Path) -> None:
    url = photograph(extent=20)
    write_rollouts(tmp_path, 8, answers(url, 4))
    write_rows(tmp_path, tmp_path / "rows.jsonl", "pairs")
    (first, *_) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert image_urls(first["prompt"]) == [url]
