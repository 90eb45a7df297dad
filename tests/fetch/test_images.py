"""Images of every origin become data URLs; what is damaged, too large or elsewhere is an error in words."""

import gc
import hashlib
import io
import random
import struct
import threading
import zlib
from contextlib import suppress
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.fetch.test_download import Quiet
from whet.base.errors import DataError
from whet.fetch import images
from whet.fetch.images import content_of_url, data_url, fingerprint, open_image, read_image


def file_of(kind: str = "PNG", size: tuple[int, int] = (5, 3), mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert(mode).save(file, kind, **options)
    return file.getvalue()


def test_png_and_jpeg_stay_byte_for_byte():
    for kind in ("PNG", "JPEG"):
        assert content_of_url(data_url(file_of(kind))) == file_of(kind)
        assert data_url(file_of(kind)).startswith(f"data:image/{kind.lower()};base64,")


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP"])
def test_other_formats_become_png_with_the_same_pixels(kind: str):
    content = file_of(kind, mode="P" if kind == "GIF" else "RGB")
    url = data_url(content)
    assert url.startswith("data:image/png;base64,")
    assert open_image(url).convert("RGB").tobytes() == Image.open(io.BytesIO(content)).convert("RGB").tobytes()


def test_every_origin_gives_the_same_url(tmp_path: Path):
    content = file_of()
    (tmp_path / "a.png").write_bytes(content)
    url = data_url(content)
    origins = [
        url,
        content,
        "a.png",
        str(tmp_path / "a.png"),
        Path("a.png"),
        {"bytes": content, "path": "elsewhere.png"},
        {"bytes": None, "path": "a.png"},
        {"path": "a.png"},
        {"url": url},
    ]
    assert {read_image(origin, tmp_path) for origin in origins} == {url}
    picture = Image.open(io.BytesIO(content))
    assert open_image(read_image(picture)).tobytes() == picture.tobytes()
    assert fingerprint(url) == fingerprint(read_image("a.png", tmp_path)) != fingerprint(data_url(file_of(size=(4, 4))))


def test_rows_with_the_same_image_hold_it_once_and_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = file_of("BMP", size=(7, 5))
    (tmp_path / "a.bmp").write_bytes(content)
    first = read_image("a.bmp", tmp_path)
    monkeypatch.setattr(images, "_decoded", None)
    assert read_image("a.bmp", tmp_path) is first
    assert read_image({"bytes": bytes(bytearray(content))}) is first


def test_a_photograph_is_turned_as_its_exif_data_say():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    url = data_url(file_of("JPEG", exif=exif))
    assert open_image(url).size == (3, 5)
    assert open_image(url).getexif().get(0x0112, 1) == 1


def test_colours_of_print_become_those_of_screens():
    assert open_image(data_url(file_of("JPEG", mode="CMYK"))).mode == "RGB"


def test_finer_shades_of_grey_become_the_nearest_of_256():
    shades = [0, 257 * 3, 257 * 128, 65535]
    grey = Image.new("I;16", (4, 1))
    grey.putdata(shades)
    file = io.BytesIO()
    grey.save(file, "PNG")
    assert open_image(data_url(file.getvalue())).tobytes() == bytes([0, 3, 128, 255])
    for mode in ("I", "F"):
        with pytest.raises(DataError, match=f"mode {mode} have no agreed white; convert the image to L or RGB"):
            read_image(grey.convert(mode))


@pytest.mark.parametrize(
    "path", ["../secret.png", "sub/../../secret.png", "link.png", "/secret.png", "{outside}/secret.png", "~/secret.png"]
)
def test_a_path_leads_nowhere_outside_of_the_folder(path: str, tmp_path: Path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(file_of())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=r"outside of the folder .*; set image_folder to a folder that contains it"):
        read_image(path.format(outside=tmp_path), folder)


def test_without_a_folder_no_path_is_read_and_no_address():
    with pytest.raises(DataError, match=r"only an image itself or its data URL is taken here, not 'cat\.png'"):
        read_image("cat.png")


@pytest.mark.parametrize("name", ["missing.png", "a folder", "a\0b.png", "x" * 5000, "~missing.png"])
def test_a_file_that_is_not_there_is_an_error(name: str, tmp_path: Path):
    (tmp_path / "a folder").mkdir()
    with pytest.raises(DataError, match="can't read the image"):
        read_image(name, tmp_path)


def damaged() -> dict[str, bytes]:
    png, jpeg = file_of(size=(64, 64)), file_of("JPEG", (64, 64))
    return {
        "nothing": b"",
        "a text": b"<html>404</html>",
        "a cut PNG": png[: len(png) // 2],
        "a cut JPEG": jpeg[: len(jpeg) // 2],
        "a cut header": png[:20],
        "a PNG without pixels": png[:33] + png[-12:],
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }


@pytest.mark.parametrize("name", damaged())
def test_a_damaged_file_is_an_error(name: str, tmp_path: Path):
    (tmp_path / "bad.png").write_bytes(damaged()[name])
    with pytest.raises(DataError, match=r"bad\.png: (the image is damaged|not an image in one of the formats)"):
        read_image("bad.png", tmp_path)


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that declares a square of this side."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8_000, 12_000, 60_000])
def test_an_image_that_declares_too_many_pixels_is_not_decoded(side: int):
    with pytest.raises(DataError, match=r"50,000,000"):
        data_url(bomb(side))


def test_a_file_or_a_url_of_too_many_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "MOST_BYTES", 50)
    (tmp_path / "a.png").write_bytes(file_of())
    for value in ("a.png", file_of(), "data:image/png;base64," + "A" * 100):
        with pytest.raises(DataError, match="bytes"):
            read_image(value, tmp_path)


def test_a_film_is_refused():
    frames = [Image.new("L", (4, 4), shade) for shade in (0, 90, 255)]
    for kind in ("GIF", "PNG", "WEBP"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        with pytest.raises(DataError, match="several frames"):
            data_url(file.getvalue())


@pytest.mark.parametrize(
    "url",
    ["data:text/html;base64,AAAA", "data:image/png,AAAA", "data:image/png;base64,A*A=", "data:image/png;base64,AAA"],
)
def test_a_wrong_data_url_is_an_error(url: str):
    with pytest.raises(DataError, match="data URL"):
        read_image(url)


@pytest.mark.parametrize("value", [None, 3, {}, {"bytes": None, "path": None}, ["a.png"], {"data": b""}])
def test_a_value_of_another_kind_is_an_error(value: object, tmp_path: Path):
    with pytest.raises(DataError, match="an image must be a path, an address with a hash, a data URL or the bytes"):
        read_image(value, tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bytes_are_an_image_or_an_error(data: st.DataObject):
    content = bytearray(file_of(data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"])), (16, 16), "L"))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DataError):
        open_image(data_url(bytes(content)))


def test_damaged_exif_data_are_an_image_or_an_error(recwarn: pytest.WarningsRecorder):
    gc.collect()  # what other tests left behind
    recwarn.clear()
    exif, draw = Image.Exif(), random.Random(0)
    exif[0x0112], exif[0x010E] = 6, "a photograph"
    whole = file_of("JPEG", exif=exif)
    for _ in range(1000):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 5)):
            content[draw.randrange(2, 120)] = draw.randrange(256)
        with suppress(DataError):
            data_url(bytes(content))
    assert not recwarn.list


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "a.png", f"http://127.0.0.1:{server.server_port}/a.png"
        server.shutdown()


def test_an_image_of_the_web_needs_its_hash_and_is_fetched_once(web, monkeypatch):
    file, address = web
    file.write_bytes(file_of())
    digest = hashlib.sha256(file_of()).hexdigest()
    with pytest.raises(DataError, match="must end in #sha256="):
        read_image(address, file.parent)
    with pytest.raises(DataError, match="is not the expected file"):
        read_image(f"{address}#sha256={'0' * 64}", file.parent)
    with monkeypatch.context() as patch:
        patch.setattr(images, "MOST_BYTES", 9)
        with pytest.raises(DataError, match="more than 9 bytes"):
            read_image(f"{address}#sha256={digest}", file.parent)
    assert read_image(f"{address}#sha256={digest}", file.parent) == data_url(file_of())
    file.unlink()
    assert read_image(f"{address}#sha256={digest}", file.parent) == data_url(file_of())
