"""Which rows each layer computes. Plans are pure data: frozen, picklable, without tensors, so that a scheduler
can make one and a worker can execute it.

    prompt      s s s s s P P P P P P P P q q q      s, q: text   P: a reused picture
    layer 0     # # # # # # # # . . . . . # # #      #: computed  .: cached K/V, moved
    layer 1     # # # # # # # . . . . . . # # #
    last layer  = = = = = = . . . . . . . = = #      =: only K/V, nothing reads its hidden state

A row is in layer l + 1 because layer l computed it, or because it enters there from a checkpoint, a cached hidden
state. Layer 0 is always such an entrance (the encoder output is its input). A policy that asks for a row where it
cannot be is widened: the row is also computed in the layers that lead there. A rule that looks at what a layer has
computed settles the deeper layers then; those cannot be widened past the look, rows that are gone stay cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vlcache.errors import ConfigError
from vlcache.policies.base import Evidence, Look, Policy
from vlcache.ranges import Ranges, count, intersect, normal, shift, subtract, union
from vlcache.types import Span

__all__ = ["LayerStep", "Plan", "SpanPlan", "make_plan", "plan_span", "settle"]


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """How one known picture is treated.

    Attributes
    ----------
    span : Span
    rows : tuple of Ranges
        Per layer the tokens computed afresh, counted from the span's first token.
    evidence : Evidence
        On which the policy decided.
    """

    span: Span
    rows: tuple[Ranges, ...]
    evidence: Evidence

    @property
    def computed(self) -> int:
        """Rows computed, summed over the layers."""
        return sum(count(r) for r in self.rows)

    @property
    def exact(self) -> bool:
        """True if every layer computes every token: nothing cached is left in the K/V."""
        return all(r == ((0, self.span.length),) for r in self.rows)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One layer's work, in prompt indices.

    Attributes
    ----------
    layer : int
    enter : Ranges
        Rows whose hidden state starts here: all of layer 0's, later those that come from a checkpoint.
    rows : Ranges
        Rows whose K/V this layer computes: those that came from the layer before, and `enter`.
    keep : Ranges
        The part of `rows` that also goes through attention and MLP. The others are here for the last time.
    reuse : tuple of Ranges
        Per reused span the tokens whose cached K/V must be in place before attention runs.
    """

    layer: int
    enter: Ranges
    rows: Ranges
    keep: Ranges
    reuse: tuple[Ranges, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt's selective prefill.

    Attributes
    ----------
    begin, end : int
        The part of the prompt to fill; K/V before `begin` are there already and exact.
    layers : int
    want : Ranges
        Rows whose output of the last layer is needed (for logits).
    spans : tuple of SpanPlan
        The reused pictures in `begin` to `end`, of the first one maybe the rest. Everything else there is computed
        in every layer.
    look : Look, optional
        What has to be measured before the layers behind it are settled.
    first : int
        Layer at which all rows enter. Over 0 the prompt has been filled before, and the layers below stay as they are.
    text : Ranges, optional
        Rows outside of the pictures, every layer computes them. None: all there are. If given, cached K/V are in
        place already, and so are those of all other text.
    """

    begin: int
    end: int
    layers: int
    want: Ranges
    spans: tuple[SpanPlan, ...] = ()
    look: Look | None = None
    first: int = 0
    text: Ranges | None = None

    def rows(self, layer: int) -> Ranges:
        """Rows that `layer` computes."""
        return self._with_spans(self.text_rows(), layer)

    def text_rows(self) -> Ranges:
        """Rows outside of the reused pictures; every layer from `first` on computes them."""
        if self.text is not None:
            return self.text
        reused = union(*(((s.span.start, s.span.stop),) for s in self.spans))
        return subtract(((self.begin, self.end),), reused)

    def _with_spans(self, fresh: Ranges, layer: int) -> Ranges:
        return union(fresh, *(shift(s.rows[layer], s.span.start) for s in self.spans)) if layer >= self.first else ()

    def step(self, layer: int) -> LayerStep:
        """A layer's work."""
        fresh = self.text_rows()
        rows = self._with_spans(fresh, layer)
        live = intersect(self._with_spans(fresh, layer - 1), rows) if layer else ()
        after = self.want if layer == self.layers - 1 else self._with_spans(fresh, layer + 1)
        reuse = tuple(
            ()
            if self.text is not None
            else subtract(((max(s.span.start, self.begin), s.span.stop),), shift(s.rows[layer], s.span.start))
            for s in self.spans
        )
        return LayerStep(layer, subtract(rows, live), rows, intersect(rows, after), reuse)

    def steps(self) -> Iterator[LayerStep]:
        """The layers' work, first to last."""
        return map(self.step, range(self.first, self.layers))

    def rows_per_layer(self) -> tuple[int, ...]:
        return tuple(count(self.rows(layer)) for layer in range(self.layers))

    def exact_until(self) -> int:
        """Index up to which the prompt's K/V are exact: the start of the first reused span that is not
        computed in full, or `end`."""
        return min((s.span.start for s in self.spans if not s.exact), default=self.end)

    def computed_until(self) -> int:
        """Index up to which every layer computes every token: `exact_until`, and the front of the span there that
        every layer computes."""
        if self.look is not None:
            return self.exact_until()  # which rows the deeper layers compute is not known yet
        for s in self.spans:
            if not s.exact:
                return s.span.start + min(r[0][1] if r and r[0][0] == 0 else 0 for r in s.rows)
        return self.end

    def settled_as(self, other: Plan) -> Plan:
        """This plan with the rows that `other`, which is this one or its rest, has settled for its spans."""
        if self.look is None:
            return self
        settled = {one.span.start: one for one in other.spans}
        return replace(self, spans=tuple(settled.get(one.span.start, one) for one in self.spans), look=None)

    def behind(self, begin: int) -> Plan:
        """The work from `begin` on, for K/V that are there already before it, as this plan would have left them.

        What is exact is for this plan to say; the one returned does not know what stands before it.
        """
        rest = tuple(
            replace(s, rows=tuple(subtract(r, ((0, max(0, begin - s.span.start)),)) for r in s.rows))
            for s in self.spans
            if s.span.stop > begin
        )
        return replace(self, begin=begin, spans=rest)


def plan_span(policy: Policy, span: Span, evidence: Evidence, want: Ranges = ()) -> SpanPlan:
    """Ask a policy for a known picture's rows and make them executable.

    Parameters
    ----------
    evidence : Evidence
        The model's layers, and what is known of the picture's entry.
    want : Ranges
        Prompt indices whose output of the last layer is needed; those inside the span are computed whatever the
        policy says.
    """
    rows = [_asked(policy, span, evidence, want, layer) for layer in range(evidence.layers)]
    for layer in range(evidence.layers - 1, 0, -1):
        if layer not in evidence.checkpoints:
            rows[layer - 1] = union(rows[layer - 1], rows[layer])
    return SpanPlan(span, tuple(rows), evidence)


def _asked(policy: Policy, span: Span, evidence: Evidence, want: Ranges, layer: int) -> Ranges:
    everything = ((0, span.length),)
    wanted = intersect(shift(want, -span.start), everything)
    return union(intersect(normal(policy.rows(span, layer, evidence)), everything), wanted)


def settle(plan: Plan, policy: Policy, scores: Sequence[tuple[float, ...]]) -> Plan:
    """The plan once its look has been taken: layers up to the look's are as they were, deeper ones are asked again.

    Parameters
    ----------
    scores : sequence of tuple of float
        By span and token, see `Evidence.scores`.
    """
    assert plan.look is not None
    spans = []
    for one, its in zip(plan.spans, scores, strict=True):
        evidence = replace(one.evidence, scores=its)
        rows = list(one.rows[: plan.look.layer + 1])
        if not rows[-1]:  # nothing of it was looked at
            spans.append(one)
            continue
        for layer in range(len(rows), evidence.layers):
            asked = _asked(policy, one.span, evidence, plan.want, layer)
            rows.append(asked if layer in evidence.checkpoints else intersect(asked, rows[-1]))
        spans.append(SpanPlan(one.span, tuple(rows), evidence))
    return replace(plan, spans=tuple(spans), look=None)


def make_plan(
    policy: Policy,
    reused: Sequence[Span],
    known: Sequence[Evidence],
    begin: int,
    end: int,
    layers: int,
    wanted: int = 1,
) -> Plan:
    """The plan of a prompt from token `begin` to `end`, of which the last `wanted` rows' logits are wanted.

    Parameters
    ----------
    reused : sequence of Span
        The pictures whose cached K/V are used.
    known : sequence of Evidence
        What is known of each of them.
    """
    want = ((end - wanted, end),)
    spans = tuple(plan_span(policy, span, evidence, want) for span, evidence in zip(reused, known, strict=True))
    look = policy.look(layers)
    if look is not None and not 0 <= look.layer < layers - 1:
        raise ConfigError(f"policy {policy.name}: looks at layer {look.layer}, the model has 0 to {layers - 1}")
    return Plan(begin, end, layers, want, spans, look if spans else None)
