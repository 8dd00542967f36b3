"""From layers' sensitivities to budgets: how much of a picture's front each layer computes.

What reuse costs is taken as a sum over the layers, and the front's share of it as one curve for all of them:

    KL(r_0 .. r_L-1)  =  sum over l of  cost_l * (1 - gain(r_l))          r_0 >= r_1 >= ... >= r_L-1

For a price on divergence the cheapest budgets are found exactly, layer by layer from the deepest; the price is then
raised until the bound holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

__all__ = ["gain_curve", "predicted", "solve"]

_STEPS = 60


def gain_curve(none: float, by_ratio: Mapping[float, float]) -> dict[float, float]:
    """By ratio, the share of reuse's divergence that computing so much of the front takes away; it never falls.

    Parameters
    ----------
    none : float
        Divergence with nothing computed.
    by_ratio : mapping of float to float
        Divergence when so much of the front is computed in every layer.
    """
    gain, best = {0.0: 0.0}, 0.0
    for ratio, kl in sorted(by_ratio.items()):
        best = max(best, min(1.0, 1 - kl / none) if none > 0 else 0.0)
        gain[ratio] = best
    return gain | {1.0: 1.0}


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
        See `gain_curve`; its ratios are those that are tried.
    """
    assert (target_kl is None) != (target_share is None)
    low, high = 0.0, 1.0
    fits = (0.0,) * len(cost) if target_share is not None else (1.0,) * len(cost)

    def enough(budgets: tuple[float, ...]) -> bool:
        if target_kl is not None:
            return predicted(cost, gain, budgets) <= target_kl
        assert target_share is not None
        return sum(budgets) / len(budgets) > target_share

    while high < 1e12 and not enough(_cheapest(cost, gain, high)):
        high *= 10
    for _ in range(_STEPS):
        price = (low + high) / 2
        budgets = _cheapest(cost, gain, price)
        if enough(budgets):
            high = price
            fits = budgets if target_kl is not None else fits
        else:
            low = price
            fits = budgets if target_share is not None else fits
    return fits


def _cheapest(cost: Sequence[float], gain: Mapping[float, float], price: float) -> tuple[float, ...]:
    """Non-increasing budgets that minimise the sum of ratios and `price` times the divergence."""
    ratios = sorted(gain)
    best = [0.0] * len(ratios)  # of the layers below, none of them over ratios[i]
    choices: list[list[int]] = []
    for each in reversed(cost):
        here = [best[i] + ratio + price * each * (1 - gain[ratio]) for i, ratio in enumerate(ratios)]
        choice: list[int] = []
        best = []
        for i, value in enumerate(here):
            take = i if not choice or value < best[-1] else choice[-1]
            choice.append(take)
            best.append(here[take])
        choices.append(choice)
    budgets, allowed = [], len(ratios) - 1
    for choice in reversed(choices):
        allowed = choice[allowed]
        budgets.append(ratios[allowed])
    assert all(a >= b for a, b in pairwise(budgets))
    return tuple(budgets)
