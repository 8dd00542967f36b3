"""Exact stays exact: what is reused approximately serves nobody but the chat that it was made for."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import BLOCK, Engine, close, picture, prompt

A, B = picture(0), picture(1, 392, 280)
LONG = "You are a careful assistant. " * 12


def follow_up(asked: dict[str, Any], answer: str, question: str) -> dict[str, Any]:
    text = f"{asked['prompt']}{answer}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return dict(asked, prompt=text)


def claims(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that the plugin fills, request by request, from now on."""
    found: list[int] = []
    scheduler = engine.connector._scheduler
    claim = scheduler.claim

    def spy(request: Any, computed: int) -> int:
        found.append(claim(request, computed))
        return found[-1]

    monkeypatch.setattr(scheduler, "claim", spy)
    return found


def test_reused_blocks_are_no_prefix_of_other_requests(known: Engine) -> None:
    asked, other = prompt("[]what is it?", [A], LONG), prompt("[]what else is there?", [A], LONG)
    plain = known.plain(asked)
    (alone,) = known.ask(other, vlcache="none")
    known.forget(store=False)
    (reused,) = known.ask(asked, vlcache="none")
    assert reused.cached > BLOCK
    assert abs(reused.logprobs[0] - plain[0].logprobs[0]) > 1e-4  # it is approximate
    close(known.ask(other, vlcache="none"), [alone])
    after = known.ask(asked, vlcache=False)
    close(after, plain)
    assert 0 < after[0].cached <= len(LONG) + BLOCK  # the system prompt's blocks are exact, and are shared


def test_exact_blocks_go_on_serving_everybody(known: Engine) -> None:
    asked = prompt("[]what is it?", [A], LONG)
    first = known.ask(asked, vlcache=False)
    again = known.ask(asked, vlcache="none")
    assert again[0].cached == (again[0].prompt_tokens - 1) // BLOCK * BLOCK
    close(again, first)
    text = {"prompt": "<|im_start|>user\n" + "words " * 60}
    known.ask(text, tokens=1)
    assert known.ask(text, tokens=1)[0].cached >= BLOCK


def test_the_next_turn_of_a_chat_keeps_its_own_prefix(known: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt("[]what is it? " + "words " * 40, [A], LONG)  # its full blocks reach behind the picture
    then = follow_up(asked, "an answer of some length, as long as a block is. " * 3, "and why?")
    known.ask(asked, vlcache="none")
    found = claims(known, monkeypatch)
    (warm,) = known.ask(then, vlcache="none")
    assert warm.cached >= (len(asked["prompt"]) // BLOCK) * BLOCK
    assert found == [0]  # the picture is in vLLM's own prefix
    known.forget(store=False)
    known.connector._scheduler._chats.clear()
    (cold,) = known.ask(then, vlcache="none")
    assert found[-1] > 0
    close([warm], [cold])


def test_what_becomes_known_while_a_request_waits_is_not_reused_under_exact_hashes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B is known when the request arrives, A before it only when it is scheduled."""
    asked = prompt("[]and[]compare", [A, B])
    plain = engine.plain(asked)
    engine.forget()
    engine.ask(prompt("[]what?", [B], "first"), tokens=1)
    engine.ask(prompt("[]what?", [A], "second"), tokens=1)
    engine.forget(store=False)
    scheduler = engine.connector._scheduler
    arrive, has_kv = scheduler.arrive, scheduler._has_kv

    def without_a(request: Any) -> None:
        monkeypatch.setattr(scheduler, "_has_kv", lambda span: span.start > 200 and has_kv(span))
        arrive(request)
        monkeypatch.setattr(scheduler, "_has_kv", has_kv)

    monkeypatch.setattr(scheduler, "arrive", without_a)
    engine.ask(asked, vlcache="none", tokens=1)
    monkeypatch.undo()
    after = engine.ask(asked, vlcache=False)
    close(after, plain)


def test_a_picture_that_stands_twice_is_reused_where_it_may_be(known: Engine) -> None:
    """B was seen behind A only, so that all before it is computed; the second A stands behind it."""
    asked = prompt("[]and[]and[]compare", [A, B, A])
    plain = known.plain(asked)
    known.ask(prompt("[]and[]compare", [A, B]), vlcache="none", tokens=1)
    known.forget(store=False)
    known.ask(asked, vlcache="none", tokens=1)
    close(known.ask(asked, vlcache=False), plain)


def test_a_picture_seen_behind_a_reused_one_is_captured_when_it_comes_back(
    known: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt("[]and[]compare", [A, B])
    found = claims(known, monkeypatch)
    known.ask(asked, vlcache="none", tokens=1)
    known.forget(store=False)
    known.ask(asked, vlcache="none", tokens=1)
    known.forget(store=False)
    (third,) = known.ask(asked, vlcache="none", tokens=1)
    assert found[0] > 0
    assert found[1] == 0
    assert found[2] > found[0]
    assert third.cached == found[2]
