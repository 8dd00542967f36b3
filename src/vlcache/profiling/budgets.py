"""From layers' sensitivities to budgets: how much of a picture's front each layer computes.

What reuse costs is taken as a sum over the layers, and the front's share of it as one curve for all of them:

    KL(r_0 .. r_L-1)  =  sum over l of  cost_l * (1 - gain(r_l))          r_0 >= r_1 >= ... >= r_L-1

The best budgets are found exactly, layer by layer from the deepest: for every sum of ratios so far, and every ratio
that the layer above may not go below, the least divergence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["gain_curve", "predicted", "solve"]

_UNIT = 0.01
"""What all ratios are multiples of."""


def gain_curve(none: float, by_ratio: Mapping[float, float]) -> dict[float, float]:
    """By ratio, the share of reuse's divergence that computing so much of the front takes away.

    It never falls: where a larger front was measured to take away less, that is what a smaller one is credited with.

    Parameters
    ----------
    none : float
        Divergence with nothing computed.
    by_ratio : mapping of float to float
        Divergence when so much of the front is computed in every layer.
    """
    gain, least = {1.0: 1.0}, 1.0
    for ratio, kl in sorted(by_ratio.items(), reverse=True):
        least = min(least, max(0.0, 1 - kl / none) if none > 0 else 0.0)
        gain[ratio] = least
    return {0.0: 0.0, **dict(sorted(gain.items()))}


def predicted(cost: Sequence[float], gain: Mapping[float, float], budgets: Sequence[float]) -> float:
    """Divergence of budgets, by the sum above."""
    return sum(each * (1 - gain[ratio]) for each, ratio in zip(cost, budgets, strict=True))


def solve(
    cost: Sequence[float],
    gain: Mapping[float, float],
    target_kl: float | None = None,
    target_share: float | None = None,
) -> tuple[float, ...]:
    """Budgets of least computed share whose divergence is at most `target_kl`, or of least divergence whose mean share
    is at most `target_share`.

    Parameters
    ----------
    cost : sequence of float
        By layer, what reusing it costs.
    gain : mapping of float to float
        See `gain_curve`; its ratios, whole percents, are those that are tried.
    """
    assert (target_kl is None) != (target_share is None)
    ratios = sorted(gain)
    units = [round(ratio / _UNIT) for ratio in ratios]
    size = units[-1] * len(cost) + 1
    best = np.full((len(ratios), size), np.inf)  # of the deeper layers, by the first one's ratio and the sum of all
    best[:, 0] = 0.0
    taken = []
    for each in reversed(cost):
        below, lowest = _running_least(best)
        taken.append(lowest)
        best = np.full_like(best, np.inf)
        for i, ratio in enumerate(ratios):
            best[i, units[i] :] = below[i, : size - units[i]] + each * (1 - gain[ratio])
    if target_kl is not None:
        spent = int(np.argmax((best <= target_kl * (1 + 1e-12) + 1e-15).any(0)))
    else:
        assert target_share is not None
        allowed = int(target_share * len(cost) / _UNIT + 1e-9)
        spent = int(np.argmin(best[:, : allowed + 1].min(0)))
    chosen, budgets = int(np.argmin(best[:, spent])), []
    for lowest in reversed(taken):
        budgets.append(ratios[chosen])
        spent -= units[chosen]
        chosen = int(lowest[chosen, spent])
    return tuple(budgets)


def _running_least(best: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every row the least of it and those above, and which row that is in."""
    below, lowest = best.copy(), np.zeros(best.shape, dtype=np.int64)
    for i in range(1, len(best)):
        better = best[i] < below[i - 1]
        below[i] = np.where(better, best[i], below[i - 1])
        lowest[i] = np.where(better, i, lowest[i - 1])
    return below, lowest
