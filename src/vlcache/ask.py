"""Questions about pictures, answered one after the other with the first token's time taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import TextIteratorStreamer

from vlcache.config import Config
from vlcache.engines.transformers import VLCache
from vlcache.report import Report

__all__ = ["Answer", "answer_all"]


@dataclass(slots=True)
class Answer:
    """One question's answer, while and after it is written.

    Attributes
    ----------
    question : str
    words : iterator of str
        The answer as it comes; to be used up before the next question.
    text : str
        What has come so far.
    ttft_s : float
        Seconds from the question to the first token, preprocessing included.
    report : Report
        What the prefill did.
    """

    question: str
    report: Report
    ttft_s: float = 0.0
    text: str = ""
    words: Iterator[str] = field(default_factory=lambda: iter(()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "answer": self.text,
            "ttft_s": round(self.ttft_s, 4),
            "vision_tokens": self.report.vision_tokens,
            "computed": self.report.computed_vision_tokens,
            "reused": self.report.reused_vision_tokens,
            "report": self.report.to_dict(),
        }

    def summary(self) -> str:
        """One line for people."""
        computed = self.report.computed_vision_tokens
        return (
            f"vision tokens {self.report.vision_tokens}, computed {computed}, "
            f"reused {self.report.reused_vision_tokens}, first token after {self.ttft_s:.3f} s"
        )


def answer_all(
    model: Any,
    processor: Any,
    config: Config,
    pictures: list[str],
    questions: list[str],
    system: str | None,
    max_new_tokens: int,
) -> Iterator[Answer]:
    """Answer each question about all pictures."""
    with VLCache(model, processor, config=config) as cache:
        for question in questions:
            parts = [{"type": "image", "image": p} for p in pictures] + [{"type": "text", "text": question}]
            chat = [{"role": "system", "content": system}] if system else []
            yield _answer(
                cache, model, processor, [*chat, {"role": "user", "content": parts}], question, max_new_tokens
            )


def _answer(
    cache: VLCache, model: Any, processor: Any, chat: list[dict[str, Any]], question: str, max_new_tokens: int
) -> Answer:
    start = time.perf_counter()
    inputs = cache.prefill(chat)
    assert cache.last is not None
    answer = Answer(question, cache.last)
    streamer = _Streamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    writer = threading.Thread(
        target=streamer.write, args=(model, inputs | {"max_new_tokens": max_new_tokens, "streamer": streamer})
    )

    def words() -> Iterator[str]:
        writer.start()
        for word in streamer:
            answer.text += word
            yield word
        writer.join()
        answer.ttft_s = streamer.first_s - start
        if streamer.error is not None:
            raise streamer.error

    answer.words = words()
    return answer


class _Streamer(TextIteratorStreamer):  # type: ignore[misc]
    """Notes when the first token came, and carries an error over to the reader."""

    first_s = 0.0
    error: Exception | None = None

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt and not self.first_s:
            self.first_s = time.perf_counter()
        super().put(value)

    def write(self, model: Any, arguments: dict[str, Any]) -> None:
        try:
            model.generate(**arguments)
        except Exception as error:
            self.error = error
            self.end()
