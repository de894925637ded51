"""The engine on a model whose answers show wrong blocks: what is answered, when it ends, what is refused."""

import random

import pytest
import torch
from engine_fakes import (
    EOS,
    VOCAB,
    Clock,
    Collector,
    HashModel,
    expected_greedy,
    letters,
    logits_after,
    make_engine,
    make_request,
    run_alone,
)

from service.engine.request import FinishReason, QueueFull, RequestRejected, RequestSummary
from service.engine.sequence import AbortCause


def collect(engine, *requests) -> Collector:
    for request in requests:
        engine.add(request)
    return Collector(engine)


def test_greedy_answer_and_counts():
    clock = Clock()
    engine = make_engine(clock=clock)
    collector = collect(engine, make_request("r", [5, 6, 7], 4, arrived_at=99.0))
    collector.step()
    clock.now = 103.0
    collector.run()
    answer, last = collector.answers["r", 0], collector.last["r"]
    assert answer.token_ids == expected_greedy([5, 6, 7], 4)
    assert answer.text == letters(answer.token_ids)
    assert answer.finish_reason is FinishReason.LENGTH
    assert last.summary == RequestSummary(3, 4, 0, 1.0, 1.0, 4.0)
    stats = engine.stats()
    assert (stats.requests, stats.prompt_tokens, stats.generated_tokens, stats.steps) == (1, 3, 4, 4)
    assert (stats.running, stats.waiting, stats.kv_blocks_free) == (0, 0, stats.kv_blocks_total)


@pytest.mark.parametrize("seed", range(6))
def test_answers_do_not_depend_on_load(seed):
    """Chunks, batch mates, prefix hits and preemption all happen, and none of them shows in any token."""
    draw = random.Random(seed)
    engine = make_engine(blocks=22, max_batch_tokens=11, max_sequences=7)
    collector = Collector(engine)
    prefixes = [[draw.randrange(EOS) for _ in range(40)] for _ in range(2)]
    requests = []
    for number in range(24):
        prompt = [*draw.choice(prefixes)[: draw.randint(0, 40)], draw.randrange(EOS)]
        requests.append(
            make_request(
                f"r{number}",
                prompt,
                draw.randint(1, 40),
                priority=draw.choice([0, 0, 0, 1]),
                temperature=draw.choice([0.0, 1.0]),
                seed=draw.randrange(1000),
                n=draw.choice([1, 1, 1, 3]),
                ignore_eos=False,
                frequency_penalty=draw.choice([0.0, 0.5]),
                prompt_logprobs=draw.choice([None, None, 0]),
            )
        )
    for request in requests:
        engine.add(request)
        for _ in range(draw.choice([0, 0, 2, 6])):
            if engine.has_work:
                collector.step()
    collector.run()
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    batches = engine._model.batches
    assert any(len(batch.sequences) > 1 for batch in batches)
    assert any(part.query_length > 1 and part.context_length > 11 for b in batches for part in b.sequences)
    for request in requests:
        together = [collector.answers[request.request_id, i].token_ids for i in range(request.params.n)]
        assert together == run_alone(request), request


def test_twenty_long_requests_in_a_pool_for_two_all_finish():
    engine = make_engine(blocks=20, max_sequences=20, max_batch_tokens=20)
    requests = [make_request(f"r{number}", [number] * 8, 32) for number in range(20)]
    collector = collect(engine, *requests).run()
    for number, request in enumerate(requests):
        assert collector.answers[request.request_id, 0].token_ids == expected_greedy([number] * 8, 32)
    assert engine.stats().preemptions > 0


def test_single_request_that_fills_the_pool_to_the_last_slot():
    engine = make_engine(blocks=4, block_size=4)
    collector = collect(engine, make_request("r", [1] * 5, 12)).run()
    assert collector.answers["r", 0].token_ids == expected_greedy([1] * 5, 12)
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "field"),
    [(17, 1, "prompt"), (1000, 1, "prompt"), (16, 2, "max_tokens"), (2, 16, "max_tokens")],
)
def test_request_that_outgrows_the_pool_is_refused_at_once(prompt_length, max_tokens, field):
    engine = make_engine(blocks=4, block_size=4)
    with pytest.raises(RequestRejected, match="KV cache") as caught:
        engine.add(make_request("r", [1] * prompt_length, max_tokens))
    assert caught.value.field == field
    assert not engine.has_work
    collect(engine, make_request("r", [1] * 16, 1)).run()


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"prompt": []}, "prompt", "no tokens"),
        ({"prompt": [1] * 256, "max_tokens": 1}, "prompt", "context length holds 256"),
        ({"prompt": [1] * 250, "max_tokens": 7}, "max_tokens", "leaves 6"),
        ({"prompt": [1, VOCAB]}, "prompt_token_ids", "from 0 to 63"),
        ({"prompt": [-1]}, "prompt_token_ids", "from 0 to 63"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"n": 0}, "n", "1 or more"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias", "64"),
        ({"lora_name": "unknown"}, "lora_name", "'unknown'"),
    ],
)
def test_request_that_cannot_run_is_refused(changes, field, problem):
    engine = make_engine(blocks=100)
    options = {"prompt": [1, 2], "max_tokens": 4, **changes}
    with pytest.raises(RequestRejected, match=problem) as caught:
        engine.add(make_request("r", options.pop("prompt"), options.pop("max_tokens"), **options))
    assert caught.value.field == field
    assert not engine.has_work


def test_second_request_of_the_same_id_is_refused_while_the_first_runs():
    engine = make_engine()
    collector = collect(engine, make_request("r", [1]))
    with pytest.raises(RequestRejected, match="already running") as caught:
        engine.add(make_request("r", [2]))
    assert caught.value.field == "request_id"
    collector.run()
    engine.add(make_request("r", [2]))


def test_full_queue_is_refused_with_an_estimate_and_opens_again():
    clock = Clock()
    engine = make_engine(clock=clock, max_sequences=1, max_queue=4)
    collector = collect(engine, *(make_request(f"r{number}", [number], 4) for number in range(4)))
    with pytest.raises(QueueFull, match="the limit is 4"):
        engine.add(make_request("more", [1]))
    while engine.stats().waiting > 1:
        clock.now += 2.0
        collector.step()
    engine.add(make_request("r4", [1]))
    engine.add(make_request("r5", [1]))
    engine.add(make_request("r6", [1]))
    with pytest.raises(QueueFull) as caught:
        engine.add(make_request("more", [1]))
    # One request of four steps of two seconds starts every eight seconds or so.
    assert 1.0 < caught.value.retry_after_seconds < 16.0
    collector.run()


def test_preempted_requests_do_not_count_as_queued():
    engine = make_engine(blocks=10, max_sequences=4, max_queue=4)
    collector = collect(engine, *(make_request(f"r{number}", [number] * 8, 20) for number in range(4)))
    while engine.stats().preemptions == 0 or engine._book.line.waiting:
        collector.step()
    engine.refuse_if_full(arriving=3)
    with pytest.raises(QueueFull):
        engine.refuse_if_full(arriving=4)
    collector.run()


# How a completion ends


def greedy_position(prompt: list[int], place: int) -> int:
    return expected_greedy(prompt, place + 1)[place]


def test_end_token_is_counted_and_has_no_text():
    prompt = [3, 1, 4]
    end = greedy_position(prompt, 2)
    engine = make_engine(eos_token_ids=frozenset({end}))
    collector = collect(engine, make_request("r", prompt, 20, ignore_eos=False)).run()
    answer = collector.answers["r", 0]
    assert answer.token_ids == expected_greedy(prompt, 3)
    assert answer.text == letters(answer.token_ids[:2])
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "")
    assert collector.last["r"].summary.completion_tokens == 3


def test_ignored_end_token_is_text():
    prompt = [3, 1, 4]
    engine = make_engine(eos_token_ids=frozenset({greedy_position(prompt, 2)}))
    answer = collect(engine, make_request("r", prompt, 5)).run().answers["r", 0]
    assert answer.text == letters(expected_greedy(prompt, 5))
    assert answer.finish_reason is FinishReason.LENGTH


def test_stop_token_ends_also_where_the_end_token_is_ignored():
    prompt = [3, 1, 4]
    stop = frozenset({greedy_position(prompt, 1)})
    answer = collect(make_engine(), make_request("r", prompt, 5, stop_token_ids=stop)).run().answers["r", 0]
    assert answer.token_ids == expected_greedy(prompt, 2)
    assert answer.finish_reason is FinishReason.STOP


def test_end_token_is_held_off_until_min_tokens():
    prompt = [3, 1, 4]
    end = greedy_position(prompt, 0)
    engine = make_engine(eos_token_ids=frozenset({end}))
    request = make_request("r", prompt, 20, ignore_eos=False, min_tokens=4)
    answer = collect(engine, request).run().answers["r", 0]
    assert end not in answer.token_ids[:4]
    assert len(answer.token_ids) >= 4


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_two_tokens(include):
    prompt = [9, 9]
    tokens = expected_greedy(prompt, 10)
    stop = letters(tokens[3:5])
    engine = make_engine()
    request = make_request("r", prompt, 10, stop=(stop,), include_stop_str_in_output=include)
    answer = collect(engine, request).run().answers["r", 0]
    assert answer.text == letters(tokens[: 5 if include else 3])
    assert answer.token_ids == tokens[:5]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)


def test_text_held_back_for_a_stop_string_comes_out_at_the_end():
    prompt = [9, 9]
    tokens = expected_greedy(prompt, 4)
    request = make_request("r", prompt, 4, stop=(letters([*tokens[3:], 0, 0]),))
    answer = collect(make_engine(), request).run().answers["r", 0]
    assert answer.text == letters(tokens)
    assert answer.finish_reason is FinishReason.LENGTH


def test_context_length_is_used_to_the_last_token():
    engine = make_engine(context_length=12)
    answer = collect(engine, make_request("r", [2] * 5, 7)).run().answers["r", 0]
    assert answer.token_ids == expected_greedy([2] * 5, 7)
    assert answer.finish_reason is FinishReason.LENGTH


# Deadlines and cancellation


def test_deadline_passed_in_the_queue_drops_the_request_unrun():
    clock = Clock()
    engine = make_engine(clock=clock, max_sequences=1)
    collector = collect(
        engine, make_request("runs", [1], 30), make_request("waits", [2], 30, deadline=101.0, priority=-1)
    )
    collector.step()
    clock.now = 101.0
    collector.step()
    answer, last = collector.answers["waits", 0], collector.last["waits"]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.ABORT, AbortCause.DEADLINE)
    assert answer.token_ids == []
    assert (last.summary.queued_seconds, last.summary.total_seconds, last.summary.completion_tokens) == (
        1.0,
        1.0,
        0,
    )
    collector.run()
    assert engine.stats().prompt_tokens == 1


def test_deadline_stops_a_running_request_at_the_next_step():
    clock = Clock()
    engine = make_engine(clock=clock)
    collector = collect(engine, make_request("r", [1] * 9, 30, deadline=105.0))
    collector.step()
    collector.step()
    assert engine.pool.free_count < engine.pool.num_blocks
    clock.now = 105.5
    steps = engine.stats().steps
    collector.step()
    answer = collector.answers["r", 0]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.ABORT, AbortCause.DEADLINE)
    assert answer.token_ids == expected_greedy([1] * 9, 2)
    assert engine.stats().steps == steps
    assert engine.pool.free_count == engine.pool.num_blocks
    assert not engine.has_work


def test_overload_with_deadlines_does_no_work_for_the_dead():
    clock = Clock()
    engine = make_engine(clock=clock, max_sequences=2)
    collector = collect(
        engine, *(make_request(f"r{number}", [number % 60], 10, deadline=130.0) for number in range(100))
    )
    while engine.has_work:
        clock.now += 1.0
        collector.step()
    in_time = [a for a in collector.answers.values() if a.finish_reason is FinishReason.LENGTH]
    assert len(in_time) == 4
    assert len(collector.last) == 100
    assert engine.stats().steps <= 30


def test_deadlines_of_finished_requests_are_forgotten():
    engine = make_engine()
    collect(engine, *(make_request(f"r{n}", [n], 2, deadline=1e9) for n in range(9))).run()
    assert engine._book._deadlines == []


def test_thousand_cancels_leave_the_pool_whole():
    draw = random.Random(1)
    engine = make_engine(blocks=30, max_queue=1000)
    collector = Collector(engine)
    for number in range(1000):
        prompt = [draw.randrange(EOS) for _ in range(draw.randint(1, 30))]
        engine.add(make_request(f"r{number}", prompt, 40, n=draw.choice([1, 1, 2])))
        if draw.random() < 0.5:
            collector.step()
        engine.abort(f"r{draw.randint(max(0, number - 5), number)}")
    for number in range(1000):
        engine.abort(f"r{number}")
    collector.run()
    assert len(collector.last) == 1000
    assert engine.scheduler.running == engine.scheduler.waiting == []
    assert len(engine._book) == 0


def test_cancel_ends_every_completion_also_those_that_did_not_start():
    engine = make_engine()
    collector = collect(engine, make_request("r", [1] * 40, 30, n=3))
    collector.step()
    engine.abort("r")
    outputs = collector.step()
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.request_finished for output in outputs] == [False, False, True]
    assert {output.stop_reason for output in outputs} == {AbortCause.CANCELLED}
    assert not engine.has_work
    engine.abort("r")
    assert not engine.has_work


# Order


def test_higher_priority_runs_first_and_equal_ones_in_order_of_arrival():
    engine = make_engine(max_sequences=1)
    priorities = {"a": 0, "b": 2, "c": 1, "d": 2, "e": 0}
    requests = [make_request(name, [1, 2], 3, priority=priority) for name, priority in priorities.items()]
    assert collect(engine, *requests).run().finished == ["b", "d", "c", "a", "e"]


def test_steady_stream_of_higher_priority_does_not_starve_the_low():
    clock = Clock(0.0)
    engine = make_engine(clock=clock, max_sequences=1, priority_seconds=10.0)
    collector = collect(engine, make_request("low", [1], 2, arrived_at=0.0))
    for number in range(40):
        engine.add(make_request(f"high{number}", [2], 2, arrived_at=clock.now, priority=1))
        for _ in range(2):
            collector.step()
        clock.now += 1.0
    assert "low" in collector.last
    assert collector.finished.index("low") in range(8, 14)


# Prefix cache and shared prompts


def test_prefix_hits_are_counted_and_at_least_one_token_is_computed():
    engine = make_engine(block_size=4)
    prompt = list(range(12))
    first = collect(engine, make_request("first", prompt, 2)).run()
    second = collect(engine, make_request("second", prompt, 2)).run()
    longer = collect(engine, make_request("longer", [*prompt, 50, 51], 2)).run()
    assert first.last["first"].summary.cached_tokens == 0
    assert second.last["second"].summary.cached_tokens == 8
    assert longer.last["longer"].summary.cached_tokens == 12
    assert engine.stats().cached_tokens == 20
    assert second.answers["second", 0].token_ids == first.answers["first", 0].token_ids


def test_answer_is_found_again_as_part_of_the_next_turn():
    engine = make_engine(block_size=4)
    prompt = list(range(10))
    answer = collect(engine, make_request("one", prompt, 7)).run().answers["one", 0].token_ids
    second = collect(engine, make_request("two", [*prompt, *answer, 5], 2)).run()
    assert second.last["two"].summary.cached_tokens == 16


@pytest.mark.parametrize("order", [("", "a", "b"), ("a", "b", ""), ("b", "", "a")])
def test_adapters_do_not_share_prefixes(order):
    engine = make_engine()
    prompt = list(range(20))
    for turn, cached in ((1, 0), (2, 16)):
        for name in order:
            request = make_request(f"{name}{turn}", prompt, 2, lora_name=name)
            last = collect(engine, request).run().last[request.request_id]
            assert last.summary.cached_tokens == cached


def test_adapter_of_new_content_under_an_old_name_finds_nothing():
    engine = make_engine()
    contents = {"x": "one"}
    engine._admission._adapter_identity = contents.__getitem__
    prompt = list(range(20))
    collect(engine, make_request("r1", prompt, 2, lora_name="x")).run()
    contents["x"] = "two"
    last = collect(engine, make_request("r2", prompt, 2, lora_name="x")).run().last["r2"]
    assert last.summary.cached_tokens == 0


def test_other_weights_make_other_keys():
    request = make_request("r", [1] * 8)
    keys = {make_engine(weights_digest=digest)._admission._prefix_key(request, 0) for digest in ("x", "y")}
    assert len(keys) == 2


def test_without_prefix_caching_only_completions_of_one_request_share():
    engine = make_engine(prefix_caching=False)
    prompt = list(range(20))
    collect(engine, make_request("one", prompt, 2)).run()
    collector = collect(engine, make_request("two", prompt, 2, n=2)).run()
    assert collector.last["two"].summary.cached_tokens == 0
    assert computed_tokens(engine._model) == 20 + 1 + (20 + 1) + (4 + 1)


def computed_tokens(model: HashModel) -> int:
    return sum(len(batch.token_ids) for batch in model.batches)


def test_completions_share_the_prompts_blocks():
    engine = make_engine(block_size=4, max_batch_tokens=64)
    prompt = list(range(18))
    collector = collect(engine, make_request("r", prompt, 6, n=3, temperature=1.0, seed=7))
    collector.step()
    collector.step()
    tables = [sequence.block_table for sequence in engine.scheduler.running]
    assert len(tables) == 3
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert [engine.pool.references(block) for block in tables[0][:4]] == [3] * 4
    assert len({table[4] for table in tables}) == 3
    collector.run()
    answers = [collector.answers["r", index].token_ids for index in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    assert collector.last["r"].summary.completion_tokens == 18
    assert collector.last["r"].summary.cached_tokens == 0


def test_evicted_prefix_is_computed_again():
    engine = make_engine(blocks=8, block_size=4)
    prompt = list(range(13))
    one = collect(engine, make_request("one", prompt, 2)).run()
    collect(engine, make_request("other", [40] * 30, 2)).run()
    assert engine.pool.evictions > 0
    two = collect(engine, make_request("two", prompt, 2)).run()
    assert two.last["two"].summary.cached_tokens == 0
    assert two.answers["two", 0].token_ids == one.answers["one", 0].token_ids


# Log probabilities


def test_prompt_logprobs_over_chunks_and_cached_prefix():
    prompt = [int(token) for token in torch.randint(0, EOS, (37,), generator=torch.manual_seed(0))]
    engine = make_engine(max_batch_tokens=8)
    collect(engine, make_request("warm", prompt, 2)).run()
    collector = collect(engine, make_request("r", prompt, 3, prompt_logprobs=2, logprobs=0, n=2))
    first = collector.step()
    while not first:
        first = collector.step()
    assert len(first[0].prompt_logprobs) == len(prompt)
    collector.run()
    found = collector.answers["r", 0].prompt_logprobs
    assert collector.answers["r", 1].prompt_logprobs == []
    assert found[0].chosen is None
    for place in range(1, len(prompt)):
        expected = torch.log_softmax(logits_after(tuple(prompt[:place])), 0)
        assert found[place].chosen.token_id == prompt[place]
        assert found[place].chosen.logprob == pytest.approx(float(expected[prompt[place]]), abs=1e-4)
        assert len(found[place].top) == 2
    assert [entry.chosen.token_id for entry in collector.answers["r", 0].logprobs] == expected_greedy(
        prompt, 3
    )


def test_prompt_logprobs_of_one_token():
    answer = collect(make_engine(), make_request("r", [4], 2, prompt_logprobs=1)).run().answers["r", 0]
    assert [entry.chosen for entry in answer.prompt_logprobs] == [None]


def test_prompt_logprobs_do_not_hold_up_others():
    engine = make_engine(max_batch_tokens=16)
    engine.scheduler.max_prompt_logprob_rows = 2
    collector = collect(
        engine, make_request("slow", [1] * 30, 1, prompt_logprobs=0), make_request("fast", [2] * 10, 1)
    ).run()
    assert collector.finished == ["fast", "slow"]
    assert max(len(batch.logit_rows) for batch in engine._model.batches) <= 2 + 1


# Failures


class NanModel(HashModel):
    """Gives no number for sequences whose prompt starts with 13."""

    def forward(self, batch, cache, before_computing):
        logits = super().forward(batch, cache, before_computing)
        first_tokens = cache.keys.view(-1)[batch.block_tables[:, 0] * cache.block_size]
        rows = batch.logit_rows.tolist()
        for number, part in enumerate(batch.sequences):
            last = part.query_start + part.query_length - 1
            if first_tokens[number] == 13 and last in rows:
                logits[rows.index(last)] = float("nan")
        return logits


def test_row_without_numbers_fails_its_own_request_only():
    engine = make_engine(model=NanModel())
    requests = make_request("bad", [13, 1], 5, n=2), make_request("good", [14, 1], 5)
    collector = collect(engine, *requests).run()
    assert collector.answers["bad", 0].finish_reason is FinishReason.ABORT
    assert collector.answers["bad", 1].stop_reason == AbortCause.ERROR
    assert collector.answers["good", 0].token_ids == expected_greedy([14, 1], 5)


class BrokenGrammar:
    mask_words = 2
    is_finished = False

    def copy(self):
        return self

    def fill_mask(self, _row):
        raise RuntimeError("broken")


class EvenTokens:
    """Allows even tokens, six of them at most."""

    mask_words = 2

    def __init__(self):
        self.taken = 0

    @property
    def is_finished(self):
        return self.taken == 6

    def copy(self):
        return EvenTokens()

    def fill_mask(self, row):
        row[:] = 0x55555555

    def accept(self, token_id):
        assert token_id % 2 == 0
        self.taken += 1


def test_broken_constraint_fails_its_own_request_only():
    engine = make_engine()
    engine.add(make_request("bad", [1], 5), BrokenGrammar())
    collector = collect(engine, make_request("good", [14, 1], 5)).run()
    assert collector.answers["bad", 0].stop_reason == AbortCause.ERROR
    assert collector.answers["good", 0].token_ids == expected_greedy([14, 1], 5)


def test_constraint_that_is_complete_ends_each_completion_by_itself():
    engine = make_engine()
    engine.add(make_request("r", [1], 20, n=2, temperature=1.0), EvenTokens())
    collector = Collector(engine).run()
    for index in range(2):
        answer = collector.answers["r", index]
        assert len(answer.token_ids) == 6
        assert answer.finish_reason is FinishReason.STOP


def test_broken_model_raises():
    model = HashModel()
    model.fail_at_step = 2
    engine = make_engine(model=model)
    collector = collect(engine, make_request("r", [1], 5))
    collector.step()
    with pytest.raises(RuntimeError, match="the model broke"):
        collector.step()


# Random loads through the whole engine


@pytest.mark.parametrize("seed", range(10))
def test_random_life(seed):
    """Arrivals, cancels, deadlines, priorities and pool sizes at random, the pool checked after each step."""
    draw = random.Random(seed)
    clock = Clock()
    blocks = draw.choice([4, 9, 30])
    capacity = blocks * 4
    engine = make_engine(
        blocks=blocks,
        clock=clock,
        max_sequences=draw.choice([1, 3, 6]),
        max_batch_tokens=draw.choice([6, 17]),
        max_queue=8,
        prefix_caching=draw.random() < 0.7,
    )
    collector = Collector(engine)
    prompts: dict[str, tuple[list[int], int]] = {}
    for number in range(150):
        clock.now += draw.random()
        name = f"r{number}"
        prompt = [draw.choice([1, 2])] * draw.randint(1, capacity + 2)
        count = draw.randint(1, 12)
        deadline = clock.now + draw.random() * 60 if draw.random() < 0.3 else None
        request = make_request(
            name,
            prompt,
            count,
            arrived_at=clock.now,
            deadline=deadline,
            priority=draw.choice([0, 0, 1, -1]),
            n=draw.choice([1, 1, 2]),
        )
        if len(prompt) + count > capacity + 1:
            with pytest.raises(RequestRejected):
                engine.add(request)
        elif engine._book.line.waiting == 8:
            with pytest.raises(QueueFull):
                engine.add(request)
        else:
            engine.add(request)
            prompts[name] = prompt, count
        for _ in range(draw.randint(0, 5)):
            collector.step()
        if draw.random() < 0.1 and prompts:
            engine.abort(draw.choice(list(prompts)))
    collector.run()
    assert collector.last.keys() == prompts.keys()
    ends = set()
    for (name, _), answer in collector.answers.items():
        prompt, count = prompts[name]
        ends.add(answer.finish_reason)
        expected = expected_greedy(prompt, count)
        if answer.finish_reason is FinishReason.ABORT:
            assert answer.token_ids == expected[: len(answer.token_ids)]
        else:
            assert answer.token_ids == expected
    assert ends == {FinishReason.LENGTH, FinishReason.ABORT}


def test_batches_put_generating_sequences_first_and_describe_themselves():
    engine = make_engine(max_batch_tokens=16)
    collector = collect(engine, make_request("a", [1, 2], 9))
    collector.step()
    engine.add(make_request("b", [3] * 10, 9))
    collector.step()
    batch = engine._model.batches[-1]
    assert list(batch.sequences) == [(0, 1, 3, 2), (1, 10, 10, 10)]
    assert batch.positions.tolist() == [2, *range(10)]
    assert batch.logit_rows.tolist() == [0, 10]
    for tensor in (
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.block_tables,
        batch.logit_rows,
    ):
        assert tensor.dtype is torch.int64
    assert batch.block_tables.shape == (2, 3)
