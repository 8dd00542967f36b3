"""What `prefill` returns goes into `generate` as it is, with every way of decoding, and leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import Lab, make_picture
from transformers import StoppingCriteria, TextStreamer, set_seed

from vlcache import InputError
from vlcache.bench.checkpoints import TINY, build_model
from vlcache.engines.transformers.handoff import PrefilledCache, cache_argument

PICTURE = make_picture(1)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam samples": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "scores": {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


def chats(lab: Lab) -> tuple[Any, Any]:
    return lab.chat(PICTURE, "q"), lab.chat(PICTURE, "What is shown?", system="Other.")


def sequences(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.sequences


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_decoding_goes_on_from_a_hit(lab: Lab, way: str) -> None:
    first, second = chats(lab)
    options = {"max_new_tokens": 12, "min_new_tokens": 12} | WAYS[way]
    set_seed(7)
    plain = sequences(lab.model.generate(**lab.inputs(second), **options))
    with lab.cache("full") as cache:
        cache.prefill(first)
        inputs = cache.prefill(second)
        assert cache.last.hits == 1
        set_seed(7)
        ours = sequences(lab.model.generate(**inputs, **options))
    assert torch.equal(ours, plain)


def test_chunked_prefill_finds_nothing_left_to_cut(lab: Lab) -> None:
    """A picture split by the chunk gives what the whole prompt gives."""
    first, second = chats(lab)
    options = {"max_new_tokens": 12, "min_new_tokens": 12}
    plain = lab.model.generate(**lab.inputs(second), **options)
    with lab.cache("full") as cache:
        cache.prefill(first)
        assert torch.equal(lab.model.generate(**cache.prefill(second), prefill_chunk_size=16, **options), plain)


def test_an_assistant_model_goes_on_from_a_hit(one_lab: Lab) -> None:
    """Another model drafts; the tokens are those of the model alone."""
    assistant = build_model(TINY["qwen2_5_vl"], one_lab.processor.tokenizer, seed=1)
    first, second = chats(one_lab)
    options = {"max_new_tokens": 12, "min_new_tokens": 12}
    plain = one_lab.model.generate(**one_lab.inputs(second), **options)
    with one_lab.cache("full") as cache:
        cache.prefill(first)
        for drafting in (assistant, one_lab.model):
            known = cache.prefill(second)
            assert torch.equal(one_lab.model.generate(**known, assistant_model=drafting, **options), plain)


def test_streamers_and_stopping_criteria(one_lab: Lab) -> None:
    class AfterFour(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)

    class Streamer(TextStreamer):
        tokens: list[int]

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    with one_lab.cache() as cache:
        inputs = cache.prefill(chats(one_lab)[0])
        stop, streamer = AfterFour(), Streamer(one_lab.processor.tokenizer)
        stop.length, streamer.tokens = inputs["input_ids"].shape[1] + 4, []
        out = one_lab.model.generate(**inputs, stopping_criteria=[stop], streamer=streamer, max_new_tokens=12)
        assert out.shape[1] == stop.length
        assert streamer.tokens == [*out[0].tolist(), -1]


def test_the_first_call_is_answered_without_the_model(one_lab: Lab) -> None:
    calls = []
    handle = one_lab.model.model.language_model.layers[0].register_forward_hook(lambda *a: calls.append(1))
    try:
        with one_lab.cache() as cache:
            inputs = cache.prefill(chats(one_lab)[0])
            one_lab.model.generate(**inputs, max_new_tokens=1, min_new_tokens=1)
            assert calls == []
            again = cache.prefill(chats(one_lab)[0])
            one_lab.model.generate(**again, max_new_tokens=3, min_new_tokens=3)
            assert len(calls) == 2
    finally:
        handle.remove()


def test_two_prompts_in_flight_do_not_mix(lab: Lab) -> None:
    """Same texts, same sizes, prefilled one after the other and only then decoded."""
    red, blue = (lab.chat(make_picture(seed), "Which colour?") for seed in (21, 22))
    plain = [lab.model.generate(**lab.inputs(c), max_new_tokens=8, min_new_tokens=8) for c in (red, blue)]
    with lab.cache() as cache:
        waiting = [cache.prefill(c) for c in (red, blue)]
        for inputs, expected in zip(reversed(waiting), reversed(plain), strict=True):
            assert torch.equal(lab.model.generate(**inputs, max_new_tokens=8, min_new_tokens=8), expected)


def test_nothing_of_the_cache_stays_on_the_model(lab: Lab) -> None:
    before, deltas = set(lab.model.__dict__), lab.model.model.rope_deltas
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lab.model.modules())
    with lab.cache() as cache:
        lab.model.generate(**cache.prefill(chats(lab)[0]), max_new_tokens=2)
        assert "forward" in lab.model.__dict__
    assert set(lab.model.__dict__) == before
    assert lab.model.model.rope_deltas is deltas
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lab.model.modules()) == hooks
    assert type(lab.model).forward.__module__.startswith("transformers.")


def test_an_instance_forward_that_was_there_comes_back(one_lab: Lab) -> None:
    wrapped = one_lab.model.forward
    calls = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return wrapped(*args, **kwargs)

    one_lab.model.forward = spy
    try:
        with one_lab.cache() as cache:
            one_lab.model.generate(**cache.prefill(chats(one_lab)[0]), max_new_tokens=3, min_new_tokens=3)
        assert one_lab.model.forward is spy
        assert len(calls) == 2
    finally:
        del one_lab.model.forward


def test_decoding_begins_inside_the_with_and_may_end_outside(one_lab: Lab) -> None:
    chat = chats(one_lab)[0]
    plain = one_lab.model.generate(**one_lab.inputs(chat), max_new_tokens=8, min_new_tokens=8)
    with one_lab.cache() as cache:
        inputs, begun = cache.prefill(chat), cache.prefill(chat)
        out = one_lab.model.generate(**begun, max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True)
    with pytest.raises(InputError, match="inside the cache's `with`"):
        one_lab.model.generate(**inputs, max_new_tokens=8)
    with pytest.raises(InputError, match="inside the cache's `with`"):
        one_lab.cache().prefill(chat)
    name = cache_argument(one_lab.model)
    rest = one_lab.model.generate(out.sequences, **{name: out[name]}, max_new_tokens=4, min_new_tokens=4)
    assert torch.equal(rest, plain)


def test_decoding_needs_its_cache(one_lab: Lab) -> None:
    with one_lab.cache() as cache, pytest.raises(InputError, match="use_cache=False"):
        one_lab.model.generate(**cache.prefill(chats(one_lab)[0]), max_new_tokens=4, use_cache=False)


def test_a_first_call_with_positional_arguments(one_lab: Lab) -> None:
    chat = chats(one_lab)[0]
    with one_lab.cache() as cache, torch.no_grad():
        inputs = cache.prefill(chat)
        ids, cached = inputs["input_ids"][:, -1:], inputs[cache_argument(one_lab.model)]
        out = one_lab.model(ids, None, inputs["position_ids"][..., -1:], cached)
        expected = one_lab.model(**one_lab.inputs(chat)).logits[0, -1]
        assert torch.allclose(out.logits[0, -1], expected, atol=1e-4)


def test_a_first_call_with_other_tokens_goes_to_the_model(one_lab: Lab) -> None:
    """A caller may put other words at the end; the stored logits are not theirs."""
    chat = chats(one_lab)[0]
    plain = one_lab.inputs(chat)
    plain["input_ids"][:, -1] = 65
    expected = one_lab.model.generate(**plain, max_new_tokens=4, min_new_tokens=4)
    with one_lab.cache() as cache:
        inputs = cache.prefill(chat)
        cached = next(v for v in inputs.values() if isinstance(v, PrefilledCache))
        assert cached.fresh
        inputs["input_ids"][:, -1] = 65
        assert torch.equal(one_lab.model.generate(**inputs, max_new_tokens=4, min_new_tokens=4), expected)
        assert not cached.fresh


def test_text_prompts_pass_through(lab: Lab) -> None:
    chat = lab.chat("No picture here.")
    inputs = lab.inputs(chat)
    with lab.cache() as cache:
        out = cache.prefill(chat)
        assert cache.last.spans == ()
        assert set(out) == set(inputs)
        assert torch.equal(out["input_ids"], inputs["input_ids"])
        ours = lab.model.generate(**out, max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(ours, lab.model.generate(**inputs, max_new_tokens=8, min_new_tokens=8))
        assert set(cache.prefill(inputs)) == set(inputs)


def test_a_padded_batch_of_texts_passes_through(one_lab: Lab) -> None:
    texts = ["one", "two and a half"]
    tokenizer = one_lab.processor.tokenizer
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    expected = one_lab.model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
    with one_lab.cache() as cache:
        assert torch.equal(
            one_lab.model.generate(**cache.prefill(inputs), max_new_tokens=4, min_new_tokens=4), expected
        )


def test_vision_tokens_without_pictures_are_refused(one_lab: Lab) -> None:
    inputs = one_lab.inputs(chats(one_lab)[0])
    with one_lab.cache() as cache:
        with pytest.raises(InputError, match="no pixel_values"):
            cache.prefill({"input_ids": inputs["input_ids"]})
        with pytest.raises(InputError, match="no input_ids tensor"):
            cache.prefill({"attention_mask": inputs["attention_mask"]})


def test_a_prefill_is_good_for_one_generate(one_lab: Lab) -> None:
    """A second one would go on behind the first answer; a copy is another matter."""
    chat = chats(one_lab)[0]
    for tokens in (1, 5):
        with one_lab.cache() as cache:
            inputs = cache.prefill(chat)
            spare = copy.deepcopy(inputs)
            first = one_lab.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens)
            with pytest.raises(InputError, match="decoded already"):
                one_lab.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens)
            again = one_lab.model.generate(**spare, max_new_tokens=tokens, min_new_tokens=tokens)
            assert torch.equal(first, again)


def test_logits_are_forgotten_with_the_state_that_they_belong_to(one_lab: Lab) -> None:
    """Cropped and filled with another question, the cache must not answer the old one."""
    chat, other = (one_lab.chat(PICTURE, q) for q in ("What is shown?", "How many are?"))
    there = one_lab.inputs(other)
    ids, name = there["input_ids"], cache_argument(one_lab.model)
    with one_lab.cache() as cache:
        inputs, own = cache.prefill(chat), cache.prefill(other, policy="full")
        cached = next(v for v in inputs.values() if isinstance(v, PrefilledCache))
        total = ids.shape[1]
        keep = int((ids[0] == one_lab.model.config.image_token_id).nonzero()[-1]) + 2
        assert torch.equal(ids[:, :keep], inputs["input_ids"][:, :keep])
        cached.crop(keep - cached.get_seq_length())
        assert not cached.fresh
        with torch.no_grad():
            for start, stop in ((keep, total - 1), (total - 1, total)):
                where = own["position_ids"][..., start:stop]
                out = one_lab.model(input_ids=ids[:, start:stop], position_ids=where, **{name: cached})
            expected = one_lab.model(**there).logits[0, -1]
        assert torch.allclose(out.logits[0, -1], expected, atol=1e-4)


def test_caches_on_one_model_leave_in_any_order(one_lab: Lab) -> None:
    chat = chats(one_lab)[0]
    plain = one_lab.model.generate(**one_lab.inputs(chat), max_new_tokens=4, min_new_tokens=4)
    deltas = one_lab.model.model.rope_deltas
    first, second = one_lab.cache(), one_lab.cache(cache_salt="other")
    first.__enter__()
    second.__enter__()
    first.prefill(chat)
    first.__exit__()
    assert torch.equal(one_lab.model.generate(**second.prefill(chat), max_new_tokens=4, min_new_tokens=4), plain)
    second.__exit__()
    assert "forward" not in one_lab.model.__dict__
    assert one_lab.model.model.rope_deltas is deltas


def test_a_cache_is_entered_once(one_lab: Lab) -> None:
    with one_lab.cache() as cache:
        with pytest.raises(InputError, match="in use already"):
            cache.__enter__()
        cache.prefill(chats(one_lab)[0])
    assert "forward" not in one_lab.model.__dict__
