import argparse
import json

import pytest

from service.cli import plan


def run(*words):
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return plan.run(parser.parse_args(words))


def test_a_plan_is_printed_and_exits_0(tiny_model, capsys):
    assert run("--model", str(tiny_model), "--workers-per-node", "1", "--kv-cache-memory", "8MiB") == 0
    text = capsys.readouterr().out
    assert "policy   replicate" in text
    assert "unit node" in text
    assert "of weights" in text
    assert "KV cache 8 MiB" in text


def test_json_is_the_documented_plan(tiny_model, capsys):
    assert run("--model", str(tiny_model), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"policy", "policy_reason", "units", "refusals", "notes"}
    assert found["units"][0]["weights_bytes"] > 0
    assert found["units"][0]["workers"][0]["kv_cache_bytes"] > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--nodes", "4000"), "--nodes: node 4000 does not exist"),
        (("--membind", "a"), "--membind: cannot read 'a'"),
        (("--kv-cache-memory", "900T"), "--kv-cache-memory: 900 TiB"),
        (("--block-size", "0"), "--block-size must be 1 or more"),
        (("--max-model-len", "99999999"), "--max-model-len 99999999: the model's context length is"),
    ],
)
def test_a_refusal_exits_1_and_names_the_flag(tiny_model, capsys, words, named):
    assert run("--model", str(tiny_model), *words) == 1
    captured = capsys.readouterr()
    assert named in captured.out + captured.err


def test_a_model_that_cannot_be_read_is_a_refusal(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    assert run("--model", str(tmp_path)) == 1
    assert "config.json" in capsys.readouterr().err
