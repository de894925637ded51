"""Embeddings: values against transformers, and their place among generating requests."""

from __future__ import annotations

import random
import time

import pytest
import torch
import transformers
from decoder_engine import Served, generate
from engine_fakes import Clock, Collector, HashModel, make_engine, make_request
from tiny_models import make_tiny_model

from service.engine.embedding import EmbeddingPool
from service.engine.request import (
    EmbeddingParams,
    EngineRequest,
    FinishReason,
    Pooling,
    QueueFull,
    RequestRejected,
    SamplingParams,
)
from service.engine.sequence import AbortCause


def embed(name: str, prompt: list[int], deadline: float | None = None, **params: object) -> EngineRequest:
    return EngineRequest(
        name,
        tuple(prompt),
        SamplingParams(max_tokens=1),
        time.monotonic(),
        deadline,
        embedding=EmbeddingParams(**params),
    )


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def served(
    each_backend: str,  # noqa: ARG001
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    return Served.load(make_tiny_model(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture(scope="module")
def reference(served: Served):
    return transformers.AutoModel.from_pretrained(
        served.directory, dtype=torch.float32, attn_implementation="eager"
    )


def random_prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 384) for _ in range(length)]


def vectors(engine, *requests: EngineRequest) -> dict[str, list[float]]:
    """The embeddings of requests that run together."""
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work:
        for output in engine.step():
            if output.summary is not None and output.summary.embedding:
                found[output.request_id] = output.summary.embedding
        engine.scheduler.check()
    assert engine.pool.free_count == engine.pool.num_blocks
    return found


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("length", [1, 16, 75])
def test_vector_is_pooled_from_the_last_hidden_state_of_transformers(
    served: Served, reference, pooling: Pooling, normalize: bool, length: int
) -> None:
    prompt = random_prompt(length)
    with torch.no_grad():
        hidden = reference(torch.tensor([prompt])).last_hidden_state[0].double()
    expected = hidden.mean(0) if pooling is Pooling.MEAN else hidden[-1]
    if normalize:
        expected = expected / expected.norm()
    engine = served.engine(max_batch_tokens=32)
    found = vectors(engine, embed("e", prompt, pooling=pooling, normalize=normalize))["e"]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_vector_does_not_depend_on_chunks_cached_prefixes_or_preemption(
    served: Served, pooling: Pooling
) -> None:
    prompts = {f"e{length}": random_prompt(length) for length in (3, 40, 77, 100)}
    alone = {
        name: vectors(served.engine(max_batch_tokens=512), embed(name, prompt, pooling=pooling))[name]
        for name, prompt in prompts.items()
    }
    engine = served.engine(blocks=9, max_batch_tokens=37)
    engine.add(generate("g", random_prompt(30, seed=1), 60))
    together = {
        **vectors(engine, *(embed(name, prompt, pooling=pooling) for name, prompt in prompts.items())),
        **vectors(engine, embed("e77", prompts["e77"], pooling=pooling)),
    }
    assert together == alone
    assert (engine.stats().cached_tokens > 0) == (pooling is Pooling.LAST)


def test_preempted_embedding_goes_on_where_it_was(served: Served) -> None:
    prompt = random_prompt(120)
    request = embed("e", prompt)
    alone = vectors(served.engine(), request)["e"]
    engine = served.engine(blocks=10, max_batch_tokens=33)
    engine.add(generate("g", random_prompt(8, seed=1), 60))
    engine.step()
    engine.add(request)
    while engine.scheduler.preemptions == 0 and engine.has_work:
        engine.step()
        if engine.scheduler.running and not engine.scheduler.waiting:
            break
    victim = next(s for s in engine.scheduler.running if s.embedding is not None)
    assert 0 < victim.embedding.covered < 120
    engine.scheduler.running.remove(victim)
    engine.scheduler._release(victim)
    engine.scheduler.add(victim)
    assert vectors(engine)["e"] == alone


def test_decodes_run_in_every_step_beside_an_embedding(served: Served) -> None:
    engine = served.engine(max_batch_tokens=32)
    engine.add(generate("g", [5, 6], 100))
    collector = Collector(engine)
    collector.step()
    engine.add(embed("e", random_prompt(200)))
    while "e" not in collector.last:
        before = len(collector.answers["g", 0].token_ids)
        collector.step()
        assert len(collector.answers["g", 0].token_ids) == before + 1
    assert len(collector.answers["g", 0].token_ids) < 10


class HiddenModel(HashModel):
    def hidden_states(self, batch, cache, before_computing):
        self.forward(batch, cache, before_computing)
        return batch.positions[:, None].float().expand(-1, 4)


def test_whoever_waits_for_the_model_is_told_before_each_of_its_runs() -> None:
    model = HiddenModel()
    engine = make_engine(model=model)
    engine.add(embed("a", [1] * 4))
    engine.add(make_request("b", [2] * 4, 3))
    runs_before = []
    engine.step(lambda: runs_before.append(len(model.batches)))
    assert (runs_before, len(model.batches)) == ([0, 1], 2)


def test_deadline_cancel_and_counts() -> None:
    clock = Clock()
    engine = make_engine(model=HiddenModel(), clock=clock, max_batch_tokens=8)
    engine.add(embed("late", [1] * 40, deadline=101.0))
    engine.add(embed("gone", [2] * 40))
    engine.add(embed("done", [3] * 10, normalize=False))
    collector = Collector(engine)
    collector.step()
    clock.now = 101.5
    engine.abort("gone")
    collector.step()
    causes = {name: collector.answers[name, 0].stop_reason for name in ("late", "gone")}
    assert causes == {"late": AbortCause.DEADLINE, "gone": AbortCause.CANCELLED}
    collector.run()
    last = collector.last["done"]
    assert last.summary.embedding == [4.5] * 4
    assert (last.finish_reason, last.summary.prompt_tokens, last.summary.completion_tokens) == (
        FinishReason.STOP,
        10,
        0,
    )


def test_limits_apply() -> None:
    engine = make_engine(model=HiddenModel(), blocks=4, block_size=4, max_queue=1)
    with pytest.raises(RequestRejected, match="has 17 tokens; the KV cache holds 16"):
        engine.add(embed("long", [1] * 17))
    engine.add(embed("fits", [1] * 16))
    with pytest.raises(QueueFull):
        engine.add(make_request("more", [1]))
    assert vectors(engine)["fits"]


def test_hidden_states_that_are_no_numbers_fail_their_request_alone() -> None:
    class NanHidden(HiddenModel):
        def hidden_states(self, batch, cache, before_computing):
            hidden = super().hidden_states(batch, cache, before_computing).clone()
            hidden[batch.token_ids == 13] = float("nan")
            return hidden

    engine = make_engine(model=NanHidden())
    engine.add(embed("bad", [1, 13]))
    engine.add(embed("good", [1, 2]))
    collector = Collector(engine).run()
    assert collector.answers["bad", 0].stop_reason == AbortCause.ERROR
    assert collector.last["good"].summary.embedding


def test_mean_of_pieces_is_that_of_the_whole_bit_for_bit() -> None:
    hidden = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    whole, pieces = EmbeddingPool(EmbeddingParams()), EmbeddingPool(EmbeddingParams())
    whole.add(0, hidden)
    for first, last in ((0, 7), (7, 30), (16, 41), (0, 16), (32, 50)):
        pieces.add(first, hidden[first:last])
    assert pieces.vector() == whole.vector()
