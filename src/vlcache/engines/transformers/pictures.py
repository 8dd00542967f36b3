"""Two levels of knowing a picture, so that a known one is neither decoded, preprocessed nor encoded.

    file's bytes  --known-->  pixel digest  ------------------------------>  entry in the store
         |                        ^                                              ^
         +-- new: decode ---------+                        new: preprocess, encode

The pixel digest is the picture's identity; the bytes' digest only leads to it. Both cover the processor's settings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlcache.errors import InputError, MediaError
from vlcache.keys import digest, fingerprint_settings, tensor_bytes
from vlcache.media import Picture, Source, open_picture, pixel_digest
from vlcache.report import Counters

__all__ = ["Known", "Media", "Reader", "media_from_inputs", "processor_fingerprint", "smallest_picture"]

Grid = tuple[int, int, int]

_REMEMBERED = 65_536


class Known:
    """What is remembered of pictures besides their entries: a few hundred bytes each, bounded in number."""

    def __init__(self) -> None:
        self._contents: OrderedDict[str, str] = OrderedDict()
        self._grids: OrderedDict[str, Grid] = OrderedDict()

    def content(self, data_digest: str) -> str | None:
        """Pixel digest of a file that has been decoded before."""
        return self._contents.get(data_digest)

    def grid(self, content: str) -> Grid | None:
        """Patch grid of a picture that has been preprocessed before."""
        return self._grids.get(content)

    def remember(self, content: str, data_digest: str | None, grid: Grid) -> None:
        self._put(self._grids, content, grid)
        if data_digest is not None:
            self._put(self._contents, data_digest, content)

    @staticmethod
    def _put(table: OrderedDict[str, Any], key: str, value: Any) -> None:
        table[key] = value
        table.move_to_end(key)
        if len(table) > _REMEMBERED:
            table.popitem(last=False)


class Media:
    """One picture of a prompt.

    Parameters
    ----------
    content : str
        The picture's identity.
    preprocess : callable
        Gives the encoder's input and the patch grid; called once, and only if one of them is needed.
    grid : tuple of int or None
        The patch grid where it is known already.
    """

    def __init__(self, content: str, preprocess: Callable[[], tuple[Tensor, Grid]], grid: Grid | None = None) -> None:
        self.content = content
        self._preprocess = preprocess
        self._grid = grid
        self._patches: Tensor | None = None

    @property
    def grid(self) -> Grid:
        if self._grid is None:
            self._patches, self._grid = self._preprocess()
        return self._grid

    def patches(self) -> Tensor:
        """The encoder's input, `[t * h * w, patch]`."""
        if self._patches is None:
            self._patches, self._grid = self._preprocess()
        return self._patches


def processor_fingerprint(processor: Any) -> str:
    """Digest of an image processor's settings, read anew each time because they can be set on the object."""
    return fingerprint_settings(type(processor).__name__, processor.to_dict())


def smallest_picture(processor: Any) -> int:
    """Vision tokens of the smallest picture that an image processor makes; 1 where it does not say."""
    size = processor.size if isinstance(processor.size, Mapping) else vars(processor.size)
    side = int(processor.patch_size * processor.merge_size)
    return max(1, int(size.get("shortest_edge") or 0) // side**2)


class Reader:
    """Opens and identifies the pictures of chats.

    Parameters
    ----------
    max_pixels : int
        Larger pictures are refused from their header.
    counters : Counters
        Where decodes, preprocessings and the two levels' hits are counted.
    """

    def __init__(self, max_pixels: int, counters: Counters) -> None:
        self._max_pixels = max_pixels
        self._counters = counters
        self._known = Known()

    def read(self, sources: Sequence[Source], processor: Any, settings: str) -> list[Media]:
        """Open every picture, then identify each.

        Parameters
        ----------
        processor : transformers image processor
        settings : str
            Its fingerprint.

        Raises
        ------
        MediaError
            The first picture that cannot be read, decoded or processed.
        """
        pictures = [open_picture(source, number) for number, source in enumerate(sources, 1)]
        return [self._identify(picture, processor, settings) for picture in pictures]

    def _identify(self, picture: Picture, processor: Any, settings: str) -> Media:
        """By the file's bytes if they are known, else by its pixels."""
        known, counters = self._known, self._counters
        data_digest = picture.data_digest(settings)
        content = known.content(data_digest) if data_digest is not None else None
        image = None
        if content is not None:
            counters.known_files += 1
        else:
            image = self._decode(picture)
            content = pixel_digest(image, settings)
            if known.grid(content) is not None:
                counters.known_pictures += 1
            else:
                counters.new_pictures += 1
        media = Media(content, lambda: self._preprocess(picture, image, processor), known.grid(content))
        known.remember(content, data_digest, media.grid)
        return media

    def _decode(self, picture: Picture) -> Image.Image:
        self._counters.decoded += picture.data is not None
        return picture.decode(self._max_pixels)

    def _preprocess(self, picture: Picture, image: Image.Image | None, processor: Any) -> tuple[Tensor, Grid]:
        image = image or self._decode(picture)
        self._counters.preprocessed += 1
        try:
            out = processor(images=[image], return_tensors="pt")
        except Exception:
            long, short = max(image.size), max(1, min(image.size))
            problem = f"the processor refuses {image.width}x{image.height} pixels (aspect ratio {long / short:.0f}:1)"
            raise MediaError(picture.label, problem, "cut it into parts or change its size") from None
        t, h, w = out["image_grid_thw"][0].tolist()
        return out["pixel_values"], (t, h, w)


def media_from_inputs(inputs: Mapping[str, Any], settings: str) -> list[Media]:
    """The pictures in a processor's output; identified by their patches, which are all that is left of them.

    Raises
    ------
    InputError
        Patches and grids that do not fit, or video.
    """
    if "role" in inputs:
        raise InputError("one message is not a chat; put it into a list")
    if inputs.get("pixel_values_videos") is not None or inputs.get("video_grid_thw") is not None:
        raise InputError("the inputs hold a video, which is not supported yet; give pictures")
    pixels, grids = inputs.get("pixel_values"), inputs.get("image_grid_thw")
    if pixels is None and grids is None:
        return []
    if not isinstance(pixels, Tensor) or not isinstance(grids, Tensor):
        raise InputError(
            "pixel_values and image_grid_thw go together, as tensors; call the processor with return_tensors='pt'"
        )
    sizes = grids.prod(-1).tolist()
    if sum(sizes) != len(pixels):
        raise InputError(f"pixel_values has {len(pixels)} patches, image_grid_thw says {sum(sizes)}")
    media = []
    for grid, patches in zip(grids.tolist(), torch.split(pixels, sizes), strict=True):
        content = digest("patches", settings, str(grid), str(patches.dtype), tensor_bytes(patches))
        shape = (grid[0], grid[1], grid[2])
        media.append(Media(content, partial(_ready, patches, shape), shape))
    return media


def _ready(patches: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
    return patches, grid
