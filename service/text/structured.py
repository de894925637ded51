"""Constraints on the form of an answer: JSON schema, JSON object, regular expression, Lark grammar, choice.

The work is done by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over a lexer of
derivatives, which finds the tokens that may come next in tens of microseconds and needs no preparation per
grammar.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from service.engine.request import RequestRejected, StructuredKind, StructuredOutput
from service.text.tokenizer import Tokenizer

MAX_CONSTRAINT_BYTES = 256 * 1024
MAX_CHOICES = 4096
# Without a limit a weak model can go on with blanks for ever.
_JSON_BLANKS = r"[ \n\r\t]{1,20}"
_FIELD = "structured_output"


class GrammarError(ValueError):
    """A token was taken that the grammar forbids, or the grammar became too complex to follow."""


class Grammar:
    """The state of one constraint while a completion is made."""

    def __init__(self, matcher: LLMatcher, mask_words: int) -> None:
        self._matcher = matcher
        self.mask_words = mask_words

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Writes the tokens that may come next into a contiguous row of `mask_words` int32: bit i of the row
        is token i.

        Raises `GrammarError` if they cannot be found within the parser's limits.
        """
        if row.shape != (self.mask_words,) or row.dtype != np.int32 or not row.flags.c_contiguous:
            raise ValueError(f"the mask must be a contiguous row of {self.mask_words} int32")
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def accept(self, token_id: int) -> None:
        """Takes the next token. Raises `GrammarError` if the grammar forbids it."""
        if not self._matcher.consume_token(token_id):
            self._check()
            raise GrammarError(f"token {token_id} does not fit the grammar")

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is complete, though it might go on."""
        return bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> Grammar:
        """An independent grammar in the same state."""
        return Grammar(self._matcher.deep_copy(), self.mask_words)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error().splitlines()[0])


class StructuredOutputCompiler:
    """Makes grammars for one tokenizer. The tokenizer's trie is built by `prepare`, or else at the first use."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._trie: LLTokenizer | None = None
        self._building = threading.Lock()
        self._limits = LLParserLimits(verbose_errors=False)

    def prepare(self) -> None:
        """Builds the trie, about a second for 100,000 tokens, so that forked children share it; starts no thread.

        A tokenizer that cannot be constrained is reported by `compile`, to the requests that ask for it.
        """
        with contextlib.suppress(RequestRejected):
            self._built_trie()

    def compile(self, constraint: StructuredOutput) -> Grammar:
        """The constraint at its beginning. May take up to a second for a large schema; may run in any thread.

        Raises `RequestRejected` naming `structured_output` for a constraint that is malformed, too large, or
        uses what is not supported.
        """
        _check_size(constraint)
        source = _grammar_source(constraint)
        trie = self._built_trie()
        problem = LLMatcher.validate_grammar(source, trie, limits=self._limits)
        if problem and not problem.startswith("WARNING"):
            raise RequestRejected(_FIELD, f"{constraint.kind.value}: {problem.strip()}")
        matcher = LLMatcher(trie, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestRejected(_FIELD, f"{constraint.kind.value}: {matcher.get_error().strip()}")
        return Grammar(matcher, (trie.vocab_size + 31) // 32)

    def _built_trie(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise RequestRejected(
                _FIELD, "the model has no end-of-sequence token to end a constrained answer"
            )
        with self._building:
            if self._trie is None:
                try:
                    self._trie = LLTokenizer(self._tokenizer.to_json(), eos_token=self._eos_token_ids)
                except Exception as error:
                    raise RequestRejected(
                        _FIELD, f"not supported with this model's tokenizer: {error}"
                    ) from error
            return self._trie


def _check_size(constraint: StructuredOutput) -> None:
    if len(constraint.choices) > MAX_CHOICES:
        raise RequestRejected(_FIELD, f"{len(constraint.choices)} choices, the limit is {MAX_CHOICES}")
    size = len(constraint.text.encode()) + sum(len(choice.encode()) for choice in constraint.choices)
    if size > MAX_CONSTRAINT_BYTES:
        raise RequestRejected(_FIELD, f"{size} bytes, the limit is {MAX_CONSTRAINT_BYTES}")


def _grammar_source(constraint: StructuredOutput) -> str:
    """The constraint in llguidance's own format."""
    match constraint.kind:
        case StructuredKind.JSON_SCHEMA:
            return _schema_source(constraint.text)
        case StructuredKind.JSON_OBJECT:
            return str(
                LLMatcher.grammar_from_json_schema(
                    {"type": "object"}, defaults={"whitespace_pattern": _JSON_BLANKS}
                )
            )
        case StructuredKind.REGEX:
            if not constraint.text:
                raise RequestRejected(_FIELD, "regex: the expression is empty")
            # As in JSON Schema, \d is 0 to 9 and no other script's digits.
            return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.text, 'd')}/"))
        case StructuredKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(constraint.text))
        case StructuredKind.CHOICE:
            if not constraint.choices or "" in constraint.choices:
                raise RequestRejected(_FIELD, "choice: needs one or more strings, none of them empty")
            strings = [json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(constraint.choices)]
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(strings)))


def _schema_source(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestRejected(_FIELD, f"json_schema: not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestRejected(_FIELD, "json_schema: a schema must be a JSON object")
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _JSON_BLANKS}))
    except ValueError as error:
        raise RequestRejected(_FIELD, f"json_schema: {error}") from error
