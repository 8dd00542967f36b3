"""The scheduler's side: which requests are filled on stored K/V, how far, and what becomes an entry.

    request     <system> text [known] text [new] text [known] text
    claimed     ----------------------------------------------     up to the end of the last known picture, or of all
                                                                   where the policy wants the text behind to decide
    vLLM's own                                                ----

K/V behind a reused picture are approximate, so they must not serve other requests as an exact prefix. vLLM finds
prefixes by a chain of hashes over blocks; from the first block on that holds a reused token, a request that reuses gets
hashes of its own. Only a prompt that goes on where that request's prompt ended, the next turn of its chat, is given
the same ones.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vlcache.engines.vllm.identity import content_of
from vlcache.engines.vllm.messages import Asked, Load, Save, Work, spans_of
from vlcache.errors import VLCacheError
from vlcache.types import Span

__all__ = ["Scheduler"]

_CHATS = 4096
_LONGEST_POLICY = 256

logger = logging.getLogger("vllm.vlcache")


@dataclass
class _Request:
    """What is known of a request.

    Attributes
    ----------
    reused_from : int or None
        First token whose K/V are approximate.
    claimed : tuple of int or None
        Tokens that the worker is to fill.
    reused : frozenset of int
        Pictures, by number, whose stored K/V take their place.
    unsaved : list of int
        New pictures by number that are to become entries.
    handed_out : int or None
        How often it had been preempted when a load was handed out: what failed then is not tried again.
    policy : str
        The request's own; empty: the configured one.
    """

    spans: tuple[Span, ...]
    reused_from: int | None = None
    claimed: tuple[int, int] | None = None
    reused: frozenset[int] = frozenset()
    handed_out: int | None = None
    unsaved: list[int] | None = None
    policy: str = ""


class Scheduler:
    """Decides for the requests of one engine.

    Parameters
    ----------
    has_kv : callable
        Whether a picture's K/V are stored, by its span.
    to_end : callable
        Whether a policy, as it is written, takes the text behind the pictures to decide.
    block_size : int
    hit : callable
        Tokens of a request's exact prefix that vLLM holds now.
    """

    def __init__(
        self,
        has_kv: Callable[[Span], bool],
        to_end: Callable[[str], bool],
        block_size: int,
        hit: Callable[[Any], int],
        blocks_of: Callable[[str], Sequence[int]],
    ) -> None:
        self._has_kv = has_kv
        self._to_end = to_end
        self._block = block_size
        self._hit = hit
        self._blocks_of = blocks_of
        self._requests: dict[str, _Request] = {}
        self._behind: OrderedDict[str, None] = OrderedDict()
        self._chats: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()
        self._loads: list[Load] = []

    def arrive(self, request: Any) -> None:
        """A request comes in: if pictures of it are going to be reused, its blocks from there on are its own."""
        spans = spans_of(request.mm_features, content_of)
        wanted = (request.kv_transfer_params or {}).get("vlcache", "")
        if not spans or wanted is False or request.resumable or len(str(wanted)) > _LONGEST_POLICY:
            return
        try:
            whole = self._to_end(str(wanted))
        except (VLCacheError, RecursionError) as error:  # the client's mistake must not cost the others their engine
            logger.warning("request %s is not reused on: %s", request.request_id, error)
            return
        mine = self._requests[request.request_id] = _Request(spans, policy=str(wanted))
        exact = self._hit(request)
        reused = self._reusable(spans, exact, whole=whole)
        if not reused:
            return
        mine.reused_from = max(reused[0].start, exact)
        self._own_hashes(request, mine.reused_from // self._block, mine.policy)

    def claim(self, request: Any, computed: int) -> int:
        """Tokens beyond `computed` that the worker fills."""
        mine = self._requests.get(request.request_id)
        if mine is None or mine.reused_from is None or mine.handed_out == request.num_preemptions:
            return 0
        whole = self._to_end(mine.policy)
        # What has become known since it arrived, or was exact then, has others' hashes
        reused = self._reusable(mine.spans, computed, mine.reused_from, whole)
        if not reused:
            return 0
        # To the end, and vLLM computes the last token once more, to go on from it
        end = int(request.num_tokens) if whole else reused[-1].stop
        mine.claimed = (computed, end)
        mine.reused = frozenset(number for number, span in enumerate(mine.spans) if span in reused)
        return end - computed

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """vLLM has made room for a request, and counts on so many tokens to be filled."""
        mine = self._requests.get(request.request_id)
        if mine is None:
            return
        exact = mine.spans if mine.reused_from is None else [s for s in mine.spans if s.stop <= mine.reused_from]
        mine.unsaved = [number for number, span in enumerate(exact) if not self._has_kv(span)]
        for span in mine.spans[len(exact) :]:
            self._note_behind(span)
        if not tokens:
            return
        assert mine.claimed is not None
        begin, end = mine.claimed
        assert end - begin == tokens, (begin, end, tokens)
        assert mine.reused_from is not None
        assert all(max(begin, mine.spans[n].start) >= mine.reused_from for n in mine.reused)
        mine.handed_out = request.num_preemptions
        features = sorted(request.mm_features, key=lambda f: f.mm_position.offset)
        pixels = {
            number: features[number].data
            for number, span in enumerate(mine.spans)
            if number not in mine.reused and span.stop > begin and span.start < end
        }
        asked = Asked(request.request_id, tuple(request.all_token_ids), mine.spans, tuple(blocks))
        self._loads.append(Load(asked, begin, end, mine.reused, pixels, mine.policy))

    def step(self, computed: dict[str, int], ids_of: Callable[[str], Sequence[int]], finished: Iterable[str]) -> Work:
        """What the worker has to do besides in this step.

        Parameters
        ----------
        computed : dict of str to int
            By request, tokens that are computed when the step ends.
        """
        work, self._loads = Work(self._loads), []
        for name, tokens in computed.items():
            mine = self._requests.get(name)
            if mine is None or not mine.unsaved:
                continue
            ready = tuple(number for number in mine.unsaved if mine.spans[number].stop <= tokens)
            if ready:
                mine.unsaved = [number for number in mine.unsaved if number not in ready]
                asked = Asked(name, tuple(ids_of(name)), mine.spans, tuple(self._blocks_of(name)))
                work.saves.append(Save(asked, ready))
        for name in finished:
            self._requests.pop(name, None)
        return work

    def _reusable(self, spans: Sequence[Span], begin: int, first: int = 0, whole: bool = False) -> list[Span]:
        """The pictures from token `begin` on whose stored K/V are used, none before token `first`; or whole ones only.

        A picture that was seen behind reused ones only has come back: everything before it is computed this once. And
        less than a block of tokens is as quick to compute, exactly.
        """
        known = {span: self._has_kv(span) for span in spans if span.stop > begin}
        after = max((s.stop for s, has in known.items() if not has and s.content in self._behind), default=begin)
        found = [
            span
            for span, has in known.items()
            if has
            and (span.start >= after or after == begin)
            and max(span.start, begin) >= first
            and (span.start >= begin or not whole)
        ]
        return found if sum(span.stop - max(span.start, begin) for span in found) >= self._block else []

    def _note_behind(self, span: Span) -> None:
        if not self._has_kv(span):
            self._behind[span.content] = None
            self._behind.move_to_end(span.content)
            if len(self._behind) > _CHATS:
                self._behind.popitem(last=False)

    def _own_hashes(self, request: Any, first: int, policy: str) -> None:
        """Give a request hashes of its own from its block `first` on; those of the request whose prompt it continues,
        under the same policy, if there is one."""
        ids, salt = array("q", request.prompt_token_ids), None
        running, at = hashlib.sha256(policy.encode()), 0
        for length in sorted({length for length, _ in self._chats if length <= len(ids)}):
            running.update(ids[at:length].tobytes())
            at = length
            salt = self._chats.get((length, running.copy().digest()), salt)
        running.update(ids[at:].tobytes())
        whole = running.digest()
        salt = salt or whole
        self._chats[len(ids), whole] = salt
        self._chats.move_to_end((len(ids), whole))
        if len(self._chats) > _CHATS:
            self._chats.popitem(last=False)
        request._block_hasher = _salted(request._block_hasher, first, salt)
        del request.block_hashes[first:]
        request.update_block_hashes()


def _salted(hasher: Any, first: int, salt: bytes) -> Any:
    """vLLM's function from a request to its new blocks' hashes, with salt in block `first`, and so in all behind it."""
    if hasher is None:  # no prefix caching
        return None

    def salted(request: Any) -> list[Any]:
        have = len(request.block_hashes)
        new: list[Any] = hasher(request)
        at = first - have
        if not 0 <= at < len(new):
            return new
        own = type(new[at])(hashlib.sha256(b"vlcache" + salt + bytes(new[at])).digest())
        request.block_hashes.extend([*new[:at], own])  # what the next ones are chained to
        rest = hasher(request)
        del request.block_hashes[have:]
        return [*new[:at], own, *rest]

    return salted
