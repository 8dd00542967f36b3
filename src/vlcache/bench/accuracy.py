"""Accuracy under reuse: every policy against full recompute, on the same prompts, in one run.

Each trial fills the cache in one context and asks in another. The reference is plain transformers. A policy is
scored on the reference's own answer in one pass: it agrees where each of the answer's tokens is its own first choice,
which is when greedy decoding would write the same; only where it would not does it write an answer of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vlcache.bench.asking import Asker, Plain, divergence_of, groups
from vlcache.bench.trials import Trial
from vlcache.engines.transformers.profile import find_profile
from vlcache.engines.transformers.run import Scored
from vlcache.engines.transformers.support import describe
from vlcache.engines.transformers.weights import WeightsWatch
from vlcache.errors import InputError, MediaError
from vlcache.plan import plan_span
from vlcache.policies import Evidence, Policy, parse_policy
from vlcache.types import Capture, Span

__all__ = ["PEERS", "Outcome", "Runner", "peers_sweep", "sweep"]


PEERS = "peers"
"""In place of policies: `peers_sweep`."""


def sweep(layers: int) -> tuple[str, ...]:
    """The policies of a run that names none: the default, and fronts of pictures from nothing to everything.

    The ratios come without the least number of tokens that `prefix:0.02` has, which of small pictures is more than
    their share.
    """
    ratios = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    return ("full", "none", *(f"prefix:{ratio},1" for ratio in ratios), "auto")


def peers_sweep(layers: int) -> tuple[str, ...]:
    """Every rule, around computed shares of 2, 5, 10, 20 and 40 %.

    `layered` is a straight line down to nothing in the last layer. `epic` and `mpic` count tokens, of pictures of about
    100. `cacheblend` and `kvshare` compute two layers in full before they choose. What `verified` computes depends on
    what it finds.
    """
    shares = (0.02, 0.05, 0.1, 0.2, 0.4)

    def line(share: float) -> str:
        return ",".join(f"{2 * share * (1 - layer / max(1, layers - 1)):.3g}" for layer in range(layers))

    few = [(share * layers - 2) / max(1, layers - 2) for share in shares]
    chosen = [f"{share:.3f}" for share in few if share > 0]
    return (
        "full",
        "none",
        *(f"prefix:{share},1" for share in shares),
        *(f"layered:{line(share)}" for share in shares),
        *(f"epic:{round(100 * share)}" for share in shares),
        "mpic:10",
        *(f"cacheblend:{share}" for share in chosen),
        *(f"kvshare:{share}" for share in chosen),
        *(f"random:{share}" for share in shares),
        *(f"band:{round(layers * (1 - share))},{layers},1" for share in shares),
        "repair:0.1",
        *(f"verified:{tau},{probes}" for tau, probes in ((0.25, 4), (0.25, 8), (0.25, 12))),
        "auto",
    )


# Of K/V that policies run side by side hold together
_KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy on one trial.

    Attributes
    ----------
    trial, family, change, policy : str
    answer, full_prediction, prediction : str
        Right answer; what plain transformers writes; what the policy writes.
    correct, full_correct, agree : bool
        Agreement is of tokens, with plain transformers.
    kl : float
        Mean over the answer's tokens of KL(full || policy), nats.
    computed_share : float
        Of the reused pictures' rows.
    verified : str
        Result of the policy's check; empty without one.
    moved : float
        What the first check measured, nats; 0 where nothing was checked.
    against : float
        See `vlcache.verify.Verdict`.
    """

    trial: str
    family: str
    change: str
    policy: str
    answer: str
    full_prediction: str
    prediction: str
    correct: bool
    full_correct: bool
    agree: bool
    kl: float
    computed_share: float
    verified: str = ""
    moved: float = 0.0
    against: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Runner:
    """Runs trials on one model.

    Parameters
    ----------
    model, processor
    policies : sequence of str
        Empty: `sweep`; `peers` alone: `peers_sweep`.
    max_new_tokens : int
        Longest answer.
    store_dtype, capture : str
        See `Asker`.
    profile : str
        File with the model's profile; empty: the one in its directory, if any.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        policies: Sequence[str],
        max_new_tokens: int,
        store_dtype: str = "raw",
        capture: Capture = "observed",
        profile: str = "",
    ) -> None:
        geometry = describe(model)
        self._layers = geometry.layers
        self._token_bytes = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * model.dtype.itemsize
        named = peers_sweep(self._layers) if tuple(policies) == (PEERS,) else tuple(dict.fromkeys(policies))
        self.policies = named or sweep(self._layers)
        found = find_profile(profile, model, self._layers, WeightsWatch(model))
        self._rules = [(text, parse_policy(text) if found is None else found.policy(text)) for text in self.policies]
        for _, policy in self._rules:
            plan_span(
                policy, Span("", 0, 1, (1, 1, 1)), Evidence(self._layers)
            )  # one that does not fit the model says so now
        kept = {layer for _, policy in self._rules for layer in policy.checkpoints if layer < self._layers}
        self._asker = Asker(model, processor, max_new_tokens, kept, store_dtype, capture)

    def run(
        self, trials: Iterable[Trial], tell: Callable[[Outcome], object], refuse: Callable[[Trial, str], object]
    ) -> None:
        """Give every outcome to `tell`, trial by trial; a trial whose prompt cannot be used to `refuse`, with why."""
        with self._asker as asker:
            for some in groups(trials):
                try:
                    asker.capture(some[0])
                    outcomes = self._outcomes(some)
                except (InputError, MediaError) as error:
                    for trial in some:
                        refuse(trial, str(error))
                    continue
                for outcome in outcomes:
                    tell(outcome)

    def _outcomes(self, trials: Sequence[Trial]) -> list[Outcome]:
        """Of trials of one group."""
        plain = [self._asker.plain(trial.asked) for trial in trials]
        asked, answers = [trial.asked for trial in trials], [one.tokens for one in plain]
        at_once = max(1, _KV_BYTES // (self._token_bytes * sum(one.prompt_tokens + len(one.tokens) for one in plain)))
        scored: list[list[Scored]] = [[] for _ in trials]
        for start in range(0, len(self._rules), at_once):
            rules = [policy for _, policy in self._rules[start : start + at_once]]
            for mine, some in zip(scored, self._asker.cache.score_each(asked, answers, rules), strict=True):
                mine.extend(some)
        return [
            self._outcome(trial, text, policy, score, its)
            for trial, some, its in zip(trials, scored, plain, strict=True)
            for (text, policy), score in zip(self._rules, some, strict=True)
        ]

    def _outcome(
        self,
        trial: Trial,
        text: str,
        policy: Policy,
        scored: Scored,
        plain: Plain,
    ) -> Outcome:
        spans, verdict = scored.report.spans, scored.report.verdict
        assert all(span.outcome == "reused" for span in spans), "a picture was not captured"
        logits = scored.logits.float()
        agree = logits.argmax(-1).tolist() == plain.tokens
        full = self._asker.words(plain.tokens)
        prediction = full if agree else self._asker.write(trial.asked, policy)
        return Outcome(
            trial=trial.name,
            family=trial.family,
            change=trial.change,
            policy=text,
            answer=trial.answer,
            full_prediction=full,
            prediction=prediction,
            correct=trial.grade(prediction),
            full_correct=trial.grade(full),
            agree=agree,
            kl=divergence_of(plain.logits, logits),
            computed_share=scored.report.computed_share,
            verified=verdict.result if verdict is not None else "",
            moved=verdict.moved[0] if verdict is not None and verdict.moved else 0.0,
            against=verdict.against if verdict is not None else 0.0,
        )
