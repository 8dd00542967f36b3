"""Entries are the same whichever engine made them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Engine, picture, prompt
from test_exact import plain_model

from vlcache import VLCache
from vlcache.engines.vllm.shared import shared
from vlcache.store import MemoryStore
from vlcache.types import Entry

A = picture(0)
FIRST, SECOND = prompt("[]what?", [A], "first"), prompt("[]what is it?", [A], "a much longer other context")


def chat(asked: dict[str, Any], system: str, question: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": A}, {"type": "text", "text": question}]
    return [{"role": "system", "content": system}, {"role": "user", "content": parts}]


def only(store: MemoryStore) -> Entry:
    (entry,) = store._entries.values() if hasattr(store, "_entries") else store.get_many(list(store)).values()
    return entry


@pytest.fixture
def both(engine: Engine) -> tuple[Engine, MemoryStore, MemoryStore]:
    """The first prompt, asked of both engines; their stores."""
    engine.forget()
    engine.ask(FIRST, tokens=1)
    model, processor = plain_model(engine)
    own = MemoryStore(1 << 30)
    with VLCache(model, processor, "none", store=own, prefix_cache=False) as cache:
        cache.prefill(chat(FIRST, "first", "what?"))
    return engine, shared(engine.connector._config).store, own


def test_both_engines_make_the_same_entry(both: tuple[Engine, MemoryStore, MemoryStore]) -> None:
    _, theirs, own = both
    one, other = only(theirs), only(own)
    assert one.header == other.header
    assert one.context == other.context
    assert torch.equal(one.positions, other.positions)
    for name in ("encoder", "keys", "values"):
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-4)


def test_each_uses_the_others(both: tuple[Engine, MemoryStore, MemoryStore]) -> None:
    engine, theirs, own = both
    model, processor = plain_model(engine)
    with VLCache(model, processor, "none", store=theirs, prefix_cache=False) as cache:
        out = cache.prefill(chat(SECOND, "a much longer other context", "what is it?"))
        assert [span.outcome for span in cache.last.spans] == ["reused"]
    logits = out["cache" if "cache" in out else "past_key_values"].first_logits(1)[0, -1]
    entry = only(own)
    theirs.clear()
    theirs.put(entry)
    engine.forget(store=False)
    (answer,) = engine.ask(SECOND, vlcache="none", tokens=1)
    assert answer.cached > 0
    expected = logits.log_softmax(-1)
    assert answer.tokens == [int(expected.argmax())]
    assert answer.logprobs[0] == pytest.approx(float(expected.max()), abs=1e-4)


@pytest.mark.parametrize("policy", ["cacheblend:0.2", "kvshare:0.2", "verified:1e9,6", "verified:0,6", "band:1,2,0.25"])
def test_policies_that_look_decide_as_they_do_with_transformers(
    both: tuple[Engine, MemoryStore, MemoryStore], policy: str
) -> None:
    engine, _, own = both
    model, processor = plain_model(engine)
    asked = prompt("There.[]what is it?", [A], "first")
    parts = [{"type": "text", "text": "There."}, *chat(FIRST, "first", "what is it?")[1]["content"]]
    with VLCache(model, processor, policy, store=own, prefix_cache=False) as cache:
        out = cache.prefill([{"role": "system", "content": "first"}, {"role": "user", "content": parts}])
        assert [span.outcome for span in cache.last.spans] == ["reused"]
    expected = out["cache" if "cache" in out else "past_key_values"].first_logits(1)[0, -1].log_softmax(-1)
    engine.forget(store=False)
    (answer,) = engine.ask(asked, vlcache=policy, tokens=1)
    assert answer.cached > 0
    assert answer.tokens == [int(expected.argmax())]
    assert answer.logprobs[0] == pytest.approx(float(expected.max()), abs=1e-4)


def test_a_clients_id_is_never_taken_for_a_digest(both: tuple[Engine, MemoryStore, MemoryStore]) -> None:
    engine, theirs, _ = both
    stored = only(theirs)
    theirs.clear()
    engine.forget(store=False)
    other = dict(prompt("[]what?", [picture(7)]), multi_modal_uuids={"image": ["vlcache-" + stored.header.key.content]})
    engine.ask(other, tokens=1)
    assert not theirs.get_many([stored.header.key])


def test_a_new_picture_among_known_ones_is_captured(both: tuple[Engine, MemoryStore, MemoryStore]) -> None:
    """It is encoded by the plugin, in front of the first known one, so its K/V are exact."""
    engine, theirs, _ = both
    new = picture(8)
    engine.forget(store=False)
    engine.ask(prompt("[]and[]compare", [new, A]), vlcache="none", tokens=1)
    assert theirs.stats().entries == 2
