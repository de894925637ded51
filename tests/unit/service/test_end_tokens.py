"""Which tokens end an answer: what generation_config.json lists, and the tokenizer's own EOS."""

import json
import shutil
from pathlib import Path

import pytest

from service.loader.checkpoint import open_checkpoint
from service.models.config import parse_config
from service.text.tokenizer import Tokenizer
from service.worker import end_token_ids


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [
        (None, None, {2}),
        (5, None, {2, 5}),
        (5, 7, {2, 7}),
        (5, [7, 9], {2, 7, 9}),
        (None, [2], {2}),
        (None, [7, 100_000], {2, 7}),
    ],
)
def test_end_tokens(tiny_model: Path, tmp_path: Path, config_ids, generation_ids, expected: set[int]) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": config_ids}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_ids}))
    checkpoint = open_checkpoint(model)
    parsed = parse_config(checkpoint.config, checkpoint.generation_config)
    assert end_token_ids(parsed, Tokenizer.from_dir(model)) == expected
