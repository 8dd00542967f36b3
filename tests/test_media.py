"""Opening, checking and fingerprinting pictures; the numbers are those of the cases in public reports."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageFile

from vlcache.errors import MediaError
from vlcache.media import Picture, open_picture, pixel_digest

LIMIT = 64_000_000
SETTINGS = "processor settings"


def make_picture(width: int = 24, height: int = 16, mode: str = "RGB", seed: int = 1) -> Image.Image:
    """Noise, the same each time."""
    size = width * height * len(Image.new(mode, (1, 1)).getbands())
    data = b"".join(bytes([(i * i * 31 + i * 7 + seed * 101) >> 3 & 255]) for i in range(size))
    return Image.frombytes(mode, (width, height), data)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decode(source: Any, max_pixels: int = LIMIT) -> Image.Image:
    image = open_picture(source, 1).decode(max_pixels)
    assert image.mode == "RGB"
    return image


def identity(source: Any, settings: str = SETTINGS) -> str:
    return pixel_digest(decode(source), settings)


def data_digest(data: bytes, settings: str = SETTINGS) -> str | None:
    return open_picture(data, 1).data_digest(settings)


def refusal(action: Callable[[], object], item: str = "picture 1") -> str:
    """The message of a MediaError that names the item, a problem and a remedy, and shows no other error's text."""
    with pytest.raises(MediaError) as caught:
        action()
    message = str(caught.value)
    assert caught.value.item == item
    assert message.startswith(f"{item}: ")
    problem, _, remedy = message.removeprefix(f"{item}: ").partition("; ")
    assert all((problem, remedy))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def huge_png(width: int, height: int) -> bytes:
    """A PNG that says how large it is and holds ten bytes of it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10))) + chunk(b"IEND", b"")


def test_case_5_the_same_bytes_in_another_shape_are_another_picture() -> None:
    wide = make_picture(150, 30)
    tall = Image.frombytes("RGB", (30, 150), wide.tobytes())
    assert len({identity(source) for source in (wide, tall, encode(wide), encode(tall))}) == 2


def test_case_6_jpegs_with_the_same_first_1000_base64_characters_are_two() -> None:
    image = make_picture(160, 160)
    other = image.copy()
    other.paste((255, 0, 0), (0, 140, 160, 160))
    a, b = encode(image, "JPEG"), encode(other, "JPEG")
    assert base64.b64encode(a)[:1000] == base64.b64encode(b)[:1000]
    assert len({data_digest(a), data_digest(b), identity(a), identity(b)}) == 4


def test_case_7_a_file_overwritten_at_its_path_is_another_picture(tmp_path: Path) -> None:
    path, seen = tmp_path / "page.png", set()
    for seed in (1, 2):
        make_picture(seed=seed).save(path)
        os.utime(path, (1, 1))
        seen |= {open_picture(path, 1).data_digest(SETTINGS), identity(path)}
    assert len(seen) == 4


def test_case_8_bytes_cannot_pass_for_settings() -> None:
    data = encode(make_picture())
    assert len({data_digest(data + b"x", "s"), data_digest(data, "sx"), data_digest(data, "xs")}) == 3


def test_case_10_lossless_copies_are_one_picture_in_two_files() -> None:
    image = make_picture(50, 40)
    files = [encode(image), encode(image, "WEBP", lossless=True), encode(image, "BMP"), encode(image, compress_level=0)]
    assert {identity(data) for data in files} == {identity(image)}
    assert len({data_digest(data) for data in files}) == len(files)
    assert identity(encode(image, "JPEG")) != identity(image), "a lossy copy is another picture"


def test_pixels_and_the_processors_settings_make_the_digests() -> None:
    image, other = make_picture(), make_picture()
    other.putpixel((23, 15), (1, 2, 3))
    assert identity(image) != identity(other)
    assert identity(image, "a") != identity(image, "b")
    assert data_digest(encode(image), "a") != data_digest(encode(image), "b")
    assert data_digest(encode(image), "a") != identity(image, "a")


def test_every_kind_of_source_gives_the_same_picture(tmp_path: Path) -> None:
    path, data = tmp_path / "a page ä.png", encode(make_picture())
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, bytearray(data), path, str(path), path.as_uri(), url):
        assert open_picture(source, 1).data_digest(SETTINGS) == data_digest(data)
        assert identity(source) == identity(data) == identity(make_picture())
    assert open_picture(make_picture(), 1).data_digest(SETTINGS) is None, "pixels have no file to hash"


def test_case_29_a_files_name_has_no_part_in_its_identity_and_folders_are_not_shown(tmp_path: Path) -> None:
    data = encode(make_picture())
    for name in ("a.png", "b.jpg"):
        (tmp_path / name).write_bytes(data)
        assert open_picture(tmp_path / name, 1) == Picture(f"picture 1 ({name})", data, None)
    message = refusal(lambda: open_picture("../../secret-folder/x.png", 2), "picture 2 (x.png)")
    assert "secret-folder" not in message


def test_case_30_a_jpeg_cut_short_is_refused() -> None:
    message = refusal(lambda: decode(encode(make_picture(64, 64), "JPEG")[:-128]))
    assert "damaged or cut short" in message
    assert not any(word in message for word in ("truncated", "processed"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "MPO"])
def test_cases_30_and_34_every_format_is_accepted_and_refused_where_cut_short(kind: str) -> None:
    options = {"save_all": True, "append_images": [make_picture(64, 64, seed=2)]} if kind == "MPO" else {}
    data = encode(make_picture(64, 64), kind, **options)
    assert decode(data).size == (64, 64)
    for keep in (0.2, 0.4) if kind == "MPO" else (0.5, 0.9):
        refusal(lambda keep=keep: decode(data[: int(len(data) * keep)]))


def test_a_decoders_words_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the file says: my secret")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    assert "secret" not in refusal(lambda: decode(encode(make_picture())))


@pytest.mark.parametrize("size", [(26, 28), (27, 257), (1, 1), (1, 3000)])
def test_case_31_odd_sizes_are_read(size: tuple[int, int]) -> None:
    assert decode(encode(Image.new("RGB", size))).size == size


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_case_32_exif_orientation_is_applied(kind: str) -> None:
    image = Image.new("RGB", (24, 16), "white")
    image.paste((200, 0, 0), (0, 8, 12, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode(encode(image, kind, exif=exif))
    assert turned.size == (16, 24)
    red, green, _ = turned.getpixel((3, 4))
    assert red > 150 > 80 > green, "the lower left belongs to the upper left"
    assert identity(encode(image, kind, exif=exif)) != identity(encode(image, kind))


def test_case_33_transparent_is_laid_on_white() -> None:
    image = Image.new("RGBA", (3, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    image.putpixel((2, 0), (0, 0, 0, 128))
    for source in (image, encode(image), encode(image, "WEBP", lossless=True, exact=True)):
        pixels = decode(source)
        assert [pixels.getpixel((x, 0)) for x in range(3)] == [(255, 255, 255), (10, 20, 30), (127, 127, 127)]
    grey = decode(encode(Image.merge("LA", [Image.new("L", (1, 1), 9), Image.new("L", (1, 1), 0)])))
    assert grey.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_case_33_a_transparent_colour_is_white(kind: str) -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    pixels = decode(encode(image, kind, transparency=0))
    assert [pixels.getpixel((x, 0)) for x in range(2)] == [(255, 255, 255), (0, 0, 255)]
    for colour, mode in (((9, 9, 9), "RGB"), (9, "L")):
        assert decode(encode(Image.new(mode, (1, 1), colour), transparency=colour)).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("side", [12_000, 20_000])
def test_case_35_a_huge_png_is_refused_from_its_header(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    def load(*_: object) -> None:
        raise AssertionError("decoded")

    for kind in (Image.Image, ImageFile.ImageFile):
        monkeypatch.setattr(kind, "load", load)
    message = refusal(lambda: decode(huge_png(side, side)))
    assert all(part in message for part in (f"limit of {LIMIT}", "max_image_pixels"))


def test_case_35_the_limit_counts_pixels_and_is_allowed_itself() -> None:
    for source in (make_picture(20, 10), encode(make_picture(20, 10))):
        assert decode(source, max_pixels=200).size == (20, 10)
        assert "20x10 pixels are over the limit of 199" in refusal(lambda s=source: decode(s, max_pixels=199))


def test_case_35_pillows_own_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over it raising max_image_pixels alone would not help."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    message = refusal(lambda: decode(encode(make_picture(20, 10)), max_pixels=1000))
    assert "over the limit of 100" in message
    assert "PIL.Image.MAX_IMAGE_PIXELS" in message


@pytest.mark.parametrize("length", [40, 400, 6000])
def test_case_36_bare_base64_is_told_to_write_a_data_url(length: int) -> None:
    text = base64.b64encode(encode(make_picture(60, 60)))[:length].decode()
    with pytest.raises(MediaError, match=r"picture 1 .*data:image/png;base64"):
        open_picture(text, 1)


@pytest.mark.parametrize("body", ["%%%", "iVBORw0KGgo", "iVBO!w0KGgo="])
def test_damaged_base64_is_refused(body: str) -> None:
    message = refusal(lambda: open_picture("data:image/png;base64," + body, 1))
    assert "base64 is damaged" in message
    assert not any(word in message for word in ("padding", "alphabet"))


def test_case_39_a_cmyk_jpeg_is_accepted() -> None:
    red, green, blue = decode(encode(Image.new("CMYK", (20, 10), (0, 255, 255, 0)), "JPEG")).getpixel((19, 9))
    assert red > 200 > 60 > max(green, blue)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_case_39_of_an_animation_the_first_frame_is_read(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert decode(data).tobytes() == frames[0].tobytes()


def test_case_39_files_that_are_no_pictures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "note.png").write_text("dear diary, this is a secret")
    message = refusal(lambda: decode(tmp_path / "note.png"), "picture 1 (note.png)")
    assert "not a picture of a known format" in message
    assert "diary" not in message
    (tmp_path / "empty.png").touch()
    assert "zero bytes" in refusal(lambda: open_picture(tmp_path / "empty.png", 1), "picture 1 (empty.png)")
    for source, told in (
        (b"", "zero bytes"),
        ("data:image/png;base64,", "zero bytes"),
        ("data:image/png", "without data"),
    ):
        assert told in refusal(lambda source=source: open_picture(source, 1))


@pytest.mark.parametrize("kind", ["EPS", "PDF", "PPM", "TGA"])
def test_formats_outside_the_list_are_refused(kind: str) -> None:
    message = refusal(lambda: decode(encode(make_picture(), kind)))
    assert all(name in message for name in ("PNG", "JPEG", "WEBP"))


def test_what_is_not_there_or_no_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "directory" in refusal(lambda: open_picture(tmp_path / "folder", 3), "picture 3 (folder)")
    assert "no such file" in refusal(lambda: open_picture(tmp_path / "gone.png", 2), "picture 2 (gone.png)")
    refusal(lambda: open_picture("nul\0.png", 1), "picture 1 (nul\0.png)")
    for source in (None, 7, ["a.png"], {"url": "a.png"}):
        assert f"a {type(source).__name__} is not" in refusal(lambda source=source: open_picture(source, 1))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_remote_addresses_are_not_fetched(scheme: str) -> None:
    assert "download" in refusal(lambda: open_picture(f"{scheme}://example.com/x.png", 4), "picture 4")


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled(kind: str) -> None:
    image = Image.frombytes("I;16", (4, 1), struct.pack("<4H", 0, 255, 0x8000, 0xFFFF))
    for source in (image, encode(image, kind)):
        assert [decode(source).getpixel((x, 0))[0] for x in range(4)] == [0, 0, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB", "RGBA", "LA", "RGBX", "I", "F"])
def test_every_mode_of_pixels_becomes_rgb(mode: str) -> None:
    image = Image.new(mode, (5, 4))
    assert decode(image).size == (5, 4)
    assert image.mode == mode, "the caller's picture was changed"
