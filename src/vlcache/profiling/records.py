"""What was measured of each calibration pair, kept as lines of JSON so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from vlcache.errors import ConfigError

__all__ = ["RECORDS_VERSION", "PairRecord", "Records", "outcome"]


RECORDS_VERSION = 3


@dataclass(frozen=True, slots=True)
class PairRecord:
    """One pair: pictures captured in one context, asked about in another.

    Attributes
    ----------
    name : str
    changed : str
        What differs before its pictures, the gravest; see `vlcache.context`.
    kl : float
        Divergence of the answer when all K/V are reused: KL(full || reused), mean over its tokens, nats.
    agree : bool
        Whether it is full recompute's, token by token.
    full_sure : float
        Probability that full recompute gives its answer's first token.
    held_out : bool
        Whether budgets are tested on it.
    alone, onward : tuple of float
        By layer, see `vlcache.profile.Profile`; empty where not measured.
    alone_flips, onward_flips : tuple of bool
        Whether the answer differs.
    fronts : mapping of str to float
        Divergence by the ratio of the front that every layer computes.
    checked : bool
        Whether the first look is a check, see `vlcache.policies.Check.checked`.
    moved : tuple of float
        How far the answer moved with each look, nats; empty where nothing was suspicious.
    sure : tuple of float
        Probability of the first token behind each look.
    settled : tuple of bool
        Whether the answer behind each look is full recompute's.
    deep : tuple of bool
        By layer m, whether the answer is full recompute's when all tokens are computed from m on.
    bands : mapping of str to bool
        The same by band.
    """

    name: str
    changed: str
    kl: float
    agree: bool
    full_sure: float = 1.0
    held_out: bool = False
    alone: tuple[float, ...] = ()
    onward: tuple[float, ...] = ()
    alone_flips: tuple[bool, ...] = ()
    onward_flips: tuple[bool, ...] = ()
    fronts: Mapping[str, float] = field(default_factory=dict)
    checked: bool = False
    moved: tuple[float, ...] = ()
    sure: tuple[float, ...] = ()
    settled: tuple[bool, ...] = ()
    deep: tuple[bool, ...] = ()
    bands: Mapping[str, bool] = field(default_factory=dict)


def outcome(record: PairRecord, tau: float, sure: float) -> tuple[bool, int]:
    """Whether a check with that tau, and looks whose answers are taken from that probability on, end with full
    recompute's answer, and which look it is; one more than there are where everything is recomputed."""
    for look, (moved, top, right) in enumerate(zip(record.moved, record.sure, record.settled, strict=True)):
        if moved <= tau if record.checked and look == 0 else top >= sure:
            return right, look
    return True, len(record.moved)


class Records:
    """The file of an unfinished run. `settings` say what is measured; records of other settings are refused.

    Raises
    ------
    ConfigError
        The file holds another run's records.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self._path = path
        self._found: dict[str, PairRecord] = {}
        first, *lines = (path.read_text(encoding="utf-8").splitlines() if path.exists() else []) or [""]
        if first not in ("", settings):
            raise ConfigError(f"{path}: left by a run with other settings; finish that one or remove the file")
        for line in lines:
            record = _read(line)
            if record is not None:
                self._found[record.name] = record
        # Without a line that was cut off, which the next one would continue
        whole = [json.dumps(asdict(record)) for record in self._found.values()]
        path.write_text("\n".join([settings, *whole]) + "\n", encoding="utf-8")

    def get(self, name: str) -> PairRecord | None:
        return self._found.get(name)

    def put(self, record: PairRecord) -> None:
        self._found[record.name] = record
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        """The run is finished."""
        self._path.unlink(missing_ok=True)


def _read(line: str) -> PairRecord | None:
    """None for a line that was cut off."""
    try:
        data = json.loads(line)
    except ValueError:
        return None
    known = {field.name for field in fields(PairRecord)}
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    return PairRecord(**{name: value for name, value in (data | lists).items() if name in known})
