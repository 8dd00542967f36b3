"""`score`: logits of a given continuation in one pass, equal to what generating it step by step sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Lab, make_picture

from vlcache import InputError


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
