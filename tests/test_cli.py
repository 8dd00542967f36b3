"""The command line as a person uses it: output, one line per error, exit status."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import make_picture

from evalmodel.pictures import Table, draw
from vlcache.bench.checkpoints import TINY, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), TINY["qwen2_5_vl"])


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "page.png"
    make_picture(1).save(path)
    return path


def vlcache(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLCACHE_")}
    command = [sys.executable, "-m", "vlcache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=clean | environment, timeout=300)


def test_ask_answers_each_question_and_says_what_was_reused(checkpoint: Path, picture: Path) -> None:
    out = vlcache("ask", picture, "-q", "What is it?", "-q", "How many?", "--model", checkpoint, "--max-new-tokens", 4)
    assert out.returncode == 0, out.stderr
    lines = [line for line in out.stdout.splitlines() if "vision tokens" in line]
    assert "vision tokens 24, computed 24, reused 0, first token after" in lines[0]
    assert "vision tokens 24, computed 0, reused 24, first token after" in lines[1]
    assert out.stdout.index("> What is it?") < out.stdout.index("> How many?")
    assert "noise" in out.stderr


def test_ask_json_is_a_line_a_question(checkpoint: Path, picture: Path) -> None:
    options = ("--model", checkpoint, "--json", "--no-prefix-cache", "--policy", "prefix:0.1", "--max-new-tokens", 4)
    out = vlcache("ask", picture, picture, "-q", "a", "-q", "b", *options)
    assert out.returncode == 0, out.stderr
    first, second = map(json.loads, out.stdout.splitlines())
    assert (first["question"], first["vision_tokens"], first["computed"], first["reused"]) == ("a", 48, 48, 0)
    assert (second["vision_tokens"], second["computed"], second["reused"]) == (48, 8, 40)
    assert second["report"]["policy"] == "prefix:0.1"
    assert second["ttft_s"] > 0


def test_doctor_prints_the_resolved_configuration() -> None:
    out = vlcache("doctor", "--json", VLCACHE_POLICY="prefix:0.05", VLCACHE_MEMORY_GB="0.5")
    found = json.loads(out.stdout)
    assert found["configuration"]["policy"] == "prefix:0.05"
    assert found["configuration"]["memory_gb"] == 0.5
    assert found["models"] == ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL"]
    text = vlcache("doctor")
    assert text.returncode == 0
    assert "Qwen3-VL" in text.stdout


def test_doctor_prints_no_secret() -> None:
    out = vlcache("doctor", VLCACHE_REDIS_URL="rediss://me:hush@host:6379/0", VLCACHE_CACHE_SALT="pepper").stdout
    assert re.search(r"rediss://host:6379\s", out)
    assert "hush" not in out
    assert "pepper" not in out


BAD = {
    "no such directory": (["ask", "PICTURE", "-q", "x", "--model", "/nowhere"], 2),
    "has no config.json": (["ask", "PICTURE", "-q", "x", "--model", "."], 2),
    "did you mean prefix?": (["ask", "PICTURE", "-q", "x", "--policy", "prefx"], 2),
    "No such option": (["ask", "PICTURE", "-q", "x", "--polcy", "full"], 2),
    "Missing option": (["ask", "PICTURE"], 2),
    "device 'nowhere' cannot be used": (["ask", "PICTURE", "-q", "x", "--device", "nowhere"], 2),
    "unknown shape 'huge'": (["bench", "ttft", "--shape", "huge"], 2),
    "picture 1 (nothing.png): cannot be read": (["ask", "nothing.png", "-q", "x"], 1),
    "picture 1 (note.png): not a picture": (["ask", "NOTE", "-q", "x"], 1),
}


@pytest.mark.parametrize("message", BAD)
def test_a_mistake_is_one_line_and_a_status(message: str, picture: Path, tmp_path: Path) -> None:
    note = tmp_path / "note.png"
    note.write_text("this is text")
    arguments, status = BAD[message]
    names = {"PICTURE": picture, "NOTE": note}
    out = vlcache(*(names.get(a, a) for a in arguments))
    assert out.returncode == status
    lines = [line for line in out.stderr.splitlines() if line and "noise" not in line]
    assert len(lines) == 1, out.stderr
    assert lines[0].startswith("vlcache: ")
    assert message in lines[0]


def test_an_unknown_environment_variable_is_a_mistake(picture: Path) -> None:
    out = vlcache("ask", picture, "-q", "x", VLCACHE_POLCY="full")
    assert out.returncode == 2
    assert "did you mean VLCACHE_POLICY?" in out.stderr


def test_an_unsupported_model_is_refused(tmp_path: Path, picture: Path, checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"] |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    config["text_config"]["layer_types"] = ["full_attention"] * 2 + ["sliding_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = vlcache("ask", picture, "-q", "x", "--model", tmp_path)
    assert out.returncode == 2
    assert "decoder layer 2 is sliding_attention" in out.stderr


def test_bench_ttft_ends_with_one_json_line() -> None:
    options = ("--shape", "demo", "--image-tokens", 64, "--text-tokens", 50, "--runs", 1, "--dtype", "float32")
    out = vlcache("bench", "ttft", *options)
    assert out.returncode == 0, out.stderr
    result = json.loads(out.stdout.splitlines()[-1])
    for key in ("full_s", "cold_s", "warm_s", "text_only_s", "same_rows_s", "speedup", "overhead", "cold_overhead"):
        assert result[key] > 0
    assert result["speedup"] == pytest.approx(result["full_s"] / result["warm_s"], rel=1e-3)
    assert result["computed_share"] == pytest.approx(4 / 64)
    assert result["computed_rows"] == 54
    assert result["entry_bytes"] == 64 * (512 * 4 + 2 * 12 * 2 * 64 * 4 + 3 * 8)
    assert set(result["stages_s"]) == {"media", "tokens", "lookup", "encode", "prefill", "store"}
    assert result["peak_rss_bytes"] > 10**8
    assert "floor of a hit (54 rows)" in out.stderr


def test_bench_check_ends_with_one_json_line() -> None:
    options = ("--shape", "demo", "--image-tokens", 64, "--runs", 1, "--warmups", 0, "--dtype", "float32")
    out = vlcache("bench", "check", *options, "--probes", 4)
    assert out.returncode == 0, out.stderr
    result = json.loads(out.stdout.splitlines()[-1])
    assert result["check_rows"] == 4 + 1
    assert result["decode_step_s"] > 0


def test_bench_error_names_an_unknown_change() -> None:
    out = vlcache("bench", "error", "--changes", "weather", "--items", 1)
    assert out.returncode == 2
    assert "weather" in out.stderr


def test_demo_json_is_json_and_its_story_goes_elsewhere() -> None:
    out = vlcache("demo", "--json")
    assert out.returncode == 0, out.stderr
    rows = json.loads(out.stdout)["rows"]
    # The last one's pictures are swapped: what of them is reused is for the check to say
    assert [row["reused"] > 0 for row in rows[:9]] == [False] * 3 + [True] * 6
    assert (rows[3]["vision_tokens"], rows[3]["computed"]) == (256, 0)
    assert [row["answer"] for row in rows] == [row["plain_answer"] for row in rows]
    assert [row["answer"] for row in rows] == [row["right_answer"] for row in rows]
    assert "Waiting for first tokens" in out.stderr


def test_ask_reads_a_drawn_page_with_the_model_that_comes_along(tmp_path: Path) -> None:
    numbers = {"apple": (3, 8), "bread": (6, 1)}
    page = draw(Table(("price", "size"), tuple(numbers), tuple(numbers.values())), random.Random(7), canvas=(12, 10))
    page.image.save(tmp_path / "table.png")
    questions = [
        option for row in numbers for c in ("price", "size") for option in ("-q", f"What is the {c} of {row}?")
    ]
    out = vlcache("ask", tmp_path / "table.png", *questions, "--json")
    assert out.returncode == 0, out.stderr
    answers = [json.loads(line) for line in out.stdout.splitlines()]
    assert [answer["answer"] for answer in answers] == ["3", "8", "6", "1"]
    assert [answer["reused"] for answer in answers] == [0, 120, 120, 120]
