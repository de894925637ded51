from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_tokenizers
import transformers

from service.text.tokenizer import Tokenizer, TokenizerError

KINDS = sorted(tiny_tokenizers.ALL_KINDS)
TEXTS = (
    *tiny_tokenizers.MULTILINGUAL_TEXTS,
    *tiny_tokenizers.UNSEEN_TEXTS,
    "",
    " ",
    "  ",
    "\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a</s>b <s> c",
)


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_agree_with_transformers(kind: str, tmp_path: Path) -> None:
    folder = tiny_tokenizers.write_tokenizer(tmp_path, tiny_tokenizers.ALL_KINDS[kind]())
    ours, theirs = Tokenizer.from_dir(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": False, "add_eos_token": True}])
def test_tokenizer_json_decides_on_bos_and_eos(config: dict, tokenizer_class: str, tmp_path: Path) -> None:
    config = {**config, "tokenizer_class": tokenizer_class}
    folder = tiny_tokenizers.write_tokenizer(tmp_path, tiny_tokenizers.llama2_like(), config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("The quick fox", "déjà 你"):
        assert Tokenizer.from_dir(folder).encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "fox"},
        {"eos_token": {"content": "fox", "__type": "AddedToken"}},
        {"additional_special_tokens": ["fox", "<new>"]},
        {"extra_special_tokens": ["fox", "<new>"]},
    ],
)
def test_tokens_named_as_special_are_what_they_are_in_transformers(config: dict, tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_level_bpe()
    backend.add_tokens(["fox"])
    folder = tiny_tokenizers.write_tokenizer(tmp_path, backend, config)
    ours, theirs = Tokenizer.from_dir(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs.encode("a fox <new> b")
    assert ours.encode("a fox <new> b") == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_bos_of_the_post_processor_is_added_once() -> None:
    backend = tiny_tokenizers.llama3_like()
    tokenizer = Tokenizer(backend, {}, None)
    bos = backend.token_to_id("<s>")
    assert tokenizer.encode("fox").count(bos) == 1
    assert bos not in tokenizer.encode("fox", add_special_tokens=False)


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    added = {"content": "<tool>", "special": False, "normalized": False, "lstrip": False, "rstrip": False}
    backend = tiny_tokenizers.byte_level_bpe()
    config = {"added_tokens_decoder": {str(backend.get_vocab_size()): added}, "pad_token": "<pad>"}
    folder = tiny_tokenizers.write_tokenizer(tmp_path, backend, config)
    ours, theirs = Tokenizer.from_dir(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = ours.encode("a<tool>b<pad>")
    assert ids == theirs.encode("a<tool>b<pad>")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_level_bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_dir(tiny_tokenizers.write_tokenizer(tmp_path, backend))
    text = "The quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("fox")) < 64


def test_end_tokens_come_from_tokenizer_and_model(tmp_path: Path) -> None:
    folder = tiny_tokenizers.write_tokenizer(tmp_path, tiny_tokenizers.byte_level_bpe())
    assert Tokenizer.from_dir(folder).eos_token_ids == {2}
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_dir(folder).eos_token_ids == {2, 7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    assert Tokenizer.from_dir(folder).eos_token_ids == {2, 4}


@pytest.mark.parametrize(
    ("kind", "piece", "text"),
    [
        ("byte_level", "Ġ", " "),
        ("byte_level", "ð", "\ufffd"),
        ("byte_level", "<|im_end|>", "<|im_end|>"),
        ("llama2", "▁", " "),
        ("llama2", "▁▁leading", "  leading"),
        ("llama2", "<0xE4>", "\ufffd"),
        ("llama2", "<0x41>", "A"),
        ("unigram", "▁the", " the"),
        ("word_level", "fox", "fox"),
    ],
)
def test_text_of_one_token(kind: str, piece: str, text: str) -> None:
    backend = tiny_tokenizers.ALL_KINDS[kind]()
    tokenizer = Tokenizer(backend, {}, None)
    assert tokenizer.token_text(backend.token_to_id(piece)) == text


def test_unknown_ids_have_no_text() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level_bpe(), {}, None)
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    assert tokenizer.decode([tokenizer.vocab_size, 10**9]) == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", ""),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "a"}, {}]}'),
        ("generation_config.json", '{"eos_token_id": "</s>"}'),
        ("chat_template.json", "no"),
    ],
)
def test_errors_name_the_file(name: str, content: str | None, tmp_path: Path) -> None:
    folder = tiny_tokenizers.write_tokenizer(tmp_path, tiny_tokenizers.byte_level_bpe())
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_dir(folder)


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_where_the_chat_template_is_found(tmp_path: Path) -> None:
    folder = tiny_tokenizers.write_tokenizer(tmp_path, tiny_tokenizers.byte_level_bpe())
    assert Tokenizer.from_dir(folder).chat_template is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from the list"}]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer.from_dir(folder).chat_template == "from json"
    tiny_tokenizers.write_tokenizer(tmp_path, tiny_tokenizers.byte_level_bpe(), {"chat_template": named})
    assert Tokenizer.from_dir(folder).chat_template == "from the list"
    tiny_tokenizers.write_tokenizer(tmp_path, tiny_tokenizers.byte_level_bpe(), {"chat_template": "string"})
    assert Tokenizer.from_dir(folder).chat_template == "string"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.from_dir(folder).chat_template == "from jinja"


def test_encoding_in_threads_gives_the_same_ids() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.llama2_like(), {}, None)
    texts = [text * 20 for text in tiny_tokenizers.MULTILINGUAL_TEXTS] * 4
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone


def test_loading_and_encoding_start_no_thread_and_survive_a_fork(tmp_path: Path) -> None:
    folder = tiny_tokenizers.write_tokenizer(tmp_path, tiny_tokenizers.byte_level_bpe())
    code = f"""
import os
from pathlib import Path
from service.text.tokenizer import Tokenizer
tokenizer = Tokenizer.from_dir(Path({str(folder)!r}))
ids = tokenizer.encode("hello world " * 2000)
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
child = os.fork()
if not child:
    os._exit(0 if tokenizer.encode("hello world " * 2000) == ids else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "TOKENIZERS_PARALLELISM" not in done.stderr
