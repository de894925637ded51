"""The engine over the real decoder: answers under load are those of each request alone; checks against transformers."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from decoder_engine import Served, generate
from engine_fakes import Collector
from tiny_models import make_tiny_model

from service.engine.request import EngineRequest

DYNAMIC_ROPE = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}
VARIANTS = {
    "llama": ("llama", {"max_position_embeddings": 1024}),
    "sliding window": ("mistral", {"max_position_embeddings": 1024}),
    "local and global layers": ("gemma2", {"max_position_embeddings": 1024}),
    "dynamic rope": ("llama", {"max_position_embeddings": 64, **DYNAMIC_ROPE}),
}
LENGTHS = [5, 600, 17, 33, 64, 65, 120, 256]


@pytest.fixture(scope="module")
def load_variant(each_backend: str, tmp_path_factory: pytest.TempPathFactory):  # noqa: ARG001
    loaded: dict[str, Served] = {}

    def load(variant: str) -> Served:
        if variant not in loaded:
            family, overrides = VARIANTS[variant]
            directory = tmp_path_factory.mktemp("model")
            loaded[variant] = Served.load(
                make_tiny_model(directory, family, num_hidden_layers=2, **overrides)
            )
        return loaded[variant]

    return load


def mixed_requests(count: int, longest: int, **params: object) -> list[EngineRequest]:
    """Prompts of 5 to `longest` tokens, many of which begin alike."""
    draw = random.Random(7)
    common = [draw.randrange(3, 384) for _ in range(longest)]
    requests = []
    for number in range(count):
        length = min(LENGTHS[number % len(LENGTHS)], longest)
        shared = draw.choice([0, length // 2, length - 1])
        prompt = common[:shared] + [draw.randrange(3, 384) for _ in range(length - shared)]
        requests.append(generate(f"r{number}", prompt, draw.randint(4, 24), seed=number, **params))
    return requests


def run_together(served: Served, requests: list[EngineRequest], blocks: int) -> Collector:
    """Runs all at once in a pool that holds few of them; shows that all that could disturb an answer happened."""
    engine = served.engine(blocks)
    collector = Collector(engine)
    for request in requests:
        engine.add(request)
    collector.run()
    stats = engine.stats()
    batches = engine._model.batches
    assert stats.preemptions > 0
    assert engine.pool.evictions > 0
    assert (stats.cached_tokens > 0) == engine.config.prefix_caching
    assert max(len(batch.sequences) for batch in batches) > 3
    assert any(
        part.query_length < part.context_length and part.query_length > 1
        for batch in batches
        for part in batch.sequences
    ), "no prompt came in chunks"
    return collector


def assert_as_alone(served: Served, requests: list[EngineRequest], collector: Collector) -> None:
    for request in requests:
        together = [collector.answers[request.request_id, i].token_ids for i in range(request.params.n)]
        assert together == served.alone(request), request.request_id


def test_greedy_under_load_of_32_is_token_identical_to_each_alone(load_variant) -> None:
    served = load_variant("llama")
    requests = mixed_requests(32, 600)
    assert_as_alone(served, requests, run_together(served, requests, blocks=41))


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_seeded_sampling_under_load_is_token_identical_to_each_alone(load_variant, variant: str) -> None:
    served = load_variant(variant)
    requests = mixed_requests(14, 120, temperature=0.9, top_p=0.95, top_k=200, n=2)
    assert_as_alone(served, requests, run_together(served, requests, blocks=16))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "llama"])
def test_greedy_under_load_where_keys_or_views_are_special(load_variant, variant: str) -> None:
    served = load_variant(variant)
    requests = mixed_requests(14, 120)
    assert_as_alone(served, requests, run_together(served, requests, blocks=16))


def test_dynamic_rope_shares_no_prefixes(load_variant) -> None:
    """Keys depend on the whole prompt's length there: with sharing the second answer would come from other keys."""
    served = load_variant("dynamic rope")
    assert served.decoder.config.length_dependent_from == 64
    assert load_variant("sliding window").decoder.config.length_dependent_from is None
    draw = random.Random(3)
    prompt = [draw.randrange(3, 384) for _ in range(100)]
    engine = served.engine()
    collector = Collector(engine)
    for name, length in (("short", 100), ("long", 90)):
        engine.add(generate(name, prompt[:length], 6))
        collector.run()
    assert engine.stats().cached_tokens == 0
    assert collector.answers["long", 0].token_ids == served.alone(generate("r", prompt[:90], 6))[0]


def test_a_step_of_prompt_chunks_alone_asks_for_no_logits(load_variant) -> None:
    served = load_variant("llama")
    engine = served.engine(max_batch_tokens=32)
    request = generate("r", list(range(3, 103)), 4)
    engine.add(request)
    collector = Collector(engine)
    assert collector.step() == []
    assert len(engine._model.batches[0].logit_rows) == 0
    collector.run()
    assert collector.answers["r", 0].token_ids == served.alone(request)[0]


def test_completions_of_one_prompt_differ_and_share_its_blocks(load_variant) -> None:
    served = load_variant("llama")
    request = generate("r", list(range(3, 67)), 8, n=4, temperature=1.0, seed=5)
    engine = served.engine()
    engine.add(request)
    collector = Collector(engine).run()
    answers = [collector.answers["r", index].token_ids for index in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    computed = sum(len(batch.token_ids) for batch in engine._model.batches)
    # The prompt once; the last block of it again for each of three others; seven tokens fed back to each of four.
    assert computed == 64 + 3 * 16 + 4 * 7


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_prompt_logprobs_and_greedy_tokens_are_those_of_transformers(load_variant, variant: str) -> None:
    served = load_variant(variant)
    prompt = torch.randint(3, 384, (1, 60), generator=torch.Generator().manual_seed(2))
    engine = served.engine(max_batch_tokens=32)
    engine.add(generate("r", prompt[0].tolist(), 4, prompt_logprobs=3, logprobs=2))
    answer = Collector(engine).run().answers["r", 0]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        served.directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model(prompt).logits[0].log_softmax(-1)
    assert answer.token_ids[0] == int(expected[-1].argmax())
    assert answer.logprobs[0].chosen.logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)
    assert len(answer.prompt_logprobs) == 60
    assert answer.prompt_logprobs[0].chosen is None
    for place in range(1, 60):
        found, row = answer.prompt_logprobs[place], expected[place - 1]
        assert found.chosen.token_id == int(prompt[0, place])
        assert found.chosen.logprob == pytest.approx(float(row[prompt[0, place]]), abs=1e-4)
        assert [entry.logprob for entry in found.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
