"""`vlcache bench error` and `vlcache bench check` on a tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from conftest import Lab
from rich.console import Console

from vlcache.bench import check, error_run
from vlcache.bench.asking import Asker
from vlcache.bench.error import ORDERS, SHARES, measure
from vlcache.bench.tileworld import tileworld_trial
from vlcache.errors import ConfigError


def test_errors_of_a_pair_add_up(one_lab: Lab) -> None:
    with Asker(one_lab.model, one_lab.processor, 4) as asker:
        found = measure(asker, tileworld_trial("test", 0, "lookup", "system", 0))
        again = measure(asker, tileworld_trial("test", 0, "lookup", "system", 0))
    assert found.own.shape == found.handed_on.shape == (8,)
    assert found.by_layer.shape == (4,)
    assert found.by_layer[0] < 1e-8  # a moved entry's layer 0 is exact
    assert found.by_layer[-1] > 1e-6
    assert (found.handed_on >= 0).all()
    assert found.handed_on[-1] < found.handed_on[:4].max()  # whoever is last has nobody to hand on to
    for order in ORDERS:
        assert found.total[order].shape == (len(SHARES),)
        assert found.total[order][0] == pytest.approx(float(found.by_layer.mean()), rel=1e-3)
        assert found.total[order][-1] < 1e-9
        assert found.kl[order][-1] < 1e-6
        assert torch.equal(found.total[order], again.total[order])


def test_the_error_of_a_context_that_is_the_same_is_none(one_lab: Lab) -> None:
    with Asker(one_lab.model, one_lab.processor, 4) as asker:
        found = measure(asker, tileworld_trial("test", 0, "lookup", "none", 0))
    assert found.own.max() < 1e-9
    assert found.handed_on.max() < 1e-9


def test_a_run_writes_figures_a_plot_and_what_they_say(one_lab: Lab, tmp_path: Path) -> None:
    out = io.StringIO()
    settings = error_run.Settings(items=2, changes=("system", "legend"), max_new_tokens=3)
    result = error_run.run(settings, one_lab.model, one_lab.processor, tmp_path, Console(file=out, width=400))
    assert set(result["changes"]) == {"system", "legend"}
    assert {path.name for path in tmp_path.iterdir()} == {"errors.json", "errors.png", "errors.svg"}
    assert json.loads((tmp_path / "errors.json").read_text())["changes"] == result["changes"]
    for change in ("system", "legend"):
        assert f"{change}: the first eighth of a picture hands on" in out.getvalue()
    with pytest.raises(ConfigError, match="unknown change"):
        error_run.run(error_run.Settings(changes=("weather",)), one_lab.model, one_lab.processor, tmp_path, Console())


def test_the_checks_cost_is_measured_against_decoding() -> None:
    settings = check.Settings(
        shape="demo", image_tokens=64, text_tokens=60, probes=6, runs=2, warmups=0, dtype="float32"
    )
    result = check.run(settings, lambda line: None)
    assert result["check_rows"] == 6 + 1
    assert result["look_rows"] == 12 + 16 + 1
    assert result["checked_s"] > 0
    assert result["decode_step_s"] > 0
    assert {"check_steps", "look_steps", "gated_check_steps"} <= set(result)
