"""A store's faults cost a request its reuse, never its answer; what has not been tested is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Engine, close, picture, prompt

from vlcache.engines.vllm.shared import shared

A, B = picture(0), picture(1, 392, 280)
ASKED = prompt("[]what is it?", [A], "a much longer other context")


def test_an_entry_that_is_evicted_between_the_claim_and_its_use_is_computed(
    known: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = known.plain(ASKED)
    store = shared(known.connector._config).store
    scheduler = known.connector._scheduler
    allocated = scheduler.allocated

    def evict(*args: Any) -> None:
        allocated(*args)
        store.clear()

    monkeypatch.setattr(scheduler, "allocated", evict)
    close(known.ask(ASKED, vlcache="none"), plain)
    monkeypatch.undo()
    close(known.ask(prompt("[]who?", [B]), vlcache="none", tokens=4), known.plain(prompt("[]who?", [B]), tokens=4))


@pytest.mark.parametrize("call", ["get_many", "put"])
def test_a_raising_store_costs_the_reuse_only(known: Engine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    plain = known.plain(ASKED, prompt("[]who?", [B]))

    def broken(*args: Any) -> Any:
        raise OSError("the medium is gone")

    monkeypatch.setattr(shared(known.connector._config).store, call, broken)
    close(known.ask(ASKED, prompt("[]who?", [B]), vlcache="full"), plain)


def test_a_store_that_breaks_down_in_the_worker_is_computed_around(
    known: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = known.plain(ASKED)
    store = shared(known.connector._config).store
    scheduler, get_many = known.connector._scheduler, store.get_many
    allocated = scheduler.allocated

    def broken(*args: Any) -> Any:
        raise OSError("the medium is gone")

    def break_down(*args: Any) -> None:
        allocated(*args)
        monkeypatch.setattr(store, "get_many", broken)

    monkeypatch.setattr(scheduler, "allocated", break_down)
    close(known.ask(ASKED, vlcache="none"), plain)
    assert store.get_many is not get_many


@pytest.mark.parametrize("policy", ["prefix:7", "layered:0.5", "x" * 1000, "verified:1,2/" * 15 + "none"])
def test_a_policy_that_is_none_costs_its_request_the_reuse(known: Engine, policy: str) -> None:
    plain = known.plain(ASKED)
    ours = known.ask(ASKED, vlcache=policy)
    assert ours[0].cached == 0
    close(ours, plain)


def test_a_failure_of_ours_in_the_worker_is_computed_around(known: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import vlcache.engines.vllm.worker as worker

    plain = known.plain(ASKED)

    def broken(*args: Any) -> Any:
        raise RuntimeError("a fault of the plugin's own")

    monkeypatch.setattr(worker, "checked_prefill", broken)
    close(known.ask(ASKED, vlcache="none"), plain)
