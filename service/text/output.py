"""The text of one completion as its tokens come: detokenized, held back and cut at stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from service.engine.request import SamplingParams
from service.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 64


class StopStrings:
    """Finds the first stop string in a text that comes in parts.

    The string that is complete first wins; of several that end at the same character, the longest. The result
    does not depend on how the text is cut into parts. Knuth, Morris and Pratt's matcher, one per string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """The text that can no longer be part of a stop string, and the stop string if one is complete.

        After a match the text ends with the stop string. Without `may_stop` a complete string is no match.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        for end in range(len(self._held), len(text)):
            stop = self._advance(text[end], may_stop)
            if stop is not None:
                self._held = ""
                return text[: end + 1], stop
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain], None

    def finish(self) -> str:
        """The text that was held back because it might have begun a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, may_stop: bool) -> str | None:
        found = None
        for i, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = failure[matched - 1]
            self._matched[i] = matched
        return found if may_stop else None


def _failure_function(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = failure[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        failure[i] = matched
    return failure


class TextOutput:
    """The text of one completion.

    The texts of all tokens and of `finish` joined equal the decoded completion, cut at the first stop string.
    A token that ends the sequence adds its own text only with `include_stop_str_in_output`. The prompt is
    context: a blank that belongs between prompt and completion is kept. `end_ids` are the tokens that end the
    sequence; `has_ended` says that one of them or a stop string came. `stop_reason` is the stop string that ended the text,
    if one did; `finish` may still find one in text that it completes.
    """

    # A token so costs fewer lines of memory, which are seldom in a cache after a model has run.
    __slots__ = (
        "_detokenizer",
        "_may_stop",
        "_params",
        "_settled_texts",
        "_stops",
        "_tokenizer",
        "_tokens",
        "end_ids",
        "has_ended",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self.end_ids = params.stop_token_ids | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self._detokenizer = tokenizer.detokenizer()
        tail = tokenizer.pieces(prompt_token_ids[-_CONTEXT_TOKENS:], params.skip_special_tokens)
        # Where the tail has no text, it matters whether anything before it has.
        self._detokenizer.seed(tail or tokenizer.pieces(prompt_token_ids, params.skip_special_tokens))
        self._settled_texts = tokenizer.settled_texts(params.skip_special_tokens)
        self._stops = StopStrings(params.stop)
        self._may_stop = bool(params.stop)
        self._tokens = 0
        self.has_ended = False
        self.stop_reason: str | None = None

    def append(self, token_id: int) -> str:
        """Takes the next token and gives the text that is certain and new. After a stop string was found the text is
        complete and further tokens add nothing.
        """
        self._tokens += 1
        if token_id in self.end_ids:
            self.has_ended = True
            if not self._params.include_stop_str_in_output:
                return ""
        text = self._settled_texts.get(token_id) if self._detokenizer.is_settled else None
        if text is None:
            text = self._detokenized(token_id)
        return self._cut(text) if self._may_stop else text

    def finish(self) -> str:
        """The rest of the text: what was held back, with U+FFFD for a character that stayed incomplete."""
        if not self._tokens:
            return ""
        text = self._cut(self._detokenizer.finish())
        return text if self.stop_reason is not None else text + self._stops.finish()

    def _detokenized(self, token_id: int) -> str:
        was_settled = self._detokenizer.is_settled
        piece = self._tokenizer.piece(token_id, self._params.skip_special_tokens)
        text = "" if piece is None else self._detokenizer.push(piece)
        if was_settled and self._detokenizer.is_settled:
            self._settled_texts[token_id] = text
        return text

    def _cut(self, text: str) -> str:
        if self.stop_reason is not None:
            return ""
        certain, stop = self._stops.feed(text, self._tokens > self._params.min_tokens)
        if stop is None:
            return certain
        self.stop_reason, self.has_ended = stop, True
        return certain if self._params.include_stop_str_in_output else certain[: -len(stop)]
