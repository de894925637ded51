from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import torch

from service.engine.picker import open_picker
from service.engine.request import RequestRejected, SamplingParams, StructuredKind, StructuredOutput
from service.engine.sampler import SamplingState, sample
from service.text.structured import (
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    Grammar,
    GrammarError,
    StructuredOutputCompiler,
)
from service.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "é", "😀"]}, "minItems": 1, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"^[a-c]{2,5}-(\d{3}|é+|😀/)!?$"
SUMS = """start: sum
sum: NUMBER | "(" sum OPERATOR sum ")"
OPERATOR: "+" | "-"
NUMBER: /[0-9]{1,3}/
"""
CHOICES = ("yes", "no", "not sure", 'a "quoted" \\ one', "né\n😀")


def schema_holds(text: str) -> None:
    value = json.loads(text)
    assert set(value) <= set(SCHEMA["properties"])  # type: ignore[call-overload]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"x", "é", "😀"}
    assert value.get("ok") in (True, False, None)
    if "address" in value:
        assert list(value["address"]) == ["zip"]
        assert re.fullmatch("[0-9]{5}", value["address"]["zip"])


def is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def regex_holds(text: str) -> None:
    assert re.fullmatch(REGEX, text, re.ASCII)


def sum_holds(text: str) -> None:
    while (shorter := re.sub(r"\([0-9]{1,3}[+-][0-9]{1,3}\)", "7", text)) != text:
        text = shorter
    assert re.fullmatch("[0-9]{1,3}", text)


def is_choice(text: str) -> None:
    assert text in CHOICES


KINDS = {
    "json_schema": (StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(SCHEMA)), schema_holds),
    "json_object": (StructuredOutput(StructuredKind.JSON_OBJECT), is_object),
    "regex": (StructuredOutput(StructuredKind.REGEX, REGEX), regex_holds),
    "grammar": (StructuredOutput(StructuredKind.GRAMMAR, SUMS), sum_holds),
    "choice": (StructuredOutput(StructuredKind.CHOICE, choices=CHOICES), is_choice),
}


@pytest.fixture(scope="module", params=["byte_level", "llama2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.BYTE_EXACT[request.param](), {"eos_token": "</s>"}, None)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> StructuredOutputCompiler:
    return StructuredOutputCompiler(tokenizer, tokenizer.eos_token_ids)


def closing_bias(tokenizer: Tokenizer) -> dict[int, float]:
    """Random text seldom closes what it opened; this makes it end within some hundred tokens."""
    wanted = {'"': 4.0, "}": 6.0, "]": 6.0, ")": 3.0, "(": -2.0, "{": -2.0, "[": -2.0}
    bias = {
        token_id: wanted[text]
        for token_id in range(tokenizer.vocab_size)
        if (text := tokenizer.token_text(token_id)) in wanted
    }
    return {**bias, **dict.fromkeys(tokenizer.eos_token_ids, 3.0)}


def generate(
    tokenizer: Tokenizer, grammars: list[Grammar], extra_logits: int = 5, **params: Any
) -> list[list[int]]:
    """Tokens drawn from random logits under each grammar until it ends, in one batch."""
    vocab_size = tokenizer.vocab_size + extra_logits
    bias = closing_bias(tokenizer)
    states = [
        SamplingState(
            SamplingParams(max_tokens=2000, seed=i, logit_bias=bias, **params),
            (),
            0,
            vocab_size,
            tokenizer.eos_token_ids,
            grammar,
        )
        for i, grammar in enumerate(grammars)
    ]
    outputs: list[list[int]] = [[] for _ in grammars]
    generator = torch.Generator().manual_seed(0)
    running = list(range(len(grammars)))
    for _ in range(2000):
        logits = torch.randn(len(running), vocab_size, generator=generator)
        for i, token in zip(
            running, sample(logits, [states[i] for i in running], open_picker()), strict=True
        ):
            assert token.error is None
            states[i].accept(token.token_id)
            outputs[i].append(token.token_id)
        running = [
            i for i in running if outputs[i][-1] not in tokenizer.eos_token_ids and not states[i].is_finished
        ]
        if not running:
            return outputs
    raise AssertionError(f"{len(running)} answers did not end")


@pytest.mark.parametrize("kind", KINDS)
def test_every_random_answer_has_the_form_asked_for(
    kind: str, tokenizer: Tokenizer, compiler: StructuredOutputCompiler
) -> None:
    constraint, holds = KINDS[kind]
    grammar = compiler.compile(constraint)
    outputs = generate(tokenizer, [grammar.copy() for _ in range(100)])
    prompt = tokenizer.encode("x")
    for output in outputs:
        holds(tokenizer.decode([*prompt, *output])[1:])
    assert len({tuple(output) for output in outputs}) > 3


def test_an_answer_may_not_end_before_it_is_complete(
    tokenizer: Tokenizer, compiler: StructuredOutputCompiler
) -> None:
    grammar = compiler.compile(StructuredOutput(StructuredKind.REGEX, "[ab][ab]"))
    for letter in "ab":
        mask = np.zeros(grammar.mask_words, dtype=np.int32)
        grammar.fill_mask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        assert not set(allowed.tolist()) & tokenizer.eos_token_ids
        assert not grammar.is_finished
        assert not grammar.is_accepting
        grammar.accept(next(i for i in allowed.tolist() if tokenizer.token_text(i) == letter))
    assert grammar.is_accepting
    assert grammar.is_finished


def test_min_tokens_yields_to_a_grammar_that_is_complete(tokenizer: Tokenizer) -> None:
    compiler = StructuredOutputCompiler(tokenizer, tokenizer.eos_token_ids)
    short = compiler.compile(StructuredOutput(StructuredKind.CHOICE, choices=("a", "b")))
    (output,) = generate(tokenizer, [short], min_tokens=50)
    assert len(output) <= 2
    long = compiler.compile(StructuredOutput(StructuredKind.REGEX, "[ab]+"))
    (output,) = generate(tokenizer, [long], min_tokens=50)
    assert len(output) > 50


def test_copies_are_independent(compiler: StructuredOutputCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutput(StructuredKind.CHOICE, choices=("a",)))
    other = grammar.copy()
    grammar.accept(next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "a"))
    assert grammar.is_finished
    assert not other.is_finished


def test_a_token_that_does_not_fit_is_an_error(
    compiler: StructuredOutputCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(StructuredOutput(StructuredKind.CHOICE, choices=("a",)))
    wrong = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "b")
    with pytest.raises(GrammarError):
        grammar.accept(wrong)
    with pytest.raises(GrammarError):
        grammar.fill_mask(np.zeros(grammar.mask_words, dtype=np.int32))


def test_a_failed_grammar_fails_its_own_row_only(
    compiler: StructuredOutputCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(StructuredOutput(StructuredKind.CHOICE, choices=("a",)))
    broken = grammar.copy()
    with pytest.raises(GrammarError):
        broken.accept(next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "b"))
    params = SamplingParams(max_tokens=9)
    states = [SamplingState(params, (), 0, tokenizer.vocab_size, (), each) for each in (broken, grammar)]
    tokens = sample(torch.zeros(2, tokenizer.vocab_size), states, open_picker())
    assert str(tokens[0].error).startswith("structured_output: ")
    assert tokenizer.token_text(tokens[1].token_id) == "a"


@pytest.mark.parametrize("row", [np.zeros(1, dtype=np.int32), np.zeros(10_000, dtype=np.int64)])
def test_a_mask_of_the_wrong_shape_is_refused(row: Any, compiler: StructuredOutputCompiler) -> None:
    grammar = compiler.compile(StructuredOutput(StructuredKind.CHOICE, choices=("a",)))
    with pytest.raises(ValueError, match="int32"):
        grammar.fill_mask(row)


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (StructuredKind.JSON_SCHEMA, "", "not JSON"),
        (StructuredKind.JSON_SCHEMA, "{", "not JSON"),
        (StructuredKind.JSON_SCHEMA, "[" * 100_000, "not JSON"),
        (StructuredKind.JSON_SCHEMA, "[]", "must be a JSON object"),
        (StructuredKind.JSON_SCHEMA, '{"type": "text"}', "type"),
        (StructuredKind.JSON_SCHEMA, '{"contains": {}}', "contains"),
        (StructuredKind.JSON_SCHEMA, '{"$ref": "#/definitions/x"}', "definitions/x"),
        (StructuredKind.JSON_SCHEMA, '{"type": "string", "minLength": 3, "maxLength": 2}', "."),
        (StructuredKind.REGEX, "", "empty"),
        (StructuredKind.REGEX, "(a", "unclosed group"),
        (StructuredKind.REGEX, "(?=a)b", "look-around"),
        (StructuredKind.REGEX, "a" * (MAX_CONSTRAINT_BYTES + 1), "limit"),
        (StructuredKind.GRAMMAR, "", "mpty"),
        (StructuredKind.GRAMMAR, "start: missing", "missing"),
        (StructuredKind.GRAMMAR, "begin: /a/", "start"),
        (StructuredKind.CHOICE, "", "needs one or more"),
    ],
)
def test_bad_constraints_are_rejected(
    kind: StructuredKind, text: str, problem: str, compiler: StructuredOutputCompiler
) -> None:
    with pytest.raises(RequestRejected, match=problem) as caught:
        compiler.compile(StructuredOutput(kind, text))
    assert caught.value.field == "structured_output"


@pytest.mark.parametrize(
    "choices", [("a", ""), ("a",) * (MAX_CHOICES + 1), ("a" * MAX_CONSTRAINT_BYTES, "b")]
)
def test_bad_choices_are_rejected(choices: tuple[str, ...], compiler: StructuredOutputCompiler) -> None:
    with pytest.raises(RequestRejected, match="structured_output"):
        compiler.compile(StructuredOutput(StructuredKind.CHOICE, choices=choices))


def test_blanks_in_json_are_bounded(tokenizer: Tokenizer, compiler: StructuredOutputCompiler) -> None:
    grammar = compiler.compile(StructuredOutput(StructuredKind.JSON_OBJECT))
    ids = {tokenizer.token_text(i): i for i in range(tokenizer.vocab_size)}
    grammar.accept(ids["{"])
    accepted = 0
    mask = np.zeros(grammar.mask_words, dtype=np.int32)
    while accepted < 50:
        grammar.fill_mask(mask)
        if not np.unpackbits(mask.view(np.uint8), bitorder="little")[ids[" "]]:
            break
        grammar.accept(ids[" "])
        accepted += 1
    assert 1 <= accepted <= 20
    assert not grammar.is_finished


def test_tokenizers_that_are_not_supported_are_named() -> None:
    words = Tokenizer(tiny_tokenizers.word_level(), {"eos_token": "</s>"}, None)
    with pytest.raises(RequestRejected, match="tokenizer"):
        StructuredOutputCompiler(words, words.eos_token_ids).compile(
            StructuredOutput(StructuredKind.REGEX, "ab")
        )
    with pytest.raises(RequestRejected, match="no end-of-sequence token"):
        StructuredOutputCompiler(words, []).compile(StructuredOutput(StructuredKind.REGEX, "ab"))


def test_trie_is_built_without_threads_and_serves_forked_children(tokenizer: Tokenizer) -> None:
    script = """
import os, sys
from pathlib import Path
from service.engine.request import StructuredKind, StructuredOutput
from service.text.structured import StructuredOutputCompiler
from service.text.tokenizer import Tokenizer
compiler = StructuredOutputCompiler(Tokenizer.from_dir(Path(sys.argv[1])), [2])
compiler.prepare()
trie = compiler._trie
assert trie is not None
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started"
pid = os.fork()
if pid == 0:
    grammar = compiler.compile(StructuredOutput(StructuredKind.REGEX, "a+"))
    os._exit(0 if compiler._trie is trie and not grammar.is_finished else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(tokenizer.to_json())
        # As the launcher starts a zygote: numpy's OpenBLAS would start threads at import.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_preparing_for_a_tokenizer_that_is_not_supported_is_no_error() -> None:
    words = Tokenizer(tiny_tokenizers.word_level(), {"eos_token": "</s>"}, None)
    compiler = StructuredOutputCompiler(words, words.eos_token_ids)
    compiler.prepare()
    with pytest.raises(RequestRejected, match="tokenizer"):
        compiler.compile(StructuredOutput(StructuredKind.REGEX, "ab"))
