"""Opening, checking and fingerprinting pictures.

What a picture is made of decides what it is: a file is hashed as it lies (so that a known one is never decoded),
then decoded, turned as its EXIF orientation says, laid on white where it is transparent, and brought to RGB; the
digest of those pixels is its identity. Of an animation the first frame is read; 16-bit grey is scaled to 8 bits.
Losslessly re-encoded files therefore share one identity; a lossy copy is another picture.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from PIL import Image, ImageOps, UnidentifiedImageError

from vlcache.errors import MediaError
from vlcache.keys import digest

__all__ = ["Picture", "Source", "open_picture"]

Source = Image.Image | bytes | str | os.PathLike[str]

# Formats whose decoders are part of Pillow itself and start no other program
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_READER = "vlcache-reader-1"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that has been read but not decoded.

    Attributes
    ----------
    label : str
        For messages: "picture 2 (page.png)".
    data : bytes or None
        The file; None for a picture that came as pixels.
    image : PIL.Image.Image or None
        The pixels it came as.
    """

    label: str
    data: bytes | None
    image: Image.Image | None

    def data_digest(self, settings: str) -> str | None:
        """Digest of the file's bytes and how they would be read; None for a picture that came as pixels."""
        return None if self.data is None else digest(_READER, "bytes", settings, self.data)

    def decode(self, max_pixels: int) -> Image.Image:
        """The picture as RGB pixels, upright.

        Raises
        ------
        MediaError
            Too many pixels (found in the header), no picture, or a damaged one.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = self.image or Image.open(io.BytesIO(self.data or b""), formats=_FORMATS)
                if image.width * image.height > max_pixels:
                    raise MediaError(
                        self.label,
                        f"{image.width}x{image.height} pixels are over the limit of {max_pixels}",
                        "make it smaller or raise max_image_pixels",
                    )
                image.load()
                return _to_rgb(image)
        except MediaError:
            raise
        except Image.DecompressionBombError:
            limit = min(max_pixels, 2 * (Image.MAX_IMAGE_PIXELS or max_pixels))
            remedy = "make it smaller or raise max_image_pixels and PIL.Image.MAX_IMAGE_PIXELS"
            raise MediaError(self.label, f"its pixels are over the limit of {limit}", remedy) from None
        except UnidentifiedImageError:
            remedy = "give one of " + ", ".join(_FORMATS)
            raise MediaError(self.label, "not a picture of a known format", remedy) from None
        except Exception:
            # A decoder's own words may quote the file, so they are not passed on
            raise MediaError(self.label, "cannot be decoded, it is damaged or cut short", "save it again") from None


def pixel_digest(image: Image.Image, settings: str) -> str:
    """A picture's identity: its RGB pixels and the processor's settings."""
    return digest(_READER, "pixels", settings, image.mode, f"{image.width}x{image.height}", image.tobytes())


def open_picture(source: Source, number: int) -> Picture:
    """Read a picture's bytes, without decoding it.

    Parameters
    ----------
    source : PIL image, bytes, path, `file:` URL or `data:` URL
    number : int
        Its place among the prompt's pictures, from 1, for messages.

    Raises
    ------
    MediaError
        Nothing there, nothing in it, or a remote address.
    """
    label = f"picture {number}"
    if isinstance(source, Image.Image):
        return Picture(label, None, source)
    if isinstance(source, bytes | bytearray):
        return _with_data(label, bytes(source))
    if isinstance(source, str) and source.startswith("data:"):
        return _with_data(label, _data_url(label, source))
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise MediaError(label, "remote addresses are not fetched", "download it and give the file")
    if isinstance(source, str | os.PathLike):
        path = _local_path(source)
        label = f"{label} ({path.name[:80]})"
        try:
            return _with_data(label, path.read_bytes())
        except (OSError, ValueError) as error:
            reason = (getattr(error, "strerror", None) or "not a path").lower()
            remedy = "give a file, bytes, a PIL image or data:image/png;base64,..."
            raise MediaError(label, f"cannot be read ({reason})", remedy) from None
    kind = type(source).__name__
    raise MediaError(label, f"a {kind} is not a picture", "give a file, bytes, a PIL image or a data: URL")


def _with_data(label: str, data: bytes) -> Picture:
    if not data:
        raise MediaError(label, "has zero bytes", "save it again")
    return Picture(label, data, None)


def _local_path(source: str | os.PathLike[str]) -> Path:
    text = os.fspath(source)
    return Path(unquote(urlsplit(text).path)) if text.startswith("file://") else Path(text)


def _data_url(label: str, url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise MediaError(label, "a data: URL without data", "write data:image/png;base64,...")
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError(label, "its base64 is damaged", "encode it again") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        wide = image.convert("I").point(lambda value: value / 256)
        return wide.convert("L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
