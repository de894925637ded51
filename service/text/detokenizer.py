"""Incremental detokenization: one small state machine per kind of `tokenizers` decoder.

Each reproduces `Tokenizer.decode` of the whole sequence piece by piece: a text is handed out as soon as no
later token can change it, and not before. The kinds and their rules are those of the `decoders` module of
huggingface/tokenizers.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW_TOKENS = 8
_LONGEST_HELD_TOKENS = 16


class Detokenizer(Protocol):
    """Turns pieces (vocabulary strings, special ones already left out) into text, in order."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing that came so far bears on the text of what comes: a piece that leaves it settled always has the
        same text, and need not be pushed where that is known.
        """

    def seed(self, pieces: Sequence[str]) -> None:
        """Takes what comes before the first piece; its text is not handed out."""

    def push(self, piece: str) -> str:
        """The text that became certain with this piece."""

    def finish(self) -> str:
        """The text still held; broken characters become U+FFFD, as in a full decode."""


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte in byte-level vocabularies (`bytes_to_unicode` of the GPT-2 release)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(256 + i), byte) for i, byte in enumerate(others))
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece; a piece with a character outside the alphabet stands for its own
    UTF-8.
    """
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


def _incomplete_tail(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character and do not end it (at most 3)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


class ByteLevelDetokenizer:
    """Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM): UTF-8 over the joined bytes of all pieces.

    It is settled between two characters.
    """

    __slots__ = ("_utf8", "is_settled")

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_settled = True

    def seed(self, pieces: Sequence[str]) -> None:
        """See `Detokenizer`. Only a character that the pieces leave incomplete matters."""
        tail = b""
        for piece in reversed(pieces):
            tail = byte_level_bytes(piece) + tail
            if len(tail) >= 4:
                break
        self._utf8.decode(tail)
        self.is_settled = not self._utf8.getstate()[0]

    def push(self, piece: str) -> str:
        """See `Detokenizer`."""
        text = self._utf8.decode(byte_level_bytes(piece))
        self.is_settled = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class ByteFallbackRules:
    """Options of a byte-fallback decoder: replacements made in each piece, and what is cut from the start of
    the text.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    byte_tokens: bool = True
    strip_content: str = ""
    strip_count: int = 0


class ByteFallbackDetokenizer:
    """Sentencepiece-like vocabularies (Llama 2, Mistral, Gemma): plain pieces, and `<0xNN>` for single bytes.

    A run of byte pieces is decoded as one: one bad byte in it turns every byte of the run into U+FFFD. A run
    is therefore held until a plain piece ends it. `meanings` is shared by all detokenizers of a vocabulary: what
    a piece was found to be, the byte or the text.
    """

    def __init__(self, rules: ByteFallbackRules, meanings: dict[str, int | str]) -> None:
        self._rules = rules
        self._meanings = meanings
        self._run = bytearray()
        self._to_strip = rules.strip_count

    @property
    def is_settled(self) -> bool:
        """See `Detokenizer`."""
        return not self._run and not self._to_strip

    def seed(self, pieces: Sequence[str]) -> None:
        """See `Detokenizer`. Whole characters of a byte run stay with the prompt; an incomplete one is
        carried on.
        """
        for piece in pieces:
            if not self._to_strip:
                break
            meaning = self._meaning(piece)
            self._strip(meaning if isinstance(meaning, str) else REPLACEMENT)
        tail: list[int] = []
        for piece in reversed(pieces[-3:]):
            meaning = self._meaning(piece)
            if isinstance(meaning, str):
                break
            tail.insert(0, meaning)
        self._run = bytearray(_incomplete_tail(bytes(tail)))

    def push(self, piece: str) -> str:
        """See `Detokenizer`."""
        meaning = self._meaning(piece)
        if not isinstance(meaning, str):
            self._run.append(meaning)
            return ""
        if self._run:
            meaning = self._end_run() + meaning
        return self._strip(meaning) if self._to_strip else meaning

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._strip(self._end_run())

    def _meaning(self, piece: str) -> int | str:
        """The byte that a piece stands for, or its text."""
        meaning = self._meanings.get(piece)
        if meaning is None:
            match = _BYTE_TOKEN.fullmatch(piece) if self._rules.byte_tokens else None
            meaning = int(match[1], 16) if match else self._plain_text(piece)
            self._meanings[piece] = meaning
        return meaning

    def _plain_text(self, piece: str) -> str:
        for pattern, content in self._rules.replacements:
            piece = piece.replace(pattern, content)
        return piece

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._rules.strip_content:
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


class JoinedDetokenizer:
    """Vocabularies whose pieces keep no state: word level (joined by a blank) and metaspace without byte
    fallback.
    """

    def __init__(self, first_piece: Callable[[str], str], later_piece: Callable[[str], str]) -> None:
        self._first_piece = first_piece
        self._later_piece = later_piece
        self.is_settled = False

    def seed(self, pieces: Sequence[str]) -> None:
        """See `Detokenizer`."""
        self.is_settled = bool(pieces)

    def push(self, piece: str) -> str:
        """See `Detokenizer`."""
        text = self._later_piece(piece) if self.is_settled else self._first_piece(piece)
        self.is_settled = True
        return text

    def finish(self) -> str:
        """See `Detokenizer`. Nothing is ever held."""
        return ""


class WindowDetokenizer:
    """Any other decoder: decodes a short window of pieces again with each new one and hands out what was
    added.

    Right for decoders whose text for a piece depends on a few pieces before it.
    """

    is_settled = False

    def __init__(self, decode_pieces: Callable[[list[str]], str]) -> None:
        self._decode_pieces = decode_pieces
        self._window: list[str] = []
        self._known = ""
        self._held = 0

    def seed(self, pieces: Sequence[str]) -> None:
        """See `Detokenizer`."""
        self._window = list(pieces[-_WINDOW_TOKENS:])
        self._known = self._decode_pieces(self._window)

    def push(self, piece: str) -> str:
        """See `Detokenizer`."""
        self._window.append(piece)
        text = self._decode_pieces(self._window)
        # A U+FFFD at the end may become a character; one that stays for this long is real.
        if text.endswith(REPLACEMENT) and self._held < _LONGEST_HELD_TOKENS:
            self._held += 1
            return ""
        self._held = 0
        added = text[len(self._known) :]
        if len(self._window) >= 2 * _WINDOW_TOKENS:
            self._window = self._window[-_WINDOW_TOKENS:]
            text = self._decode_pieces(self._window)
        self._known = text
        return added

    def finish(self) -> str:
        """See `Detokenizer`."""
        text = self._decode_pieces(self._window)
        added = text[len(self._known) :]
        self._known = text
        return added


class DecoderRules:
    """What a tokenizer.json says under `decoder`, as a maker of detokenizers.

    `decode_pieces` is the library's own decoder, for kinds without a state machine of their own.
    """

    def __init__(self, spec: Mapping[str, Any] | None, decode_pieces: Callable[[list[str]], str]) -> None:
        self._steps = _steps(spec)
        self._kinds = [step["type"] for step in self._steps]
        self._fallback = _byte_fallback_rules(self._steps)
        self._decode_pieces = decode_pieces
        self._meanings: dict[str, int | str] = {}

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer of the right kind."""
        if not self._steps:
            return JoinedDetokenizer(str, lambda piece: " " + piece)
        if self._kinds == ["ByteLevel"]:
            return ByteLevelDetokenizer()
        if self._kinds == ["Metaspace"]:
            return self._metaspace(self._steps[0])
        if self._fallback is not None:
            return ByteFallbackDetokenizer(self._fallback, self._meanings)
        return WindowDetokenizer(self._decode_pieces)

    def piece_text(self, piece: str) -> str:
        """The text of one piece in the middle of others; U+FFFD stands for an incomplete character."""
        if self._kinds == ["ByteLevel"]:
            return byte_level_bytes(piece).decode("utf-8", "replace")
        if not self._steps:
            return piece
        middle = self.detokenizer()
        middle.seed(["x"])
        return middle.push(piece) + middle.finish()

    @staticmethod
    def _metaspace(step: Mapping[str, Any]) -> Detokenizer:
        mark = step.get("replacement", "▁")
        kept = " " if step.get("prepend_scheme", "always") == "never" else ""
        return JoinedDetokenizer(
            lambda piece: piece.replace(mark, kept), lambda piece: piece.replace(mark, " ")
        )


def _steps(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A decoder as the flat list of its steps."""
    if spec is None:
        return []
    if spec["type"] != "Sequence":
        return [spec]
    return [flat for step in spec["decoders"] for flat in _steps(step)]


def _byte_fallback_rules(steps: Sequence[Mapping[str, Any]]) -> ByteFallbackRules | None:
    """Options of the sequence Replace* ByteFallback? Fuse Strip?, or None for another sequence."""
    rest = list(steps)
    replacements: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_tokens = bool(rest) and rest[0]["type"] == "ByteFallback"
    if byte_tokens:
        rest.pop(0)
    if not rest or rest.pop(0)["type"] != "Fuse":
        return None
    if not rest:
        return ByteFallbackRules(tuple(replacements), byte_tokens)
    strip = rest.pop(0)
    if rest or strip["type"] != "Strip" or strip["stop"]:
        return None
    return ByteFallbackRules(tuple(replacements), byte_tokens, strip["content"], strip["start"])
