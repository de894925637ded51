"""The scheduler without a model: random loads, every invariant checked after each step, and chosen cases."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.engine.block_pool import BlockPool, root_hash
from service.engine.scheduler import Scheduled, Scheduler
from service.engine.sequence import Sequence
from service.engine.step_batch import StepBatcher

BLOCK = 4


def make_sequence(number: int, prompt: list[int], *, turn: float = 0.0) -> Sequence:
    return Sequence(str(number), (turn, number, 0), tuple(prompt), root_hash("k"), None, None)


def counts_of(scheduled: Scheduled) -> dict[Sequence, int]:
    """How many tokens of each sequence a step computes, in the order of the batch."""
    counts = dict.fromkeys(scheduled.generating.sequences, 1)
    return counts | {piece.sequence: piece.count for piece in scheduled.pieces}


class Driver:
    """Plays the engine: runs what is scheduled, appends tokens, ends sequences at their target length."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batcher = StepBatcher(scheduler.slots, torch.device("cpu"))
        self.target: dict[Sequence, int] = {}
        self.finished: list[Sequence] = []
        self.admitted: list[Sequence] = []

    def add(self, sequence: Sequence, answer: int) -> None:
        self.target[sequence] = len(sequence.token_ids) + answer
        self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        del self.target[sequence]
        self.scheduler.remove(sequence)

    def step(self) -> None:
        scheduler = self.scheduler
        first = min(scheduler.running, key=lambda s: s.order, default=None)
        preemptions = scheduler.preemptions
        scheduled = scheduler.schedule()
        self._check(scheduled, first)
        self._check_batch(scheduled)
        assert not scheduler.admitted or scheduler.preemptions == preemptions, "freed blocks went elsewhere"
        scheduler.computed_last(scheduled.generating)
        for sequence in scheduled.generating.sequences:
            assert sequence.remaining == 0
        completed = scheduler.computed(scheduled.pieces)
        assert completed == [
            p.sequence for p in scheduled.pieces if p.sequence.num_computed == p.sequence.prompt_length
        ]
        for sequence in (*scheduled.generating.sequences, *(p.sequence for p in scheduled.pieces)):
            if sequence.remaining == 0:
                sequence.token_ids.append((sequence.token_ids[-1] * 7 + len(sequence.token_ids)) % 50)
                if len(sequence.token_ids) >= self.target[sequence]:
                    self.cancel(sequence)
                    self.finished.append(sequence)
        scheduler.check()

    def _check(self, scheduled, first) -> None:
        scheduler = self.scheduler
        counts = counts_of(scheduled)
        assert counts, "work waits and nothing is scheduled"
        assert sum(counts.values()) <= scheduler.max_batch_tokens
        assert len(scheduled.generating.sequences) + len(scheduled.pieces) == len(counts)
        assert len(counts) <= scheduler.max_sequences
        assert first is None or first in scheduler.running, "the first in order was preempted"
        for sequence, count in counts.items():
            assert 1 <= count <= sequence.remaining
            assert sequence.num_computed + count <= len(sequence.block_table) * BLOCK
        others = {piece.sequence for piece in scheduled.pieces}
        assert scheduled.generating.sequences == [
            s for s in scheduler.running if s.generates and s not in others
        ], "one was left out"
        for sequence in scheduler.admitted:
            self.admitted.append(sequence)
            assert all(sequence.order < other.order for other in scheduler.waiting), "somebody was overtaken"
        assert not any(s.block_table for s in scheduler.waiting)

    def _check_batch(self, scheduled) -> None:
        """The batch that is made of columns is the one that each sequence's own state asks for."""
        step = self.batcher.build(scheduled.generating, scheduled.pieces)
        batch, row = step.forward, 0
        sampled = []
        for number, (sequence, count) in enumerate(counts_of(scheduled).items()):
            start, end, blocks = sequence.num_computed, sequence.num_computed + count, sequence.block_table
            assert batch.sequences[number] == (row, count, end, sequence.prompt_length)
            rows = slice(row, row + count)
            assert batch.token_ids[rows].tolist() == sequence.token_ids[start:end]
            assert batch.positions[rows].tolist() == list(range(start, end))
            slots = [blocks[place // BLOCK] * BLOCK + place % BLOCK for place in range(start, end)]
            assert batch.slot_mapping[rows].tolist() == slots
            assert batch.block_tables[number, : len(blocks)].tolist() == blocks
            row += count
            if end == len(sequence.token_ids):
                sampled.append((sequence, row - 1))
        assert row == len(batch.token_ids) == len(batch.positions) == len(batch.slot_mapping)
        assert list(zip(step.sampled, batch.logit_rows.tolist(), strict=True)) == sampled


class RandomLoad(RuleBasedStateMachine):
    """Arrivals, cancels and steps in any order over pools of any size; `Driver` checks each step."""

    @initialize(
        blocks=st.integers(1, 24),
        max_sequences=st.integers(1, 9),
        spare_tokens=st.integers(0, 30),
        shared_prompt=st.lists(st.integers(0, 49), min_size=96, max_size=96),
    )
    def start(self, blocks: int, max_sequences: int, spare_tokens: int, shared_prompt: list[int]) -> None:
        scheduler = Scheduler(BlockPool(blocks, BLOCK), max_sequences, max_sequences + spare_tokens)
        self.driver = Driver(scheduler)
        self.capacity = blocks * BLOCK
        self.shared_prompt = shared_prompt
        self.arrived = 0

    @rule(
        total=st.integers(2, 96),
        prompt_part=st.floats(0, 1),
        common_part=st.floats(0, 1),
        priority=st.sampled_from([0, 0, 0, -2, 1, 5]),
    )
    def arrive(self, total: int, prompt_part: float, common_part: float, priority: int) -> None:
        total = min(total, self.capacity)
        prompt_length = 1 + int(prompt_part * (total - 2))
        common = int(common_part * prompt_length)
        own = [(self.arrived * 31 + place) % 50 for place in range(prompt_length - common)]
        # As the engine has it: the time of arrival, less what the priority is worth.
        turn = float(self.arrived - 10 * priority)
        sequence = make_sequence(self.arrived, self.shared_prompt[:common] + own, turn=turn)
        self.driver.add(sequence, total - prompt_length)
        self.arrived += 1

    @precondition(lambda self: self.driver.target)
    @rule(place=st.integers(0, 1000))
    def cancel(self, place: int) -> None:
        alive = list(self.driver.target)
        self.driver.cancel(alive[place % len(alive)])

    @precondition(lambda self: self.driver.target)
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.driver.target:
                self.driver.step()

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler = self.driver.scheduler
        scheduler.check()
        known = [*scheduler.running, *scheduler.waiting]
        assert len(known) == len(set(known)) == len(self.driver.target)
        assert set(known) == self.driver.target.keys()
        assert [s.order for s in scheduler.running] == sorted(s.order for s in scheduler.running)
        assert [s.order for s in scheduler.waiting] == sorted(s.order for s in scheduler.waiting)
        assert (
            len({s.slot.number for s in scheduler.running})
            == len(scheduler.running)
            <= scheduler.max_sequences
        )

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        # In every step the first in order computes a token that is not taken from it again.
        for _ in range(2 * sum(self.driver.target.values())):
            if self.driver.target:
                self.driver.step()
                self.nothing_is_lost()
        assert not self.driver.target, "a sequence starved"
        assert self.driver.scheduler.pool.free_count == self.driver.scheduler.pool.num_blocks


RandomLoad.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, database=None, print_blob=True
)
TestRandomLoad = RandomLoad.TestCase


def test_random_loads_reach_preemption_eviction_and_chunks():
    scheduler = Scheduler(BlockPool(10, BLOCK), 4, 6)
    driver = Driver(scheduler)
    for number in range(12):
        driver.add(make_sequence(number, [number] * 9), 12)
    while driver.target:
        driver.step()
    assert scheduler.preemptions > 0
    assert scheduler.pool.evictions > 0
    assert len(driver.admitted) > 12


def test_decodes_run_in_every_step_beside_chunks_of_a_long_prompt():
    scheduler = Scheduler(BlockPool(64, BLOCK), 4, 8)
    driver = Driver(scheduler)
    short = make_sequence(0, [1, 2])
    driver.add(short, 50)
    driver.step()
    long = make_sequence(1, list(range(40)))
    driver.add(long, 1)
    counts = []
    while long in driver.target:
        before = len(short.token_ids), long.num_computed
        driver.step()
        counts.append((len(short.token_ids) - before[0], long.num_computed - before[1]))
    assert counts == [(1, 7)] * 5 + [(1, -35)]


def test_latest_of_lowest_priority_gives_way():
    scheduler = Scheduler(BlockPool(7, BLOCK), 4, 100)
    driver = Driver(scheduler)
    important, early, late = (
        make_sequence(2, [1] * 7, turn=-1.0),
        make_sequence(0, [2] * 7),
        make_sequence(1, [3] * 7),
    )
    for sequence in (early, late, important):
        driver.add(sequence, 13)
    driver.step()
    assert scheduler.running == [important, early, late]
    while scheduler.preemptions == 0:
        driver.step()
    assert scheduler.waiting == [late]
    while driver.target:
        driver.step()
    assert driver.finished == [important, early, late]


def test_head_of_the_queue_is_not_overtaken_by_smaller_ones():
    scheduler = Scheduler(BlockPool(8, BLOCK), 4, 100)
    driver = Driver(scheduler)
    driver.add(make_sequence(0, [1] * 8), 20)
    driver.step()
    driver.add(make_sequence(1, [2] * 28), 3)
    for number in range(2, 10):
        driver.add(make_sequence(number, [number]), 2)
    while driver.target:
        driver.step()
    assert [s.order[1] for s in driver.admitted[:2]] == [0, 1]


def test_shared_prefix_is_held_once_and_the_last_token_always_computed():
    scheduler = Scheduler(BlockPool(16, BLOCK), 4, 100)
    driver = Driver(scheduler)
    prompt = list(range(12))
    first, second = make_sequence(0, prompt), make_sequence(1, prompt)
    driver.add(first, 10)
    driver.step()
    driver.add(second, 10)
    driver.step()
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert scheduler.pool.references(first.block_table[0]) == 2


@pytest.mark.parametrize(
    ("sequences", "tokens", "message"),
    [(8, 7, "max_batch_tokens 7 is less than max_sequences 8"), (0, 7, "1 or more")],
)
def test_limits_that_cannot_work_are_refused(sequences, tokens, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(BlockPool(4, BLOCK), sequences, tokens)
