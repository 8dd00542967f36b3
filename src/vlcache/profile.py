"""A model's profile: what reuse costs it, layer by layer, and the numbers that its policies take from that.

`vlcache profile` measures it; a model's directory may carry it as `vlcache-profile.json`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from vlcache.errors import ConfigError
from vlcache.policies.auto import Auto
from vlcache.policies.band import Band
from vlcache.policies.base import Policy
from vlcache.policies.front import Layered
from vlcache.policies.none import NoRecompute
from vlcache.policies.parse import parse_policy
from vlcache.policies.verified import Verified

__all__ = ["FORMAT", "PROFILE_NAME", "VERSION", "Profile", "read_profile"]

FORMAT = "vlcache-profile"
VERSION = 2
PROFILE_NAME = "vlcache-profile.json"
"""What a profile is called in a model's directory."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured of a model on calibration pairs, and what follows from it.

    Attributes
    ----------
    model : str
        Fingerprint of its configuration and weights, whatever dtype they are loaded in.
    layers : int
        L.
    pairs : int
        Prompts in two contexts that it was measured on.
    alone, alone_flips : tuple of float
        By layer l: divergence of the answer (KL, nats) when the picture's K/V of that layer alone are reused, and the
        share of answers that differ.
    onward, onward_flips : tuple of float
        By layer l: when those of all layers from l on are.
    deep : tuple of float
        By layer m: agreement with full recompute when all of a picture's tokens are computed from m on, where text of
        its turn changed what was read into it. Empty where no pair showed that.
    budgets : tuple of float
        By layer the share of a picture's leading tokens to compute; never grows with depth.
    predicted_kl : float
        Of the budgets, by the sum over layers.
    measured_kl : float or None
        Of the budgets, on `held_out` pairs that they were not solved on; None where there were none.
    held_out : int
    band : tuple or None
        `(enter, narrow, share)` of `vlcache.policies.Band`; None where none was found that is less than everything.
    at_once : bool
        Whether the band is computed wherever text of the turn changed, because looks there miss more than their risk.
    tau, probes, sure
        Of `vlcache.policies.Verified`.
    checked : int
        Pairs that checks and looks were calibrated on.
    agreement : float
        With full recompute, where the check decides, on those pairs.
    measured : mapping of str
        How: the data, the seed, the dtype, the release. Nothing reads it.
    """

    model: str
    layers: int
    pairs: int
    alone: tuple[float, ...]
    alone_flips: tuple[float, ...]
    onward: tuple[float, ...]
    onward_flips: tuple[float, ...]
    deep: tuple[float, ...]
    budgets: tuple[float, ...]
    predicted_kl: float
    measured_kl: float | None
    held_out: int
    band: tuple[int, int, float] | None
    at_once: bool
    tau: float
    probes: int
    sure: float
    checked: int
    agreement: float
    measured: Mapping[str, Any] = field(default_factory=dict)

    def policy(self, text: str) -> Policy:
        """A policy as it is written, with the profile's numbers where it is written without any: `auto`, `layered`."""
        return {"auto": self.auto, "layered": self.layered}.get(text, lambda: parse_policy(text))()

    def layered(self) -> Policy:
        return Layered(self.budgets)

    def auto(self) -> Policy:
        base: Policy = Layered(self.budgets) if any(self.budgets) else NoRecompute()
        band = None if self.band is None else Band(*self.band)
        repair = None if self.at_once else band
        verified = Verified(self.tau, self.probes, repair=repair, sure=self.sure, calm=False)
        return Auto(verified, band if self.at_once else None, base)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        return {"format": FORMAT, "format_version": VERSION} | asdict(self)

    def check_model(self, fingerprint: str, layers: int, where: str) -> None:
        """ConfigError unless it was measured on this model."""
        if (self.model, self.layers) != (fingerprint, layers):
            raise ConfigError(
                f"profile {where}: measured on another model ({self.model[:12]}, {self.layers} layers; this one is "
                f"{fingerprint[:12]}, {layers}); run `vlcache profile` on this one"
            )


def read_profile(path: Path) -> Profile:
    """Read and check a profile.

    Budgets that grow with depth, as somebody may write them by hand, are widened with a warning: a row that is computed
    in one layer is computed in all before it.

    Raises
    ------
    ConfigError
        No file, no profile, another version, or numbers out of range.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}; write one with `vlcache profile`") from None
    except ValueError:
        raise ConfigError(f"profile {path}: not JSON; write one with `vlcache profile`") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"profile {path}: is none; write one with `vlcache profile`")
    if data.get("format_version") != VERSION:
        raise ConfigError(
            f"profile {path}: format version {data.get('format_version')}, this release reads {VERSION}; "
            "run `vlcache profile` again"
        )
    try:
        profile = _parse(data)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"profile {path}: {error}; run `vlcache profile` again") from None
    widened = tuple(accumulate(reversed(profile.budgets), max))[::-1]
    if widened != profile.budgets:
        warnings.warn(f"profile {path}: budgets grow with depth; the layers before are widened to them", stacklevel=2)
    return replace(profile, budgets=widened)


def _parse(data: dict[str, Any]) -> Profile:
    """ValueError, KeyError or TypeError where it is not what it should be."""
    needed = [one.name for one in fields(Profile) if one.default_factory is MISSING]
    missing = [name for name in needed if name not in data]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    layers, band = int(data["layers"]), data["band"]
    for name in ("alone", "alone_flips", "onward", "onward_flips", "budgets"):
        if len(data[name]) != layers:
            raise ValueError(f"{name} has {len(data[name])} numbers for {layers} layers")
    profile = Profile(
        model=str(data["model"]),
        layers=layers,
        pairs=int(data["pairs"]),
        alone=tuple(map(_finite, data["alone"])),
        alone_flips=tuple(map(_finite, data["alone_flips"])),
        onward=tuple(map(_finite, data["onward"])),
        onward_flips=tuple(map(_finite, data["onward_flips"])),
        deep=tuple(map(_finite, data["deep"])),
        budgets=tuple(map(_finite, data["budgets"])),
        predicted_kl=_finite(data["predicted_kl"]),
        measured_kl=None if data["measured_kl"] is None else _finite(data["measured_kl"]),
        held_out=int(data["held_out"]),
        band=None if band is None else (int(band[0]), int(band[1]), _finite(band[2])),
        at_once=bool(data["at_once"]),
        tau=_finite(data["tau"]),
        probes=int(data["probes"]),
        sure=_finite(data["sure"]),
        checked=int(data["checked"]),
        agreement=_finite(data["agreement"]),
        measured=dict(data.get("measured", {})),
    )
    if profile.band is not None and profile.band[0] >= layers:
        raise ValueError(f"a band from layer {profile.band[0]} of {layers}")
    for policy in (profile.layered, profile.auto):
        policy()  # ratios, layers and counts in range, or ConfigError
    return profile


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number")
    return number
