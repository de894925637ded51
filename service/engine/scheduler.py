"""Decides at each step which sequences run, how many tokens of each, and who gives up its blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from service.engine.block_pool import BlockPool
from service.engine.sequence import Sequence
from service.engine.slots import Generating, SlotTable

_by_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Piece:
    """So many next tokens of a sequence that does not generate yet are computed in a step."""

    sequence: Sequence
    count: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step's work."""

    generating: Generating
    pieces: list[Piece]


class Scheduler:
    """Continuous batching: one token of every running sequence that generates, then chunks of prompts.

    Whoever sorts first by `Sequence.order` is never preempted by others and may take the blocks of all
    others, and nobody overtakes the first in the queue; so every sequence that fits the pool alone finishes
    in the end. No sequence may need more than `max_blocks` blocks, by default all that there are.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        max_batch_tokens: int,
        max_blocks: int | None = None,
        max_prompt_logprob_rows: int = 256,
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
        self.slots = SlotTable(max_sequences, max_blocks or pool.num_blocks, pool.block_size)
        self._known_generating = Generating(self.slots, [])
        self._has_changed = False
        # A little room for running sequences to grow, so that what is admitted is not preempted in the next
        # step.
        self._reserve = max(1, pool.num_blocks // 100)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that fits the pool alone."""
        insort(self.waiting, sequence, key=_by_order)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence, wherever it is, and frees its blocks."""
        queue = self.waiting if sequence.slot is None else self.running
        position = bisect_left(queue, sequence.order, key=_by_order)
        if position < len(queue) and queue[position] is sequence:
            del queue[position]
            self._release(sequence)

    def schedule(self) -> Scheduled:
        """The step's work, which is not nothing while anything waits or runs."""
        preemptions = self.preemptions
        self.admitted = []
        self._make_rooms()
        generating = self._generating()
        self._budget = self.max_batch_tokens - len(generating.sequences)
        self._logprob_rows = self.max_prompt_logprob_rows
        pieces: list[Piece] = []
        if len(generating.sequences) < len(self.running):
            others = [sequence for sequence in self.running if not sequence.generates]
            pieces += [self._take(sequence) for sequence in others if self._chunk(sequence)]

        # Whoever was preempted in this step must not take the blocks that it just gave up.
        while self.preemptions == preemptions and self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            if not self._chunk(sequence) or not self._admit(sequence):
                break
            pieces.append(self._take(sequence))
        return Scheduled(generating, pieces)

    def computed_last(self, generating: Generating) -> None:
        """Notes that the last token of each is in the cache now, and makes full blocks findable."""
        generating.go_on()
        for place in generating.full:
            sequence = generating.sequences[place]
            blocks = sequence.num_computed // self.pool.block_size
            self._remember(sequence, blocks - 1, blocks)

    def computed(self, pieces: Iterable[Piece]) -> list[Sequence]:
        """Notes that pieces are in the cache now, and makes their full blocks findable.

        Returns the sequences whose prompts this completed.
        """
        block_size = self.pool.block_size
        completed = []
        for piece in pieces:
            sequence, slot = piece.sequence, piece.sequence.slot
            assert slot is not None
            before = slot.computed
            slot.computed = after = before + piece.count
            if after == sequence.prompt_length:
                completed.append(sequence)
            if after >= sequence.prompt_length:
                self._has_changed = True
            self._remember(sequence, before // block_size, after // block_size)
        return completed

    def check(self) -> None:
        """Verifies the pool against all running sequences. Raises PoolCorrupt."""
        self.pool.check(sequence.block_table for sequence in self.running)

    def _generating(self) -> Generating:
        """Those of the running sequences that generate. Each of them gets a token in every step, so that it goes on doing so
        for as long as it runs: they only change when one joins or leaves.
        """
        if self._has_changed:
            self._has_changed, known = False, self._known_generating
            sequences = [
                sequence
                for sequence in self.running
                if sequence.slot is not None and (sequence.slot.columns is known or sequence.generates)
            ]
            self._known_generating = Generating(self.slots, sequences)
        return self._known_generating

    def _remember(self, sequence: Sequence, first: int, end: int) -> None:
        """Makes the full blocks from `first` up to `end` findable."""
        if first == end or sequence.slot is None:
            return
        hashes = sequence.hash_blocks(end, self.pool.block_size)
        for index in range(first, end):
            self.pool.remember(sequence.slot.block(index), hashes[index])

    def _chunk(self, sequence: Sequence) -> int:
        """How many of its tokens fit what is left of this step."""
        count = min(sequence.remaining, self._budget)
        return min(count, self._logprob_rows) if sequence.lacks_prompt_logprobs else count

    def _take(self, sequence: Sequence) -> Piece:
        count = self._chunk(sequence)
        self._budget -= count
        if sequence.lacks_prompt_logprobs:
            self._logprob_rows -= count
        return Piece(sequence, count)

    def _make_rooms(self) -> None:
        # A prompt got all its blocks when it was admitted; only the place of a generated token can be
        # missing.
        generating = self._generating()
        # Whoever lacks room may preempt those at the end of the list, itself included.
        for place in list(generating.full):
            if not self._make_room(generating.sequences[place]):
                break
            generating.add_block(place, self.pool.allocate())

    def _make_room(self, sequence: Sequence) -> bool:
        """Frees a block for a sequence, unless it is preempted itself."""
        while sequence.slot is not None and not self.pool.free_count:
            victim = self.running.pop()
            self._release(victim)
            self.preemptions += 1
            insort(self.waiting, victim, key=_by_order)
        return sequence.slot is not None

    def _admit(self, sequence: Sequence) -> bool:
        pool = self.pool
        hashes = sequence.hash_blocks(sequence.reusable_tokens // pool.block_size, pool.block_size)
        found = pool.find(hashes)
        missing = -(-len(sequence.token_ids) // pool.block_size) - len(found)
        if pool.free_count_beside(found) < missing + (self._reserve if self.running else 0):
            return False
        for block in found:
            pool.share(block)
        blocks = found + [pool.allocate() for _ in range(missing)]
        sequence.slot = self.slots.take(blocks, len(found) * pool.block_size)
        insort(self.running, self.waiting.pop(0), key=_by_order)
        self.admitted.append(sequence)
        self._has_changed = True
        return True

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            return
        self.pool.release(sequence.slot.blocks)
        self.slots.give_back(sequence.slot)
        sequence.slot = None
        self._has_changed = True
