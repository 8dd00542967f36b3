"""What is looked up, encoded, decoded and counted: the two levels, misses that must be misses, hits that must hit."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Lab, make_picture
from PIL import Image
from reference import record

from vlcache import InputError, MediaError, VLCache
from vlcache.store import MemoryStore


@contextmanager
def calls_of(module: Any) -> Iterator[list[int]]:
    calls: list[int] = []
    handle = module.register_forward_hook(lambda *args: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def outcomes(cache: VLCache) -> list[str]:
    assert cache.last is not None
    return [span.outcome for span in cache.last.spans]


def ask(cache: VLCache, lab: Lab, *parts: Any, system: str = "s") -> list[str]:
    cache.prefill(lab.chat(*parts, system=system))
    return outcomes(cache)


def test_a_hit_neither_decodes_nor_preprocesses_nor_encodes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(make_picture(1))
    with lab.cache("prefix:0.02") as cache, calls_of(lab.model.model.visual) as vit:
        assert ask(cache, lab, data, "q") == ["new"]
        assert len(vit) == 1
        opened: list[int] = []
        monkeypatch.setattr(Image, "open", lambda *a, **k: opened.append(1))
        monkeypatch.setattr(type(lab.processor.image_processor), "preprocess", lambda *a, **k: opened.append(1))
        assert ask(cache, lab, data, "other", system="another") == ["reused"]
        assert len(vit) == 1
        assert opened == []
        counters = cache.counters
        assert (counters.decoded, counters.preprocessed, counters.encoded) == (1, 1, 1)
        assert (counters.new_pictures, counters.known_files, counters.known_pictures) == (1, 1, 0)


def test_the_second_level_knows_re_encoded_and_decoded_pictures(one_lab: Lab) -> None:
    picture = make_picture(1)
    webp = io.BytesIO()
    picture.save(webp, "WEBP", lossless=True)
    with one_lab.cache() as cache:
        assert ask(cache, one_lab, png(picture), "q") == ["new"]
        assert ask(cache, one_lab, webp.getvalue(), "q", system="a") == ["reused"]
        assert ask(cache, one_lab, picture, "q", system="b") == ["reused"]
        counters = cache.counters
        assert (counters.known_pictures, counters.known_files, counters.encoded) == (2, 0, 1)
        assert ask(cache, one_lab, webp.getvalue(), "q", system="c") == ["reused"]
        assert counters.known_files == 1


def test_another_picture_of_the_same_size_is_a_miss(lab: Lab) -> None:
    with lab.cache("none") as cache, calls_of(lab.model.model.visual) as vit:
        assert ask(cache, lab, png(make_picture(1)), "q") == ["new"]
        assert ask(cache, lab, png(make_picture(2)), "q", system="a") == ["new"]
        assert len(vit) == 2


def test_one_changed_pixel_is_a_miss(lab: Lab) -> None:
    pixels = np.asarray(make_picture(1)).copy()
    pixels[50, 60, 1] ^= 1
    with lab.cache("none") as cache:
        assert ask(cache, lab, png(make_picture(1)), "q") == ["new"]
        assert ask(cache, lab, png(Image.fromarray(pixels)), "q", system="a") == ["new"]


def test_a_changed_processor_setting_is_a_miss(one_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(make_picture(1))
    with one_lab.cache("none") as cache:
        assert ask(cache, one_lab, data, "q") == ["new"]
        monkeypatch.setattr(one_lab.processor.image_processor, "image_mean", [0.4, 0.5, 0.5])
        assert ask(cache, one_lab, data, "q", system="a") == ["new"]
        monkeypatch.undo()
        assert ask(cache, one_lab, data, "q", system="b") == ["reused"]


def test_a_file_overwritten_at_its_path_is_read_anew(one_lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    with one_lab.cache("none") as cache:
        path.write_bytes(png(make_picture(1)))
        assert ask(cache, one_lab, path, "q") == ["new"]
        path.write_bytes(png(make_picture(2)))
        assert ask(cache, one_lab, path, "q", system="a") == ["new"]


def test_turned_pictures_with_the_same_bytes_are_distinct(one_lab: Lab) -> None:
    data = bytes(np.random.default_rng(0).integers(0, 256, 112 * 168 * 3, dtype=np.uint8))
    wide, tall = Image.frombytes("RGB", (168, 112), data), Image.frombytes("RGB", (112, 168), data)
    with one_lab.cache("none") as cache:
        assert ask(cache, one_lab, wide, "q") == ["new"]
        assert ask(cache, one_lab, tall, "q", system="a") == ["new"]


def test_pages_hit_behind_any_prompt_and_in_any_order(one_lab: Lab) -> None:
    """3 pages x 8 questions: 3 misses, 21 hits; then in another order, all hit."""
    pages = [png(make_picture(seed)) for seed in (1, 2, 3)]
    with one_lab.cache("prefix:0.02") as cache:
        seen = [ask(cache, one_lab, page, f"question {n}")[0] for page in pages for n in range(8)]
        assert (seen.count("new"), seen.count("reused")) == (3, 21)
        assert ask(cache, one_lab, *reversed(pages), "compare", system="a") == ["reused"] * 3
        assert ask(cache, one_lab, *pages[1:], "the first removed", system="b") == ["reused"] * 2


def test_a_turn_appended_to_a_chat_hits(lab: Lab) -> None:
    data = png(make_picture(1))
    chat = lab.chat(data, "q")
    turn = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "and?"}]
    with lab.cache("full", prefix_cache=True) as cache:
        cache.prefill(chat)
        out = cache.prefill([*chat, *turn])
        assert outcomes(cache) == ["prefix"]
        expected = lab.model.generate(**lab.inputs([*lab.chat(make_picture(1), "q"), *turn]), max_new_tokens=8)
        assert torch.equal(lab.model.generate(**out, max_new_tokens=8), expected)


def test_an_entry_evicted_between_lookups_is_computed_again(one_lab: Lab) -> None:
    data, other = png(make_picture(1)), png(make_picture(2))
    with one_lab.cache("none") as cache:
        ask(cache, one_lab, data, "q")
        size = cache.store.stats().held_bytes
    with one_lab.cache("none", memory_gb=1.5 * size / 1e9) as cache:
        assert ask(cache, one_lab, data, "q") == ["new"]
        assert ask(cache, one_lab, other, "q") == ["new"]
        assert cache.store.stats().entries == 1
        plain = one_lab.model.generate(**one_lab.inputs(one_lab.chat(make_picture(1), "z")), max_new_tokens=4)
        out = cache.prefill(one_lab.chat(data, "z"))
        assert outcomes(cache) == ["new"]
        assert torch.equal(one_lab.model.generate(**out, max_new_tokens=4), plain)


def test_a_store_without_room_still_answers(one_lab: Lab) -> None:
    with one_lab.cache("none", memory_gb=0) as cache:
        for _ in range(2):
            assert ask(cache, one_lab, png(make_picture(1)), "q") == ["new"]
        assert cache.store.stats().refusals == 2


class Broken(MemoryStore):
    """A store that breaks its promise not to raise, at one method."""

    def __init__(self, method: str) -> None:
        super().__init__(10**8)
        self.method = method

    def __getattribute__(self, name: str) -> Any:
        if name != "method" and name == self.method:
            raise OSError("the disk is gone")
        return super().__getattribute__(name)


@pytest.mark.parametrize("method", ["get_many", "put", "pin"])
def test_a_store_that_raises_costs_a_counted_miss(one_lab: Lab, method: str) -> None:
    plain = one_lab.model.generate(**one_lab.inputs(one_lab.chat(make_picture(1), "z")), max_new_tokens=6)
    with one_lab.cache("full", store=Broken(method)) as cache:
        for _ in range(2):
            out = cache.prefill(one_lab.chat(make_picture(1), "z"))
            assert torch.equal(one_lab.model.generate(**out, max_new_tokens=6), plain)
        assert outcomes(cache) == (["reused"] if method == "pin" else ["new"])
        assert cache.counters.rejects == ({} if method == "pin" else {"store fault": 2})


def test_tenants_do_not_see_each_others_entries(one_lab: Lab) -> None:
    store, data = MemoryStore(10**8), png(make_picture(1))
    with one_lab.cache("none", store=store, cache_salt="a") as cache:
        assert ask(cache, one_lab, data, "q") == ["new"]
    with one_lab.cache("none", store=store, cache_salt="b") as cache:
        assert ask(cache, one_lab, data, "q", system="x") == ["new"]
    with one_lab.cache("none", store=store, cache_salt="a") as cache:
        assert ask(cache, one_lab, data, "q", system="y") == ["reused"]


def test_a_model_with_other_weights_does_not_see_the_entries(one_lab: Lab) -> None:
    from vlcache.bench.checkpoints import TINY, build_model

    store, data = MemoryStore(10**8), png(make_picture(1))
    other = Lab("other", build_model(TINY["qwen2_5_vl"], one_lab.processor.tokenizer, seed=1), one_lab.processor)
    with one_lab.cache("none", store=store) as cache:
        ask(cache, one_lab, data, "q")
    with other.cache("none", store=store) as cache:
        assert ask(cache, other, data, "q", system="x") == ["new"]


def test_weights_that_change_under_the_cache_are_a_miss(one_lab: Lab) -> None:
    lab, data = Lab("copy", copy.deepcopy(one_lab.model), one_lab.processor), png(make_picture(1))
    with lab.cache("none", prefix_cache=True) as cache:
        ask(cache, lab, data, "q")
        assert ask(cache, lab, data, "q") == ["prefix"]
        with torch.no_grad():
            lab.model.model.language_model.layers[1].mlp.up_proj.weight.mul_(1.5)
        assert ask(cache, lab, data, "q") == ["new"]
        lab.model.model.language_model.layers[0].mlp.up_proj = one_lab.model.model.language_model.layers[1].mlp.up_proj
        assert ask(cache, lab, data, "q") == ["new"]


def test_a_model_that_changes_its_dtype_is_looked_at_again(one_lab: Lab) -> None:
    """Its rotary frequencies are rounded along with its weights."""
    lab, data = Lab("copy", copy.deepcopy(one_lab.model), one_lab.processor), png(make_picture(1))
    with lab.cache("full") as cache:
        ask(cache, lab, data, "q")
        lab.model.to(torch.bfloat16)
        out = cache.prefill(lab.chat(data, "q", system="x"))
        assert outcomes(cache) == ["new"]
        layers = next(v for k, v in out.items() if k in ("cache", "past_key_values")).layers
        with torch.no_grad():
            own = lab.model(**lab.inputs(lab.chat(make_picture(1), "q", system="x")), use_cache=True)
        theirs = own["cache" if "cache" in own else "past_key_values"].layers
        difference = (layers[0].full[0] - theirs[0].keys).abs().max()
        assert difference < 0.02 * theirs[0].keys.abs().max()


def test_a_switched_adapter_is_a_miss(one_lab: Lab) -> None:
    """As PEFT does it: the layer's weights stay, its state changes."""

    class Adapted(torch.nn.Linear):
        active_adapters, disable_adapters, merged_adapters, scaling = ("a",), False, (), {"a": 1.0, "b": 1.0}

    lab, data = Lab("copy", copy.deepcopy(one_lab.model), one_lab.processor), png(make_picture(1))
    layer = lab.model.model.language_model.layers[0].mlp
    layer.up_proj.__class__ = Adapted
    with lab.cache("none", prefix_cache=True) as cache:
        ask(cache, lab, data, "q")
        assert ask(cache, lab, data, "q") == ["prefix"]
        layer.up_proj.active_adapters = ("b",)
        assert ask(cache, lab, data, "q") == ["new"]
        layer.up_proj.active_adapters = ("a",)
        assert ask(cache, lab, data, "q", system="x") == ["reused"]


def test_another_image_processor_is_used_from_then_on(one_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    data, other = png(make_picture(1)), copy.deepcopy(one_lab.processor.image_processor)
    other.size = {"shortest_edge": 56 * 56, "longest_edge": 84 * 56}
    with one_lab.cache("none") as cache:
        ask(cache, one_lab, data, "q")
        before = cache.last.vision_tokens
        monkeypatch.setattr(one_lab.processor, "image_processor", other)
        assert ask(cache, one_lab, data, "q", system="x") == ["new"]
        assert cache.last.vision_tokens < before


def test_a_closed_cache_says_so(one_lab: Lab) -> None:
    with one_lab.cache() as cache:
        ask(cache, one_lab, png(make_picture(1)), "q")
    with pytest.raises(InputError, match="closed"):
        cache.prefill(one_lab.chat(png(make_picture(1)), "q"))
    with pytest.raises(InputError, match="closed"), cache:
        pass


def test_a_damaged_entry_is_a_counted_miss(one_lab: Lab) -> None:
    from dataclasses import replace

    data = png(make_picture(1))
    with one_lab.cache("none") as cache:
        ask(cache, one_lab, data, "q")
        (entry,) = cache.store._entries.values()
        cache.store.put(replace(entry, header=replace(entry.header, grid=(1, 2, 2))))
        assert ask(cache, one_lab, data, "q", system="x") == ["new"]
        assert cache.counters.rejects == {"grid": 1}


def test_only_exact_values_are_stored(lab: Lab, close: Any) -> None:
    """A new picture behind a repaired one: its encoder output is kept, its K/V only once they are exact."""
    known, new = png(make_picture(1)), png(make_picture(2))
    with lab.cache("none") as cache, calls_of(lab.model.model.visual) as vit:
        ask(cache, lab, known, "q")
        assert ask(cache, lab, known, new, "q", system="x") == ["reused", "new"]
        assert sorted(e.has_kv for e in cache.store._entries.values()) == [False, True]
        # it has come back: computed in full this once, all before it too, and captured
        assert ask(cache, lab, known, new, "q", system="y") == ["encoder", "encoder"]
        assert len(vit) == 2
        chat = lab.chat(known, new, "q", system="y")
        hidden = record(lab.model, lab.inputs(lab.chat(make_picture(1), make_picture(2), "q", system="y")))
        entry = list(cache.store._entries.values())[-1]
        assert entry.has_kv
        span = cache.last.spans[1]
        for layer in range(4):
            fresh = hidden.values[layer][span.start : span.start + span.tokens].reshape(entry.values[layer].shape)
            close(entry.values[layer], fresh, 1e-5)
        cache.prefill(chat[:1] + lab.chat(new, known, "q", system="z")[1:])
        assert outcomes(cache) == ["reused", "reused"]


def test_a_processors_output_is_taken_as_it_is(lab: Lab) -> None:
    picture = make_picture(1)
    first, second = (lab.inputs(lab.chat(picture, "q", system=s)) for s in ("a", "bb"))
    with lab.cache("full") as cache, calls_of(lab.model.model.visual) as vit:
        cache.prefill(first)
        out = cache.prefill(second)
        assert outcomes(cache) == ["reused"]
        assert len(vit) == 1
        expected = lab.model.generate(**second, max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(lab.model.generate(**out, max_new_tokens=8, min_new_tokens=8), expected)


def bad_inputs(lab: Lab) -> dict[str, Any]:
    one = lab.inputs(lab.chat(make_picture(1), "q"))
    two = {k: torch.cat((v, v)) for k, v in one.items()}
    grid = one["image_grid_thw"]
    return {
        "2 prompts": two,
        "padded": one | {"attention_mask": torch.cat((torch.zeros(1, 1), one["attention_mask"][:, 1:]), dim=1)},
        "pixel_values has": one | {"image_grid_thw": grid * torch.tensor([1, 2, 1])},
        "vision tokens": one | {"input_ids": one["input_ids"][:, 60:]},
        "go together": {k: v for k, v in one.items() if k != "pixel_values"},
        "video": one | {"pixel_values_videos": one["pixel_values"]},
        "as tensors": one | {"pixel_values": one["pixel_values"].tolist()},
        "no input_ids": {k: v for k, v in one.items() if k != "input_ids"},
    }


@pytest.mark.parametrize(
    "what",
    ["2 prompts", "padded", "pixel_values has", "vision tokens", "go together", "video", "as tensors", "no input_ids"],
)
def test_inputs_that_cannot_be_prefilled(one_lab: Lab, what: str) -> None:
    with one_lab.cache() as cache:
        with pytest.raises(InputError, match=what):
            cache.prefill(bad_inputs(one_lab)[what])
        assert cache.store.stats().entries == 0
        assert ask(cache, one_lab, make_picture(1), "q") == ["new"]


def test_pictures_in_every_spelling_are_the_same_picture(one_lab: Lab, tmp_path: Path) -> None:
    data = png(make_picture(1))
    path = tmp_path / "page.png"
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{encoded}"
    parts = [
        {"type": "image", "image": data},
        {"type": "image", "image": {"bytes": data, "path": None}},
        {"type": "image", "image": {"bytes": None, "path": str(path)}},
        {"type": "image", "path": path},
        {"type": "image", "url": path.as_uri()},
        {"type": "image", "base64": encoded},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
    ]
    with one_lab.cache("none") as cache:
        for number, part in enumerate(parts):
            chat = one_lab.chat("q", system=str(number))
            chat[1]["content"].insert(0, part)
            cache.prefill(chat)
            assert outcomes(cache) == (["reused"] if number else ["new"]), part
        assert cache.counters.known_files == len(parts) - 1


QWEN_LIKE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% set n = namespace(value=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' or 'image' in c or 'image_url' in c %}{% set n.value = n.value + 1 %}"
    "{% if add_vision_id %}Picture {{ n.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("options", [{}, {"add_vision_id": True}, {"add_generation_prompt": False}])
def test_a_template_like_the_real_ones(one_lab: Lab, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_lab.processor, "chat_template", QWEN_LIKE)
    chat = one_lab.chat(make_picture(1), "and", make_picture(2), "?")[1:]
    tokenised = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    expected = one_lab.processor.apply_chat_template(chat, **tokenised | options)
    with one_lab.cache() as cache:
        assert torch.equal(cache.prefill(chat, **options)["input_ids"], expected["input_ids"])
        with pytest.raises(InputError, match="tokenize cannot be set"):
            cache.prefill(chat, tokenize=True)


def test_text_that_spells_a_placeholder_is_refused(one_lab: Lab) -> None:
    """It would hand every later picture's tokens to the wrong picture."""
    with one_lab.cache() as cache:
        with pytest.raises(InputError, match="3 picture placeholders for 2 pictures"):
            ask(cache, one_lab, make_picture(1), "look: <|image_pad|>", make_picture(2))
        with pytest.raises(InputError, match="1 picture placeholders for 0 pictures"):
            ask(cache, one_lab, "look: <|image_pad|>")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("hello", "a str is not a chat"),
        (None, "a NoneType is not a chat"),
        ([], "the chat is empty"),
        ([[{"role": "user", "content": "q"}]], "a list of chats"),
        ({"role": "user", "content": "q"}, "one message is not a chat"),
    ],
)
def test_what_is_not_a_chat_is_named(one_lab: Lab, request_: Any, message: str) -> None:
    with one_lab.cache() as cache, pytest.raises(InputError, match=message):
        cache.prefill(request_)


def test_a_tokenizer_is_no_processor(one_lab: Lab) -> None:
    with pytest.raises(InputError, match="is no processor for pictures"):
        VLCache(one_lab.model, one_lab.processor.tokenizer)


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": "no role"}],
        [{"role": "user", "content": [{"type": "image", "image": {"bytes": None, "path": None}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "image", "image": b"x", "max_pixels": 100}]}],
        [{"role": "user", "content": ["bare string"]}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}],
    ],
)
def test_messages_that_cannot_be_read(one_lab: Lab, messages: Any) -> None:
    with one_lab.cache() as cache, pytest.raises(InputError, match="message 1"):
        cache.prefill(messages)


BAD_MEDIA = {
    "picture 2: not a picture": b"this is text",
    "picture 2: cannot be decoded": png(make_picture(3, 112, 84))[:-128],
    "picture 2: has zero bytes": b"",
    "picture 2: 168x112 pixels are over the limit of 12000": png(make_picture(3)),
    r"picture 2: the processor refuses 1000x3 pixels \(aspect ratio 333:1\)": png(make_picture(3, 1000, 3)),
    "picture 2: remote addresses": "https://example.org/a.png",
    r"picture 2 \(missing.png\): cannot be read": Path("missing.png"),
}


@pytest.mark.parametrize("message", BAD_MEDIA)
def test_a_bad_picture_stores_nothing_and_the_next_call_works(one_lab: Lab, message: str) -> None:
    good = png(make_picture(1, 112, 84))
    chat = one_lab.chat(good, "q")
    chat[1]["content"].append({"type": "image_url", "image_url": {"url": BAD_MEDIA[message]}})
    with one_lab.cache(max_image_pixels=12_000) as cache:
        with pytest.raises(MediaError, match=message):
            cache.prefill(chat)
        assert cache.store.stats().entries == 0
        assert ask(cache, one_lab, good, "q") == ["new"]
