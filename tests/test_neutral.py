"""Neutral capture: a picture's K/V behind the chat template's opening, whoever carries it first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Lab, make_picture
from reference import picture_runs, record

from vlcache.errors import ConfigError, MediaError
from vlcache.policies import Band, Verified
from vlcache.types import Entry

A, B = make_picture(10), make_picture(11, 112, 196)


def entries(cache: Any) -> list[Entry]:
    return list(cache.store._entries.values())


def check_neutral(lab: Lab, close: Any, entry: Entry, picture: Any) -> None:
    inputs = lab.inputs([{"role": "user", "content": [{"type": "image", "image": picture}]}])
    ((start, n),) = picture_runs(lab.model, inputs)
    recording = record(lab.model, inputs)
    assert entry.capture == "neutral"
    assert entry.values is not None
    for layer in range(4):
        close(entry.values[layer].flatten(1), recording.values[layer][start : start + n].flatten(1), 1e-5)
    for layer, hidden in entry.checkpoints.items():
        close(hidden, recording.hidden[layer][start : start + n], 1e-5)


def test_pictures_are_captured_ahead(lab: Lab, close: Any) -> None:
    with lab.cache("none", checkpoint_layers=(2,)) as cache:
        assert cache.capture([A, B]) == 2
        assert cache.capture([A]) == 0
        for entry, picture in zip(sorted(entries(cache), key=lambda one: one.header.tokens), (A, B), strict=True):
            check_neutral(lab, close, entry, picture)
        cache.prefill(lab.chat("Here.", A, B, "q"))
        assert [span.outcome for span in cache.last.spans] == ["reused", "reused"]
        assert cache.counters.encoded == 2


def test_a_new_picture_is_captured_so_where_that_is_set(lab: Lab, close: Any) -> None:
    with lab.cache("none", capture="neutral") as cache, lab.cache("none") as observed:
        for one in (cache, observed):
            one.prefill(lab.chat("Whatever I may say here", A, "q", system="Secret words."))
        (entry,) = entries(cache)
        check_neutral(lab, close, entry, A)
        assert entry.cost_s > 0
        (other,) = entries(observed)
        assert other.capture == "observed"
        assert not torch.allclose(entry.values, other.values, atol=1e-3)
        assert entry.context != other.context
        assert cache.counters.encoded == 1


def test_an_observed_entry_gives_way_to_a_neutral_one(one_lab: Lab) -> None:
    with one_lab.cache("none") as cache:
        cache.prefill(one_lab.chat("Here.", A, "q"))
        assert cache.capture([A]) == 1
        assert [entry.capture for entry in entries(cache)] == ["neutral"]
        assert cache.counters.encoded == 1


def test_one_that_lacks_the_policys_checkpoints_is_captured_again(one_lab: Lab) -> None:
    with (
        one_lab.cache("none") as plain,
        one_lab.cache(Verified(0.5, 4, repair=Band(1, 2, 0.5)), store=plain.store) as cache,
    ):
        assert plain.capture([A]) == cache.capture([A]) == 1
        assert cache.capture([A]) == 0
        assert sorted(entries(plain)[0].checkpoints) == [1]


def test_a_picture_that_cannot_be_used_leaves_those_before_it(one_lab: Lab) -> None:
    with one_lab.cache("none") as cache:
        with pytest.raises(MediaError):
            cache.capture([A, b"no picture", B])
        assert len(entries(cache)) == 1


def test_another_word_for_capture_is_refused(one_lab: Lab) -> None:
    with pytest.raises(ConfigError, match="'lazy'; known are observed, neutral"):
        one_lab.cache("none", capture="lazy")
