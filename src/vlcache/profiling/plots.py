"""A profile's picture: what reuse costs by layer, where context is written, how the check tells safe from unsafe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from vlcache.profile import Profile
from vlcache.profiling.records import PairRecord

__all__ = ["plot_profile"]

_LEAST = 1e-4


def plot_profile(profile: Profile, records: Sequence[PairRecord], out: Path) -> list[Path]:
    """Written beside the profile, as PNG and SVG."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    layers, depth, check = figure.subplots(1, 3)
    layers.plot(profile.alone, marker=".", label="this layer's K/V reused")
    layers.plot(profile.onward, marker=".", label="this one's and all deeper")
    layers.set_yscale("symlog", linthresh=_LEAST)
    layers.set(xlabel="layer", ylabel="KL of the answer, nats", title="other turns' text changed")
    layers.legend(fontsize=7)
    if profile.deep:
        depth.plot([100 * share for share in profile.deep], marker=".")
        depth.axvline(profile.band[0] if profile.band else 0, color="grey", lw=0.6)
    depth.set(xlabel="all tokens computed from this layer on", ylabel="agreement, %", title="text of the turn changed")
    for number, (label, agree) in enumerate((("naive reuse right", True), ("wrong", False))):
        moved = [max(_LEAST, record.moved[0]) for record in records if record.moved and record.agree == agree]
        check.scatter(moved, [number] * len(moved), marker="|", s=200, label=f"{label} ({len(moved)})")
    check.axvline(max(_LEAST, profile.tau), color="grey", lw=0.6)
    check.set_xscale("log")
    check.set_yticks([])
    check.set(xlabel="the first look moved the answer by, nats", title="checks")
    check.legend(fontsize=7)
    for axis in (layers, depth, check):
        axis.title.set_fontsize(9)
    paths = [out.with_suffix(".png"), out.with_suffix(".svg")]
    for path in paths:
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths
