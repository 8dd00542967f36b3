"""Shares of a picture's tokens: how they are checked, rounded and written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlcache.errors import ConfigError
from vlcache.ranges import Ranges, normal

__all__ = ["check_count", "check_share", "highest", "share_of", "written"]


def check_share(share: float, policy: str) -> None:
    """ConfigError unless it is one."""
    if not 0 <= share <= 1:
        raise ConfigError(f"policy {policy}: ratio {share} is not between 0 and 1; give the share of tokens, 0.02")


def check_count(count: int, policy: str) -> None:
    """ConfigError for less than no token."""
    if count < 0:
        raise ConfigError(f"policy {policy}: {count} tokens; give 0 or more")


def written(share: float) -> str:
    """Short where that reads back as the same number."""
    short = f"{share:g}"
    return short if float(short) == share else repr(share)


def share_of(share: float, length: int) -> int:
    """`ceil(share * length)`."""
    # ceil of a product such as 0.07 * 100 = 7.000000000000001 must not cost a token
    return math.ceil(round(share * length, 9))


def highest(scores: Sequence[float] | None, count: int, length: int) -> Ranges:
    """The `count` tokens with the highest scores, the earlier of two alike; as many from the front without scores."""
    if scores is None:
        return ((0, min(count, length)),) if count else ()
    ranked = sorted(range(length), key=lambda token: -scores[token])[:count]
    return normal((token, token + 1) for token in ranked)
