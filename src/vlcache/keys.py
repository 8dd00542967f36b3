"""Digests: what makes two pictures, two processors or two models the same.

Every digest is a full SHA-256 over fields that carry their own length, so that no two lists of fields can give the
same bytes (`("ab", "c")` and `("a", "bc")` differ).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vlcache.types import LAYOUT

__all__ = [
    "Sample",
    "digest",
    "digest_tenant",
    "fingerprint_samples",
    "fingerprint_settings",
    "fingerprint_weights",
    "sample",
    "scope",
    "tensor_bytes",
]

_SAMPLES = 64


def digest(*fields: str | bytes | memoryview) -> str:
    """SHA-256 over length-prefixed fields, as 64 hex digits."""
    h = hashlib.sha256()
    for value in fields:
        data = value.encode() if isinstance(value, str) else value
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        h.update(size.to_bytes(8, "big"))
        h.update(data)
    return h.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, row by row, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    buffer = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    buffer.owner = flat  # type: ignore[attr-defined]  # keeps the memory while the view lives
    return memoryview(buffer).cast("B")


def fingerprint_settings(name: str, settings: Mapping[str, object]) -> str:
    """Digest of a component's settings, independent of their order."""
    return digest(name, json.dumps(settings, sort_keys=True, default=str))


def fingerprint_weights(config: str, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """Digest of a model: its configuration and samples of every weight.

    Reading all weights takes seconds to minutes, so each tensor gives its name, shape, dtype and up to 64 values
    spread evenly over it, rounded to `dtype` if given. Two fine-tunes of one model differ; an edit of single elements
    may go unseen.
    """
    return fingerprint_samples(config, ((name, sample(weight, dtype)) for name, weight in weights))


@dataclass(frozen=True, slots=True)
class Sample:
    """A weight's shape and a few of its values, spread evenly over it."""

    shape: tuple[int, ...]
    values: Tensor


def sample(weight: Tensor, dtype: torch.dtype | None = None) -> Sample:
    """Copy up to 64 values of a weight, rounded to `dtype` if given."""
    flat = weight.detach().reshape(-1)
    n = min(flat.numel(), _SAMPLES)
    spread = torch.arange(n, device=flat.device) * (flat.numel() - 1) // max(1, n - 1)
    values = flat[spread]
    return Sample(tuple(weight.shape), values if dtype is None else values.to(dtype))


def fingerprint_samples(config: str, samples: Iterable[tuple[str, Sample]]) -> str:
    """`fingerprint_weights` of weights that have been sampled already."""
    fields: list[str | bytes | memoryview] = [config]
    for name, one in samples:
        fields += [name, str(one.shape), str(one.values.dtype), tensor_bytes(one.values)]
    return digest(*fields)


def digest_tenant(salt: str) -> str:
    """What entries say of their tenant: a salt is a secret, so it is not written down."""
    return digest("tenant", salt)


def scope(model: str, dtype: str, tenant: str) -> str:
    """Digest of everything besides the picture that an entry depends on."""
    return digest("scope", str(LAYOUT), model, dtype, tenant)
