"""Small tokenizers of every kind that checkpoints use, made in code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

MULTILINGUAL_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "  two leading blanks,   three inside\n\n\tand a tab",
    "Zażółć gęślą jaźń; déjà vu; Größe",
    "你好，世界。今天天气很好。",
    "こんにちは世界、カタカナ",
    "안녕하세요 세계",
    "שלום עולם, מה שלומך?",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "smile 😀 flag 🇨🇭 family 👨‍👩‍👧‍👦 skin 👋🏽",
    'json {"name": "x", "n": [1, 2.5, true, null]}',
    "a real replacement character: \ufffd",
)
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
# Left out of the trained alphabets, so that they fall back to bytes or to pieces of characters.
UNSEEN_TEXTS = ("🦄🦄", "龘靐", "ꙮ ⵣ", "x😵‍💫y")


def byte_level_bpe() -> Tokenizer:
    """As GPT-2, Qwen and SmolLM have: no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(MULTILINGUAL_TEXTS, trainer)
    return tokenizer


def llama3_like() -> Tokenizer:
    """Byte-level, with a BOS that the post-processor adds."""
    tokenizer = byte_level_bpe()
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _bos_template(tokenizer)]
    )
    return tokenizer


def _bos_template(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def _sentencepiece_vocabulary() -> tuple[dict[str, int], list[str]]:
    """A vocabulary with specials, 256 byte tokens, then pieces with merges, trained on metaspaced text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=220, limit_alphabet=90, show_progress=False)
    trained.train_from_iterator([*MULTILINGUAL_TEXTS[:3], " ▁ ▁▁ leading"] * 2, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in model["vocab"] if piece not in pieces]
    pieces += [piece for piece in ("▁", "▁▁", "▁▁▁", "▁leading", "▁▁leading") if piece not in pieces]
    return {piece: i for i, piece in enumerate(pieces)}, [tuple(merge) for merge in model["merges"]]


def _byte_fallback_bpe(last_steps: list[Any]) -> Tokenizer:
    vocabulary, merges = _sentencepiece_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last_steps]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def llama2_like() -> Tokenizer:
    """Metaspace with byte fallback; a blank is put before the text and cut from the decoded text."""
    tokenizer = _byte_fallback_bpe([decoders.Strip(" ", 1, 0)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.post_processor = _bos_template(tokenizer)
    return tokenizer


def gemma_like() -> Tokenizer:
    """Byte fallback without a blank before the text."""
    tokenizer = _byte_fallback_bpe([])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.post_processor = _bos_template(tokenizer)
    return tokenizer


def unigram_metaspace() -> Tokenizer:
    """A Unigram model with the metaspace decoder and no byte fallback."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(SPECIAL_TOKENS), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(MULTILINGUAL_TEXTS, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words and no decoder."""
    words = {word for text in MULTILINGUAL_TEXTS for word in text.split()}
    vocabulary = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def word_piece() -> Tokenizer:
    """A decoder without a state machine of its own here."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    tokenizer.train_from_iterator(MULTILINGUAL_TEXTS, trainer)
    return tokenizer


BYTE_EXACT = {
    "byte_level": byte_level_bpe,
    "llama3": llama3_like,
    "llama2": llama2_like,
    "gemma": gemma_like,
}
ALL_KINDS = {
    **BYTE_EXACT,
    "unigram": unigram_metaspace,
    "word_level": word_level,
    "word_piece": word_piece,
}


def write_tokenizer(directory: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; returns the folder."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        **(config or {}),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
