"""`score`: logits of a given continuation in one pass, equal to what generating it step by step sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Lab, make_picture

from vlcache import ConfigError, InputError
from vlcache.store import MemoryStore
from vlcache.types import Entry


def generated(lab: Lab, inputs: dict[str, Any], n: int = 5) -> tuple[list[int], torch.Tensor]:
    options = {"max_new_tokens": n, "min_new_tokens": n, "output_logits": True, "return_dict_in_generate": True}
    out = lab.model.generate(**inputs, **options)
    return out.sequences[0, -n:].tolist(), torch.cat(out.logits)


def test_full_recompute_scores_as_plain_generation_does(lab: Lab, close: Any) -> None:
    chat = lab.chat("Before ", make_picture(1), "what?", make_picture(2), "and this?")
    tokens, logits = generated(lab, lab.inputs(chat))
    with lab.cache("full") as cache:
        close(cache.score(chat, tokens), logits, 5e-6)
        close(cache.score(chat, tokens), logits, 5e-6)
        assert cache.last is not None
        assert cache.last.computed_share == 1.0


@pytest.mark.parametrize("policy", ["none", "prefix:0.25"])
def test_a_repaired_prompt_scores_as_generation_from_it_does(lab: Lab, policy: str, close: Any) -> None:
    first = lab.chat(make_picture(1), "what?")
    second = lab.chat("Another beginning. ", make_picture(1), "what?", system="Else.")
    with lab.cache(policy) as cache:
        cache.prefill(first)
        tokens, logits = generated(lab, cache.prefill(second))
        assert cache.last is not None
        share = cache.last.computed_share
        close(cache.score(second, tokens), logits, 5e-6)
        assert cache.last.computed_share == share
        close(cache.score(second, tokens[:1]), logits[:1], 5e-6)


def test_behind_an_exact_prefix(lab: Lab, close: Any) -> None:
    chat = lab.chat(make_picture(1), "what?")
    with lab.cache("none", prefix_cache=True) as cache:
        tokens, logits = generated(lab, cache.prefill(chat))
        close(cache.score(chat, tokens), logits, 5e-6)
        assert cache.last is not None
        assert cache.last.exact_prefix_tokens > 0


POLICIES = ["none", "prefix:0.25", "layered:1,0.5,0,0", "full", "prefix:0.5"]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("first", range(len(POLICIES)))
def test_policies_side_by_side_score_as_each_alone(lab: Lab, first: int, prefix_cache: bool, close: Any) -> None:
    policies = POLICIES[first:] + POLICIES[:first]
    one, other = (
        lab.chat(make_picture(1), "what?", make_picture(3), "why?"),
        lab.chat("Else. ", make_picture(4), "who?"),
    )
    # New, known, new between known, known
    asked = lab.chat("So: ", make_picture(2), "and", make_picture(3), make_picture(5), make_picture(4), "what?")
    alone = []
    for policy in policies:
        with lab.cache(prefix_cache=prefix_cache) as cache:
            cache.prefill(one)
            cache.prefill(other)
            alone.append((cache.score(asked, [5, 6, 7], policy=policy), cache.last))
    with lab.cache(prefix_cache=prefix_cache) as cache:
        cache.prefill(one)
        cache.prefill(other)
        together = cache.score_each([asked], [[5, 6, 7]], policies)[0]
        assert cache.last == together[-1].report
        assert cache.counters.encoded == 5
    for (logits, report), scored in zip(alone, together, strict=True):
        close(scored.logits, logits, 5e-6)
        assert report is not None
        assert replace(scored.report, seconds={}) == replace(report, seconds={})
    assert (together[0].logits - together[1].logits).abs().max() > 1e-4


def test_what_scoring_leaves_behind_is_exact(lab: Lab, close: Any) -> None:
    known, new = make_picture(1), make_picture(2)
    asked = [lab.chat("So: ", known, "and", new, text) for text in ("what?", "why?")]
    said = [[5, 6], [7]]
    with lab.cache("full", prefix_cache=False) as cache:
        fresh = [cache.score(chat, tokens) for chat, tokens in zip(asked, said, strict=True)]
    its = Kept()
    with lab.cache("full", prefix_cache=False, checkpoint_layers=(2,), store=its) as cache:
        cache.prefill(asked[0])
    for policies in (["none", "full", "prefix:0.25"], ["none", "prefix:0.25"]):
        kept = Kept()
        with lab.cache("none", prefix_cache=True, checkpoint_layers=(2,), store=kept) as cache:
            cache.prefill(lab.chat(known, "what?"))
            cache.score_each(asked, said, policies)
            assert len(kept.entries) == 2
            # Behind a picture that every policy repaired, the new one's K/V are not exact
            assert kept.entries[1].has_kv == ("full" in policies)
            if "full" in policies:
                for name in ("keys", "values"):
                    close(getattr(kept.entries[1], name), getattr(its.entries[1], name), 5e-6)
                close(kept.entries[1].checkpoints[2], its.entries[1].checkpoints[2], 5e-6)
                close(cache.score(asked[0], said[0]), fresh[0], 5e-6)
                assert cache.last is not None
                assert [span.outcome for span in cache.last.spans] == ["prefix", "prefix"]


class Kept(MemoryStore):
    """A store that tells what was put into it."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.entries: list[Entry] = []

    def put(self, entry: Entry) -> bool:
        self.entries.append(entry)
        return super().put(entry)


def test_a_picture_that_stands_twice(lab: Lab, close: Any) -> None:
    picture = make_picture(1)
    asked = [lab.chat("One ", picture, "two ", picture, text) for text in ("what?", "why then?")]
    policies = ["prefix:0.5", "none", "layered:1,0.5,0.25,0"]
    with lab.cache() as cache:
        cache.prefill(lab.chat(picture, "what?"))
        together = cache.score_each(asked, [[5, 6]] * 2, policies)
    for chat, some in zip(asked, together, strict=True):
        for policy, scored in zip(policies, some, strict=True):
            with lab.cache() as cache:
                cache.prefill(lab.chat(picture, "what?"))
                close(scored.logits, cache.score(chat, [5, 6], policy=policy), 5e-6)


def test_policies_side_by_side_with_nothing_known(lab: Lab, close: Any) -> None:
    chat = lab.chat("Before ", make_picture(1), "what?")
    with lab.cache("full") as cache:
        alone = cache.score(chat, [5, 6])
    with lab.cache() as cache:
        for scored in cache.score_each([chat], [[5, 6]], ["none", "full"])[0]:
            close(scored.logits, alone, 5e-6)
            assert [span.outcome for span in scored.report.spans] == ["new"]
        with pytest.raises(ConfigError, match="no policy"):
            cache.score_each([chat], [[5, 6]], [])


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_questions_about_the_same_pictures_score_as_each_alone(lab: Lab, prefix_cache: bool, close: Any) -> None:
    known = lab.chat(make_picture(1), "what?", make_picture(3), "why?")
    shown = ("So: ", make_picture(2), "and", make_picture(3), "then", make_picture(1))
    asked = [lab.chat(*shown, text) for text in ("what?", "what is it then?", "which?", "what?")]
    said = [[5, 6, 7], [8], [9, 5], [5, 6, 7]]
    policies = ["prefix:0.25", "none", "full", "none"]
    with lab.cache(prefix_cache=prefix_cache) as cache:
        cache.prefill(known)
        together = cache.score_each(asked, said, policies)
        assert cache.last == together[-1][-1].report
    for chat, tokens, some in zip(asked, said, together, strict=True):
        for policy, scored in zip(policies, some, strict=True):
            with lab.cache(prefix_cache=prefix_cache) as cache:
                cache.prefill(known)
                close(scored.logits, cache.score(chat, tokens, policy=policy), 5e-6)
                assert cache.last is not None
                assert replace(scored.report, seconds={}) == replace(cache.last, seconds={})
    assert (together[0][0].logits - together[0][1].logits).abs().max() > 1e-4
    assert (together[0][0].logits[-1] - together[2][0].logits[-1]).abs().max() > 1e-4


def test_questions_behind_an_exact_prefix(lab: Lab, close: Any) -> None:
    asked = [lab.chat(make_picture(1), text) for text in ("what?", "why?")]
    alone = []
    for chat in asked:
        with lab.cache("none", prefix_cache=False) as cache:
            alone.append(cache.score(chat, [5, 6]))
    with lab.cache("none", prefix_cache=True) as cache:
        cache.prefill(asked[0])
        for (scored,), logits in zip(cache.score_each(asked, [[5, 6]] * 2, ["none"]), alone, strict=True):
            close(scored.logits, logits, 5e-6)
            assert scored.report.exact_prefix_tokens > 0


def test_questions_that_cannot_be_scored_together(one_lab: Lab) -> None:
    chats = [one_lab.chat(before, make_picture(n), "what?") for before, n in (("One ", 1), ("Two ", 1), ("One ", 2))]
    with one_lab.cache() as cache:
        for other in chats[1:]:
            with pytest.raises(InputError, match="prompts 1 and 2 differ"):
                cache.score_each([chats[0], other], [[5], [5]], ["none"])
        ends = dict(one_lab.inputs(chats[0]))
        stop = int((ends["input_ids"][0] == one_lab.model.config.image_token_id).nonzero()[-1]) + 1
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            ends[name] = ends[name][:, :stop]
        with pytest.raises(InputError, match="prompt 2 ends with its picture"):
            cache.score_each([chats[0], ends], [[5], [5]], ["none"])
        with pytest.raises(InputError, match="2 requests and 1 continuations"):
            cache.score_each(chats[:2], [[5]], ["none"])
        assert cache.counters.encoded == 0


def test_what_cannot_be_scored(one_lab: Lab) -> None:
    chat = one_lab.chat(make_picture(1), "what?")
    pad = one_lab.model.config.image_token_id
    with one_lab.cache() as cache:
        for continuation, message in [([], "empty"), ([5, pad, 6], "picture"), ([10**6, 5], "vocabulary")]:
            with pytest.raises(InputError, match=message):
                cache.score(chat, continuation)
        with pytest.raises(InputError, match="no picture"):
            cache.score(one_lab.chat("only text"), [5])
        assert cache.score(chat, [5, 6]).shape == (2, one_lab.model.config.text_config.vocab_size)
