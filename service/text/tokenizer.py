"""The tokenizer of a checkpoint: tokenizer.json and what its neighbours say about special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from service.text.detokenizer import DecoderRules, Detokenizer


class TokenizerError(ValueError):
    """The tokenizer's files are missing or broken; the message names the file."""


class Tokenizer:
    """Text to token ids and back.

    `encode` and `decode` change nothing and may run in any thread; loading and encoding start no threads, so
    a process that did both may fork.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], chat_template: str | None
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = special_tokens
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._pieces: dict[int, str] = {token_id: piece for piece, token_id in vocabulary.items()}
        self._vocab_size = max(self._pieces, default=-1) + 1
        self._eos_token_ids = self._named_ids(["eos_token"])
        decoder = backend.decoder
        spec = None if decoder is None else json.loads(decoder.__getstate__())
        self._rules = DecoderRules(spec, self._decode_pieces)
        self._settled_texts: dict[bool, dict[int, str]] = {True: {}, False: {}}

    @classmethod
    def from_dir(cls, model_dir: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, the chat template's files and
        the end tokens in generation_config.json or config.json; only the first must exist.

        Raises `TokenizerError` naming the file that is missing or broken.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file")
        try:
            # The library's own reader reports a bad encoding with a panic, not an error.
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:
            raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = {
            **_read_object(model_dir / "special_tokens_map.json"),
            **_read_object(model_dir / "tokenizer_config.json"),
        }
        special_tokens = _special_tokens(config)
        try:
            _add_tokens(backend, config, special_tokens)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TokenizerError(f"{model_dir / 'tokenizer_config.json'}: {error!r}") from error
        tokenizer = cls(backend, special_tokens, _chat_template(model_dir, config))
        tokenizer._eos_token_ids |= _model_eos_token_ids(model_dir)
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's own special tokens (such as BOS) by default."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary have none."""
        known = [token_id for token_id in token_ids if token_id in self._pieces]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token, its leading blank included; U+FFFD stands for an incomplete character."""
        piece = self._pieces.get(token_id)
        return "" if piece is None else self._rules.piece_text(piece)

    def detokenizer(self) -> Detokenizer:
        """A new incremental detokenizer, to be fed with `pieces`."""
        return self._rules.detokenizer()

    def piece(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The vocabulary string of one token; None for an unknown id and, if asked, for a special token."""
        if skip_special_tokens and token_id in self._special_ids:
            return None
        return self._pieces.get(token_id)

    def settled_texts(self, skip_special_tokens: bool) -> dict[int, str]:
        """Where whoever feeds a detokenizer may look up and keep the text by which a token leads it from one settled state
        to the next.
        """
        return self._settled_texts[skip_special_tokens]

    def pieces(self, token_ids: Iterable[int], skip_special_tokens: bool) -> list[str]:
        """The vocabulary strings of `token_ids`, without unknown ids and, if asked, special tokens."""
        found = (self.piece(token_id, skip_special_tokens) for token_id in token_ids)
        return [piece for piece in found if piece is not None]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that `skip_special_tokens` leaves out."""
        return self._special_ids

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a sequence: the tokenizer's EOS and those that the model's configuration names."""
        return self._eos_token_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens (`bos_token`, `eos_token`, ...), as chat templates use them."""
        return dict(self._special_tokens)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template, or None if the checkpoint has none."""
        return self._chat_template

    def to_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, with all tokens added."""
        return str(self._backend.to_str())

    def _named_ids(self, names: Sequence[str]) -> frozenset[int]:
        texts = (self._special_tokens.get(name) for name in names)
        ids = (self._backend.token_to_id(text) for text in texts if text is not None)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def _decode_pieces(self, pieces: list[str]) -> str:
        decoder = self._backend.decoder
        return " ".join(pieces) if decoder is None else str(decoder.decode(pieces))


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _token_content(value: Any) -> str | None:
    """The text of a special token, which is written as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {key: _token_content(value) for key, value in config.items() if key.endswith("_token")}
    return {key: content for key, content in named.items() if content is not None}


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Adds the tokens that tokenizer_config.json names and tokenizer.json lacks or has as plain ones."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    for _, options in listed:
        content = options["content"]
        if content not in known:
            known[content] = tokenizers.AddedToken(
                content, **{flag: options[flag] for flag in flags if flag in options}
            )
            backend.add_tokens([known[content]])
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = [
        content for content in map(_token_content, more) if content is not None and content not in known
    ]
    named = [text for text in special_tokens.values() if not (text in known and known[text].special)]
    for content in dict.fromkeys((*others, *named)):
        backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _chat_template(model_dir: Path, config: dict[str, Any]) -> str | None:
    """The default chat template: chat_template.jinja, else tokenizer_config.json, else chat_template.json."""
    path = model_dir / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: not text: {error}") from error
    path = model_dir / "tokenizer_config.json"
    template = config.get("chat_template")
    if template is None:
        path = model_dir / "chat_template.json"
        template = _read_object(path).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        if template is None:
            raise TokenizerError(f"{path}: chat_template has no template named default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{path}: chat_template is neither a string nor a list of named templates")
    return template


def _model_eos_token_ids(model_dir: Path) -> frozenset[int]:
    """`eos_token_id` of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _read_object(model_dir / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            raise TokenizerError(f"{model_dir / name}: eos_token_id is not a token id or a list of them")
        return frozenset(ids)
    return frozenset()
