"""Configuration: frozen, layered, and strict about names.

    defaults  <  YAML file (VLCACHE_CONFIG)  <  environment (VLCACHE_POLICY, ...)  <  arguments and flags

An unknown key is an error that names the nearest known one; so is a value of the wrong kind.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from vlcache.errors import ConfigError
from vlcache.policies import DEFAULT_POLICY, parse_policy
from vlcache.types import Capture, Stored

__all__ = ["Config", "load_config"]

_PREFIX = "VLCACHE_"
_SECRETS = ("cache_salt", "redis_url")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set.

    Attributes
    ----------
    policy : str
        What is recomputed of a known picture: `auto`, `full`, `none`, `prefix:0.02`, ...
    profile : str
        File with the model's profile, see `vlcache profile`. Without it the one in the model's directory, if any.
    memory_gb : float
        Bound of the store of pictures in GB (10^9 bytes); 0 turns it off, exact prefixes stay.
    prefix_cache : bool
        Reuse the K/V of a prompt that begins like an earlier one, exactly.
    prefix_gb : float
        Bound of the K/V kept for that, in GB.
    max_image_pixels : int
        A larger picture is refused from its header, before it is decoded.
    cache_salt : str
        Tenant. Entries of another salt are invisible.
    checkpoint_layers : tuple of int
        Layers whose input hidden states entries keep, besides those that the policy lets rows enter at.
    capture : str
        Where a new picture's K/V come from: `observed`, the request that first carries it, or `neutral`, a prefill
        of its own behind the chat template's opening, right behind that request's.
    disk_path : str
        Directory where entries outlive the process; empty: none.
    disk_gb : float
        Bound of that directory in GB; 0 turns it off.
    redis_url : str
        Server where entries are shared with other machines, `redis://host:6379/0`; empty: none.
    redis_gb : float
        Bound of all entries there, in GB; 0 turns it off.
    redis_ttl_s : float
        Seconds after its last use that an entry there expires; 0: never.
    store_dtype : str
        How the disk and the server keep K and V: `raw`, or `int8` or `fp8` with a scale per layer and head.
    always_reuse : bool
        Load an entry also where computing it again is thought to be quicker.
    """

    policy: str = DEFAULT_POLICY
    profile: str = ""
    memory_gb: float = 4.0
    prefix_cache: bool = True
    prefix_gb: float = 1.0
    max_image_pixels: int = 64_000_000
    cache_salt: str = field(default="", repr=False)
    checkpoint_layers: tuple[int, ...] = ()
    capture: Capture = "observed"
    disk_path: str = ""
    disk_gb: float = 20.0
    redis_url: str = field(default="", repr=False)
    redis_gb: float = 20.0
    redis_ttl_s: float = 604_800.0
    store_dtype: Stored = "raw"
    always_reuse: bool = False

    def __post_init__(self) -> None:
        if self.policy != "layered":  # whose ratios the model's profile may have
            parse_policy(self.policy)
        for name in ("memory_gb", "prefix_gb", "disk_gb", "redis_gb"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: {getattr(self, name)} is negative or not a size; give GB, 0 to turn it off")
        if not 0 <= self.redis_ttl_s < math.inf:
            raise ConfigError(f"redis_ttl_s: {self.redis_ttl_s} is no duration; give seconds, 0 for ever")
        if self.store_dtype not in get_args(Stored):
            raise ConfigError(f"store_dtype: unknown {self.store_dtype!r}; known are " + ", ".join(get_args(Stored)))
        if self.capture not in get_args(Capture):
            raise ConfigError(f"capture: unknown {self.capture!r}; known are " + ", ".join(get_args(Capture)))
        if self.max_image_pixels < 1:
            raise ConfigError(
                f"max_image_pixels: {self.max_image_pixels} is zero or negative, which refuses every picture"
            )
        if any(layer <= 0 for layer in self.checkpoint_layers):
            raise ConfigError("checkpoint_layers: layers count from 1; layer 0 always is a checkpoint")

    def shown(self) -> dict[str, object]:
        """For printing: of the secrets only that they are set, of a URL where it leads."""
        values = dataclasses.asdict(self)
        values["redis_url"] = _without_secrets(self.redis_url)
        values["cache_salt"] = "set" if self.cache_salt else ""
        return values


def _without_secrets(url: str) -> str:
    """Scheme, host and port; a password may stand in the rest."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "set"
    if url and (not parts.hostname or set("@:") & set(parts.path + parts.query + parts.fragment)):
        return "set"  # a password with such signs in it is not told apart from the rest
    return f"{parts.scheme}://{parts.hostname}{port}" if url else ""


def load_config(
    environ: Mapping[str, str] | None = None, file: str | os.PathLike[str] | None = None, **flags: object
) -> Config:
    """Resolve the configuration.

    Parameters
    ----------
    environ : mapping, optional
        Instead of `os.environ`.
    file : path, optional
        YAML file; without it the one that `VLCACHE_CONFIG` names, if any.
    **flags
        Strongest; those that are None are taken as not given.

    Raises
    ------
    ConfigError
        An unknown key, a value of the wrong kind, an unreadable file.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    file = file or environ.get(_PREFIX + "CONFIG")
    if file:
        values |= {_known(key, str(file)): value for key, value in _read_yaml(Path(file)).items()}
    for name, text in environ.items():
        if name.startswith(_PREFIX) and name != _PREFIX + "CONFIG" and text:
            values[_known(name.removeprefix(_PREFIX).lower(), "environment", name)] = text
    given = {_known(key, "arguments"): value for key, value in flags.items()}
    values |= {key: value for key, value in given.items() if value is not None}
    return Config(**{key: _convert(key, value) for key, value in values.items()})  # type: ignore[arg-type]


def _known(key: object, where: str, shown: str | None = None) -> str:
    names = [f.name for f in dataclasses.fields(Config)]
    if key in names:
        return str(key)
    near = difflib.get_close_matches(str(key), names, n=1)
    prefix, shape = (_PREFIX, str.upper) if shown else ("", str)
    hint = f"did you mean {prefix}{shape(near[0])}?" if near else "known are " + ", ".join(names)
    raise ConfigError(f"unknown option {shown or key!r} ({where}); {hint}")


def _read_yaml(path: Path) -> Mapping[str, object]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}; check VLCACHE_CONFIG") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"configuration file {path}: not valid YAML; write one 'option: value' a line") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"configuration file {path}: holds a {type(data).__name__}; write 'option: value' lines")
    return data


def _convert(key: str, value: object) -> object:
    """A value as its option's type; text is read, because the environment has nothing else."""
    default = Config.__dataclass_fields__[key].default
    try:
        if isinstance(default, bool):
            return _read_bool(value)
        if isinstance(default, tuple):
            parts = value.split(",") if isinstance(value, str) else value
            if not isinstance(parts, list | tuple):
                raise ValueError
            return tuple(_read_int(part) for part in parts if part != "")
        if isinstance(default, int):
            return _read_int(value)
        if isinstance(default, float):
            if isinstance(value, bool):
                raise ValueError
            return float(value)  # type: ignore[arg-type]
        if not isinstance(value, str):
            raise ValueError
        return value
    except (KeyError, TypeError, ValueError):
        kind = "list of integers" if isinstance(default, tuple) else type(default).__name__
        shown = "what is given" if key in _SECRETS else repr(value)
        raise ConfigError(f"option {key}: {shown} is not a {kind}; the default is {default!r}") from None


def _read_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)


def _read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    return _WORDS[str(value).lower()]
