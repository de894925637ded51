from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import tiny_tokenizers

from service.engine.request import SamplingParams
from service.text.detokenizer import DecoderRules
from service.text.output import StopStrings, TextOutput
from service.text.tokenizer import Tokenizer

BYTE_EXACT = sorted(tiny_tokenizers.BYTE_EXACT)
TEXTS = (
    *tiny_tokenizers.MULTILINGUAL_TEXTS,
    *tiny_tokenizers.UNSEEN_TEXTS,
    "\ufffd",
    "a\ufffd",
    "\ufffd\ufffdb",
)
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def tokenizers_by_kind() -> dict[str, Tokenizer]:
    return {kind: Tokenizer(make(), {}, None) for kind, make in tiny_tokenizers.ALL_KINDS.items()}


def stream(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    prompt: Sequence[int] = (),
    eos: Sequence[int] = (),
    **params: object,
) -> tuple[list[str], str | None]:
    """The texts of all tokens and of finish, up to the first stop, and the stop reason."""
    output = TextOutput(tokenizer, prompt, SamplingParams(max_tokens=1000, **params), frozenset(eos))
    texts = []
    for token_id in token_ids:
        texts.append(output.append(token_id))
        if output.stop_reason is not None:
            break
    return [*texts, output.finish()], output.stop_reason


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", sorted(tiny_tokenizers.ALL_KINDS))
def test_chunks_joined_equal_the_full_decode(
    kind: str, text: str, tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    chunks, _ = stream(tokenizer, ids)
    assert "".join(chunks) == tokenizer.decode(ids)
    if kind in BYTE_EXACT:
        assert "".join(chunks).strip() == text.strip()
        assert all(REPLACEMENT in text or REPLACEMENT not in chunk for chunk in chunks)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("kind", sorted(tiny_tokenizers.ALL_KINDS))
def test_any_tokens_at_all_join_to_the_full_decode(
    kind: str, skip_special_tokens: bool, tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer, source = tokenizers_by_kind[kind], random.Random(kind)
    for _ in range(150):
        ids = [source.randrange(tokenizer.vocab_size + 2) for _ in range(source.randrange(40))]
        chunks, _ = stream(tokenizer, ids, skip_special_tokens=skip_special_tokens)
        assert "".join(chunks) == tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", BYTE_EXACT)
def test_bytes_in_any_order_join_to_the_full_decode(
    kind: str, tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer, source = tokenizers_by_kind[kind], random.Random(kind)
    one_byte = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == REPLACEMENT]
    whole = tokenizer.encode("a 😀é", add_special_tokens=False)
    for _ in range(150):
        ids = [source.choice(one_byte + whole * 20) for _ in range(source.randrange(30))]
        assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("kind", sorted(tiny_tokenizers.ALL_KINDS))
def test_texts_kept_of_other_streams_change_nothing(kind: str, skip_special_tokens: bool) -> None:
    generator, backend = random.Random(kind), tiny_tokenizers.ALL_KINDS[kind]()
    shared = Tokenizer(backend, {}, None)
    for _ in range(30):
        # Few tokens, so that most were met before: within a character and between two, first and later.
        token_ids = [generator.randrange(min(shared.vocab_size, 40)) for _ in range(60)]
        wanted = stream(Tokenizer(backend, {}, None), token_ids, skip_special_tokens=skip_special_tokens)
        assert stream(shared, token_ids, skip_special_tokens=skip_special_tokens) == wanted


@pytest.mark.parametrize("prompt", ["The quick brown", "你好", "fox 😀", "", "🦄"])
@pytest.mark.parametrize("text", ["The dog", "  two", "🦄🦄 x", "龘", "\ufffd"])
@pytest.mark.parametrize("kind", sorted(tiny_tokenizers.ALL_KINDS))
def test_the_prompt_is_context(
    kind: str, text: str, prompt: str, tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode([*before, *ids])
    assert tokenizer.decode(before) + "".join(stream(tokenizer, ids, before)[0]) == whole


@pytest.mark.parametrize(
    ("pieces", "with_prompt", "alone"),
    [
        (["▁leading"], " leading", "leading"),
        (["▁▁leading"], "  leading", " leading"),
        (["▁", "▁leading"], "  leading", " leading"),
        (["▁", "▁", "▁leading"], "   leading", "  leading"),
        (["<0x20>", "▁leading"], "  leading", " leading"),
    ],
)
def test_leading_blanks_are_neither_lost_nor_stripped_twice(
    pieces: list[str], with_prompt: str, alone: str
) -> None:
    backend = tiny_tokenizers.llama2_like()
    tokenizer = Tokenizer(backend, {}, None)
    ids = [backend.token_to_id(piece) for piece in pieces]
    assert "".join(stream(tokenizer, ids, tokenizer.encode("fox"))[0]) == with_prompt
    assert "".join(stream(tokenizer, ids)[0]) == alone
    only_bos = [backend.token_to_id("<s>")]
    assert "".join(stream(tokenizer, ids, only_bos)[0]) == alone


def test_a_long_prompt_is_context_as_well() -> None:
    backend = tiny_tokenizers.llama2_like()
    tokenizer = Tokenizer(backend, {}, None)
    bos = backend.token_to_id("<s>")
    ids = [backend.token_to_id("▁leading")]
    assert "".join(stream(tokenizer, ids, [*tokenizer.encode("fox"), *[bos] * 500])[0]) == " leading"
    assert "".join(stream(tokenizer, ids, [bos] * 500)[0]) == "leading"


def test_two_emoji_over_nine_tokens() -> None:
    backend = tiny_tokenizers.llama2_like()
    tokenizer = Tokenizer(backend, {}, None)
    pieces = ["▁", *(f"<0x{byte:02X}>" for byte in "🦄🦄".encode())]
    ids = [backend.token_to_id(piece) for piece in pieces]
    assert len(ids) == 9
    chunks, _ = stream(tokenizer, ids, tokenizer.encode("fox"))
    assert "".join(chunks) == " 🦄🦄"
    assert REPLACEMENT not in "".join(chunks)


@pytest.mark.parametrize("kind", BYTE_EXACT)
@pytest.mark.parametrize("left_out", [1, 2])
def test_ending_inside_a_character(
    kind: str, left_out: int, tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("x🦄", add_special_tokens=False)[:-left_out]
    chunks, _ = stream(tokenizer, ids)
    assert all(REPLACEMENT not in chunk for chunk in chunks[:-1])
    assert "".join(chunks) == tokenizer.decode(ids)
    assert chunks[-1].startswith(REPLACEMENT)


def test_byte_level_text_comes_as_soon_as_a_character_is_whole() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level_bpe(), {}, None)
    ids = tokenizer.encode("a🦄b")
    assert [chunk for chunk in stream(tokenizer, ids)[0] if chunk] == ["a", "🦄", "b"]


def test_a_character_that_the_prompt_began_is_finished() -> None:
    for kind in BYTE_EXACT:
        tokenizer = Tokenizer(tiny_tokenizers.ALL_KINDS[kind](), {}, None)
        ids = tokenizer.encode("x🦄y", add_special_tokens=False)
        assert "".join(stream(tokenizer, ids[-2:], ids[:-2])[0]) == "🦄y"


def test_nothing_generated_is_no_text() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level_bpe(), {}, None)
    prompt = tokenizer.encode("x🦄")[:-1]
    assert stream(tokenizer, [], prompt) == ([""], None)


def test_a_window_does_not_grow_with_the_text() -> None:
    widest = 0

    def decode_pieces(pieces: list[str]) -> str:
        nonlocal widest
        widest = max(widest, len(pieces))
        return "".join(pieces)

    detokenizer = DecoderRules({"type": "CTC"}, decode_pieces).detokenizer()
    text = "".join(detokenizer.push(str(i % 10)) for i in range(500)) + detokenizer.finish()
    assert text == "".join(str(i % 10) for i in range(500))
    assert widest < 40


def cut_at_first_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """What a reader who looks at the text one character at a time would keep."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(include: bool) -> None:
    source = random.Random(7)
    for _ in range(1500):
        stops = ["".join(source.choices("ab", k=source.randint(1, 5))) for _ in range(source.randint(1, 3))]
        text = "".join(source.choices("abc", weights=(4, 4, 1), k=source.randrange(25)))
        matcher, kept, stop, at = StopStrings(stops), "", None, 0
        while at < len(text) and stop is None:
            size = source.randint(1, 4)
            certain, stop = matcher.feed(text[at : at + size], may_stop=True)
            kept, at = kept + certain, at + size
        if stop is None:
            kept += matcher.finish()
        elif not include:
            kept = kept[: -len(stop)]
        assert (kept, stop) == cut_at_first_stop(text, stops, include)


def test_only_a_possible_prefix_is_held_back() -> None:
    matcher = StopStrings(["aab", "DEFGHIJ"])
    assert matcher.feed("xxa", True) == ("xx", None)
    assert matcher.feed("a", True) == ("", None)
    assert matcher.feed("a", True) == ("a", None)
    assert matcher.feed("c", True) == ("aac", None)
    assert matcher.feed("ABCDEFGHI", True) == ("ABC", None)
    assert matcher.feed("!", True) == ("DEFGHI!", None)


@pytest.mark.parametrize(
    ("text", "stops", "kept", "reason"),
    [
        ("one ABCDEFGHIJ two", ("DEFGHIJ",), "one ABC", "DEFGHIJ"),
        ("a,b,c", ("b,c",), "a,", "b,c"),
        ("xaaab", ("aab",), "xa", "aab"),
        ("hello world", ("world", "lo"), "hel", "lo"),
        ("hello world", ("wor", "o w"), "hell", "o w"),
        ("The lazy dog", ("azy d", "zy"), "The la", "zy"),
        ("quick", ("q",), "", "q"),
        ("x🦄y", ("🦄",), "x", "🦄"),
        ("שלום עולם", ("ם ע",), "שלו", "ם ע"),
        ("never", ("nevermore",), "never", None),
    ],
)
@pytest.mark.parametrize("kind", BYTE_EXACT)
def test_stop_strings_over_token_borders(
    kind: str,
    text: str,
    stops: tuple[str, ...],
    kept: str,
    reason: str | None,
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    chunks, found = stream(tokenizer, ids, stop=stops)
    assert ("".join(chunks), found) == (kept, reason)
    chunks, found = stream(tokenizer, ids, stop=stops, include_stop_str_in_output=True)
    assert ("".join(chunks), found) == (kept + (reason or ""), reason)


def test_a_stop_in_the_last_character_is_found_at_the_end() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.llama2_like(), {}, None)
    ids = tokenizer.encode("x🦄")
    assert stream(tokenizer, ids, stop=("🦄",))[1] == "🦄"
    assert "".join(stream(tokenizer, ids, stop=("🦄",))[0]) == "x"


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, ""), (1, "a"), (2, "aa"), (3, "aaa"), (8, "aaaaaa")])
def test_stop_strings_before_min_tokens_are_not_stops(min_tokens: int, kept: str) -> None:
    backend = tiny_tokenizers.byte_level_bpe()
    tokenizer = Tokenizer(backend, {}, None)
    a = backend.token_to_id("a")
    chunks, _ = stream(tokenizer, [a] * 6, stop=("a",), min_tokens=min_tokens)
    assert "".join(chunks) == kept


def test_a_stop_may_begin_before_min_tokens_and_end_after() -> None:
    backend = tiny_tokenizers.byte_level_bpe()
    tokenizer = Tokenizer(backend, {}, None)
    ids = [backend.token_to_id(letter) for letter in "abcd"]
    assert stream(tokenizer, ids, stop=("bc",), min_tokens=2) == (["a", "", "", ""], "bc")


def test_text_after_a_stop_is_dropped() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level_bpe(), {}, None)
    output = TextOutput(tokenizer, (), SamplingParams(max_tokens=9, stop=("fox",)), frozenset())
    texts = [output.append(token_id) for token_id in tokenizer.encode("quick fox jumps over")]
    assert "".join(texts) + output.finish() == "quick "


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab</s>"),
        ({"skip_special_tokens": False, "ignore_eos": True}, "ab</s>"),
        ({"ignore_eos": True}, "ab"),
    ],
)
def test_text_of_the_end_token(params: dict, text: str) -> None:
    backend = tiny_tokenizers.byte_level_bpe()
    tokenizer = Tokenizer(backend, {}, None)
    ids = [backend.token_to_id(piece) for piece in ("a", "b", "</s>")]
    assert "".join(stream(tokenizer, ids, eos=[ids[-1]], **params)[0]) == text


def test_a_plain_stop_token_is_left_out_unless_asked_for() -> None:
    backend = tiny_tokenizers.byte_level_bpe()
    tokenizer = Tokenizer(backend, {}, None)
    ids = [backend.token_to_id(letter) for letter in "ab"]
    stop_ids = frozenset(ids[1:])
    assert "".join(stream(tokenizer, ids, stop_token_ids=stop_ids)[0]) == "a"
    included, _ = stream(tokenizer, ids, stop_token_ids=stop_ids, include_stop_str_in_output=True)
    assert "".join(included) == "ab"
