"""What the scheduler's side of the connector tells the worker's, step by step. Picklable, and no tensors but pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vlcache.types import Span

__all__ = ["Asked", "Load", "Save", "Work", "spans_of"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as reuse has to know it.

    Attributes
    ----------
    request : str
        Its id.
    ids : tuple of int
        Token ids of the prompt, or of all there is after a preemption.
    spans : tuple of Span
        Its pictures, in order.
    blocks : tuple of int
        Where its K/V lie.
    """

    request: str
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fill a request's tokens `begin` to `end` on stored K/V.

    Attributes
    ----------
    reused : frozenset of int
        The pictures, by number, whose stored K/V take their place; the others are computed.
    pixels : mapping of int to item
        Of new pictures in between, what the encoder takes, by number.
    policy : str
        The request's own; empty: the configured one.
    """

    asked: Asked
    begin: int
    end: int
    reused: frozenset[int]
    pixels: Mapping[int, Any] = field(default_factory=dict)
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Save:
    """Make entries of pictures, by number, whose K/V this step has completed, on nothing but exact ones."""

    asked: Asked
    numbers: tuple[int, ...]


@dataclass
class Work(KVConnectorMetadata):  # type: ignore[misc]
    """One step's."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


def spans_of(features: Any, content_of: Any) -> tuple[Span, ...] | None:
    """The pictures of a request's multi-modal features; None where there is something else, or one that the front end
    did not identify."""
    spans = []
    for one in sorted(features, key=lambda f: f.mm_position.offset):
        content = content_of(one.identifier) if one.modality == "image" else None
        if content is None or one.data is None or "image_grid_thw" not in one.data:
            return None
        t, h, w = one.data["image_grid_thw"].data.tolist()
        spans.append(Span(content, one.mm_position.offset, one.mm_position.length, (t, h, w)))
    return tuple(spans)
