"""Decides at each step which sequences run, how many tokens of each, and who gives up its blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from service.engine.block_pool import BlockPool
from service.engine.sequence import Sequence

_by_order = attrgetter("order")


@dataclass(slots=True)
class Scheduled:
    """So many next tokens of a sequence are computed in this step."""

    sequence: Sequence
    count: int


class Scheduler:
    """Continuous batching: one token of every running sequence that generates, then chunks of prompts.

    Whoever sorts first by `Sequence.order` is never preempted by others and may take the blocks of all
    others, and nobody overtakes the first in the queue; so every sequence that fits the pool alone finishes
    in the end.
    """

    def __init__(
        self, pool: BlockPool, max_sequences: int, max_batch_tokens: int, max_prompt_logprob_rows: int = 256
    ) -> None:
        if max_sequences < 1 or max_prompt_logprob_rows < 1:
            raise ValueError("max_sequences and max_prompt_logprob_rows must be 1 or more")
        if max_batch_tokens < max_sequences:
            raise ValueError(
                f"max_batch_tokens {max_batch_tokens} is less than max_sequences {max_sequences}: "
                "a step could not serve every running sequence"
            )
        self.pool = pool
        self.max_sequences = max_sequences
        self.max_batch_tokens = max_batch_tokens
        self.max_prompt_logprob_rows = max_prompt_logprob_rows
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.preemptions = 0
        self._budget = max_batch_tokens
        self._logprob_rows = max_prompt_logprob_rows
        self._slots = list(reversed(range(max_sequences)))
        # A little room for running sequences to grow, so that what is admitted is not preempted in the next
        # step.
        self._reserve = max(1, pool.num_blocks // 100)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that fits the pool alone."""
        insort(self.waiting, sequence, key=_by_order)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence, wherever it is, and frees its blocks."""
        queue = self.running if sequence.running else self.waiting
        position = bisect_left(queue, sequence.order, key=_by_order)
        if position < len(queue) and queue[position] is sequence:
            del queue[position]
            self._release(sequence)

    def schedule(self) -> list[Scheduled]:
        """The step's work, generating sequences first. Not empty while anything waits or runs."""
        preemptions = self.preemptions
        self.admitted = []
        decodes: list[Scheduled] = []
        prompts: list[Scheduled] = []
        generating = [len(each.token_ids) - each.num_computed == 1 for each in self.running]
        self._budget = self.max_batch_tokens - sum(generating)
        self._logprob_rows = self.max_prompt_logprob_rows

        # Whoever lacks room may preempt those at the end of the list, itself included.
        for position, generates in enumerate(generating):
            if position >= len(self.running) or not self._make_room(self.running[position]):
                break
            sequence = self.running[position]
            if generates:
                decodes.append(Scheduled(sequence, 1))
            elif self._chunk(sequence):
                prompts.append(self._take(sequence))

        # Whoever was preempted in this step must not take the blocks that it just gave up.
        while self.preemptions == preemptions and self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            if not self._chunk(sequence) or not self._admit(sequence):
                break
            prompts.append(self._take(sequence))
        return decodes + prompts

    def computed(self, scheduled: Iterable[Scheduled]) -> list[Sequence]:
        """Notes that scheduled pieces are in the cache now, and makes their full blocks findable.

        Returns the sequences whose prompts this completed.
        """
        block_size = self.pool.block_size
        completed = []
        for piece in scheduled:
            sequence, before = piece.sequence, piece.sequence.num_computed
            sequence.num_computed = after = before + piece.count
            if after == sequence.prompt_length:
                completed.append(sequence)
            if after // block_size > before // block_size:
                self._remember(sequence, before // block_size, after // block_size)
        return completed

    def check(self) -> None:
        """Verifies the pool against all running sequences. Raises PoolCorrupt."""
        self.pool.check(sequence.block_table for sequence in self.running)

    def _remember(self, sequence: Sequence, first: int, end: int) -> None:
        """Makes the full blocks from `first` up to `end` findable."""
        hashes = sequence.hash_blocks(end, self.pool.block_size)
        for index in range(first, end):
            self.pool.remember(sequence.block_table[index], hashes[index])

    def _chunk(self, sequence: Sequence) -> int:
        """How many of its tokens fit what is left of this step."""
        count = min(sequence.remaining, self._budget)
        return min(count, self._logprob_rows) if sequence.lacks_prompt_logprobs else count

    def _take(self, sequence: Sequence) -> Scheduled:
        count = self._chunk(sequence)
        self._budget -= count
        if sequence.lacks_prompt_logprobs:
            self._logprob_rows -= count
        return Scheduled(sequence, count)

    def _make_room(self, sequence: Sequence) -> bool:
        # A prompt got all its blocks when it was admitted; only the place of a generated token can be
        # missing.
        if sequence.num_computed < len(sequence.block_table) * self.pool.block_size:
            return True
        while self.pool.free_count == 0:
            victim = self.running.pop()
            self._release(victim)
            self.preemptions += 1
            insort(self.waiting, victim, key=_by_order)
            if victim is sequence:
                return False
        sequence.block_table.append(self.pool.allocate())
        return True

    def _admit(self, sequence: Sequence) -> bool:
        pool = self.pool
        hashes = sequence.hash_blocks(sequence.reusable_tokens // pool.block_size, pool.block_size)
        found = pool.find(hashes)
        missing = -(-len(sequence.token_ids) // pool.block_size) - len(found)
        if pool.free_count_beside(found) < missing + (self._reserve if self.running else 0):
            return False
        for block in found:
            pool.share(block)
        sequence.block_table = found + [pool.allocate() for _ in range(missing)]
        sequence.num_computed = len(found) * pool.block_size
        insort(self.running, self.waiting.pop(0), key=_by_order)
        self.admitted.append(sequence)
        sequence.running = True
        sequence.slot = self._slots.pop()
        sequence.blocks_in_table = 0
        return True

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.num_computed = 0
        if sequence.running:
            sequence.running = False
            self._slots.append(sequence.slot)
