"""How policies are written on a command line: `auto`, `none`, `prefix:0.02`, `layered:1,.5,0`, `verified:0.7,12`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from vlcache.errors import ConfigError
from vlcache.policies.auto import Auto
from vlcache.policies.band import Band
from vlcache.policies.base import Policy
from vlcache.policies.cacheblend import CacheBlend
from vlcache.policies.epic import Epic
from vlcache.policies.front import Layered, Prefix
from vlcache.policies.full import Full
from vlcache.policies.kvshare import KVShare
from vlcache.policies.mpic import Mpic
from vlcache.policies.none import NoRecompute
from vlcache.policies.random import RandomTokens
from vlcache.policies.repair import Repair
from vlcache.policies.verified import Verified

__all__ = ["DEFAULT_POLICY", "POLICIES", "parse_policy"]

DEFAULT_POLICY = "auto"
"""What is recomputed unless somebody says otherwise. docs/accuracy.md says what is known of it."""


def _numbers(text: str, policy: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"policy {policy}: {text!r} is not a list of numbers; write {policy}:0.02") from None


def _no_argument(make: Callable[[], Policy]) -> Callable[[str | None], Policy]:
    def parse(argument: str | None) -> Policy:
        policy = make()
        if argument is not None:
            raise ConfigError(f"policy {policy.name}: takes no argument, got {argument!r}; write {policy.name}")
        return policy

    return parse


def _prefix(argument: str | None) -> Policy:
    ratio, *least = _numbers(argument, "prefix") if argument is not None else (0.02,)
    if not least:
        return Prefix(ratio)
    if len(least) > 1 or not least[0].is_integer():
        raise ConfigError(
            f"policy prefix: {argument!r} is not one ratio, or a ratio and a whole number of tokens; write prefix:0.02 "
            "or prefix:0.02,4; for one ratio per layer write layered:..."
        )
    return Prefix(ratio, int(least[0]))


def _layered(argument: str | None) -> Policy:
    if argument is None:
        raise ConfigError(
            "policy layered: needs a ratio per layer; write layered:1,0.5,0.1,... or name the model's profile"
        )
    return Layered(_numbers(argument, "layered"))


def _share(make: Callable[[float], Policy], name: str) -> Callable[[str | None], Policy]:
    def parse(argument: str | None) -> Policy:
        numbers = _numbers(argument, name) if argument is not None else ()
        if len(numbers) != 1:
            raise ConfigError(f"policy {name}: needs one ratio, got {argument!r}; write {name}:0.15")
        return make(numbers[0])

    return parse


def _tokens(make: Callable[[int], Policy], name: str) -> Callable[[str | None], Policy]:
    def parse(argument: str | None) -> Policy:
        numbers = _numbers(argument, name) if argument is not None else ()
        if len(numbers) != 1 or not numbers[0].is_integer():
            raise ConfigError(f"policy {name}: needs a whole number of tokens, got {argument!r}; write {name}:16")
        return make(int(numbers[0]))

    return parse


def _random(argument: str | None) -> Policy:
    numbers = _numbers(argument, "random") if argument is not None else ()
    if not 1 <= len(numbers) <= 2 or not all(number.is_integer() for number in numbers[1:]):
        raise ConfigError(
            f"policy random: {argument!r} is not a ratio, or a ratio and a seed; write random:0.1 or random:0.1,7"
        )
    return RandomTokens(numbers[0], *map(int, numbers[1:]))


def _band(argument: str | None) -> Policy:
    numbers = _numbers(argument, "band") if argument is not None else ()
    if len(numbers) != 3 or not all(number.is_integer() for number in numbers[:2]):
        raise ConfigError(f"policy band: {argument!r} is not two layers and a share; write band:15,22,0.25")
    return Band(int(numbers[0]), int(numbers[1]), numbers[2])


def _verified(argument: str | None) -> Policy:
    own, slash, base = (argument or "").partition("/")
    numbers = _numbers(own, "verified") if own else ()
    if len(numbers) not in (2, 3, 6) or not all(number.is_integer() for number in numbers[1:5]):
        raise ConfigError(
            f"policy verified: {argument!r} is not a divergence and a number of tokens, then maybe a number of looks, "
            "a band, and behind a slash another rule; write verified:0.3,12 or verified:0.3,12,3,8,20,0.25 or "
            "verified:0.3,12/prefix:0.02"
        )
    band = Band(int(numbers[3]), int(numbers[4]), numbers[5]) if numbers[3:] else None
    verified = Verified(numbers[0], int(numbers[1]), repair=band)
    if numbers[2:]:
        verified = replace(verified, looks=int(numbers[2]))
    return replace(verified, base=parse_policy(base)) if slash else verified


def _repair(argument: str | None) -> Policy:
    numbers = _numbers(argument, "repair") if argument is not None else ()
    if not 1 <= len(numbers) <= 2 or not all(number.is_integer() for number in numbers[1:]):
        raise ConfigError(
            f"policy repair: {argument!r} is not a deviation, or one and a number of tokens; write repair:0.1 or "
            "repair:0.1,8"
        )
    return Repair(numbers[0], *map(int, numbers[1:]))


POLICIES: dict[str, Callable[[str | None], Policy]] = {
    "auto": _no_argument(Auto),
    "full": _no_argument(Full),
    "none": _no_argument(NoRecompute),
    "prefix": _prefix,
    "layered": _layered,
    "band": _band,
    "verified": _verified,
    "repair": _repair,
    "epic": _tokens(Epic, "epic"),
    "mpic": _tokens(Mpic, "mpic"),
    "cacheblend": _share(CacheBlend, "cacheblend"),
    "kvshare": _share(KVShare, "kvshare"),
    "random": _random,
}
"""The registered rules by name; each value reads what stands behind the colon."""


def parse_policy(text: str) -> Policy:
    """Read a policy as it is written on a command line.

    Raises
    ------
    ConfigError
        An unknown name (the nearest known one is named) or an argument out of range.
    """
    name, colon, argument = text.partition(":")
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]}?" if near else "known are " + ", ".join(POLICIES)
        raise ConfigError(f"unknown policy {name!r}; {hint}")
    return POLICIES[name](argument if colon else None)
