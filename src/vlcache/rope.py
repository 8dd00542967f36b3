"""Moving cached keys to new rotary positions.

A cached key was rotated by the angles of the positions where it was captured. Used elsewhere it needs the angles
of its new positions: one more rotation by the difference. Values carry no position.

    kind                positions   axis of frequency j (head dim 16, 8 frequencies, sections 2, 3, 3)
    1d                  [1, N]      0 0 0 0 0 0 0 0
    mrope               [3, N]      0 0 1 1 1 2 2 2      t, then h, then w
    mrope-interleaved   [3, N]      0 1 2 0 1 2 0 1      t h w t h w ..., t takes what is left

Positions are given per token and axis, so a picture that slides along (t, h and w move alike), a video step that
moves by a vector and a plain 1-D shift are one case.

The engine computes an angle as float32(position) * float32(frequency), rounded to float32. The difference here is
taken between *those* rounded angles, in float64: at position 10,000 the rounding alone is 5e-4 rad, and a key
moved by the exact difference would no longer equal the key that the engine would compute there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Rope", "Rotation", "rotate"]

RopeKind = Literal["1d", "mrope", "mrope-interleaved"]


@dataclass(frozen=True, slots=True)
class Rope:
    """A model's rotary embedding, in the layout that rotates the two halves of a head.

    Attributes
    ----------
    kind : {"1d", "mrope", "mrope-interleaved"}
    frequencies : tuple of float
        Inverse frequencies in rad per position, one per rotated pair, exactly as float32 holds them.
    sections : tuple of int
        Pairs that belong to t, h and w; empty for "1d".
    scaling : float
        Factor on cos and sin (YaRN's attention factor); rotations leave it alone.
    """

    kind: RopeKind
    frequencies: tuple[float, ...]
    sections: tuple[int, ...] = ()
    scaling: float = 1.0

    @property
    def axes(self) -> int:
        """How many position axes the embedding reads (1 or 3)."""
        return 1 if self.kind == "1d" else 3

    def axis_of_pair(self) -> list[int]:
        """The axis whose position turns each pair, `[len(frequencies)]`."""
        pairs = len(self.frequencies)
        if self.kind == "1d":
            return [0] * pairs
        if self.kind == "mrope":
            return [axis % 3 for axis, size in enumerate(self.sections) for _ in range(size)]
        axis_of = [0] * pairs
        for axis in (1, 2):
            for pair in range(axis, min(self.sections[axis] * 3, pairs), 3):
                axis_of[pair] = axis
        return axis_of

    def angles(self, positions: Tensor) -> Tensor:
        """Angles as the engine computes them.

        Parameters
        ----------
        positions : Tensor, int, `[axes, N]`

        Returns
        -------
        Tensor, float32, `[N, len(frequencies)]`, rad
        """
        device = positions.device
        axis_of = torch.tensor(self.axis_of_pair(), device=device)
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=device)
        return positions.float()[axis_of].T * frequencies

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine over a whole head, `[N, 2 * len(frequencies)]` each, as the engine rounds them."""
        angles = self.angles(positions)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)

    def turn(self, old: Tensor, new: Tensor) -> Rotation | None:
        """The rotation that takes keys from positions `old` to `new`, both `[axes, N]`; None if they are equal."""
        if torch.equal(old, new):
            return None
        difference = self.angles(new).double() - self.angles(old).double()
        cos, sin = difference.cos().float(), difference.sin().float()
        return Rotation(torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None])


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and signed sine of a turn over both halves of a head, float32, `[N, 1, 2 * pairs]` each."""

    cos: Tensor
    sin: Tensor

    def rows(self, start: int, stop: int) -> Rotation:
        """The rotation of tokens `start` to `stop`, as views."""
        return Rotation(self.cos[start:stop], self.sin[start:stop])


def rotate(keys: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate keys in float32.

    Parameters
    ----------
    keys : Tensor, `[N, H, D]`
        Keys as captured, with their own rotation in them. Of D the part that the rotation covers is turned.
    rotation : Rotation or None
        None leaves the keys as they are.

    Returns
    -------
    Tensor, `[N, H, D]`, in the dtype of `keys`; a new tensor, except where nothing had to move
    """
    if rotation is None:
        return keys
    width = rotation.cos.shape[-1]
    wide = keys[..., :width].float()
    swapped = torch.cat((wide[..., width // 2 :], wide[..., : width // 2]), dim=-1)
    turned = swapped.mul_(rotation.sin).addcmul_(wide, rotation.cos).to(keys.dtype)
    return turned if width == keys.shape[-1] else torch.cat((turned, keys[..., width:]), dim=-1)
