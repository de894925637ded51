"""The blocks of the KV cache: who uses which, and which full blocks can be found again by their content."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol


class PoolCorrupt(RuntimeError):
    """The pool's books do not add up."""


def root_hash(extra_key: str) -> bytes:
    """The hash before a sequence's first block. Only sequences of equal `extra_key` can share blocks."""
    return hashlib.blake2b(extra_key.encode(), digest_size=16).digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block: it names the block's tokens and all that stands before them."""
    # A cryptographic hash, because a collision would answer one client from another client's prompt.
    return hashlib.blake2b(previous + array("q", token_ids).tobytes(), digest_size=16).digest()


class CacheWatcher(Protocol):
    """Is told which hashes the prefix cache gains and loses."""

    def add(self, digest: bytes) -> None:
        """A block with this hash can be found from now on."""

    def discard(self, digest: bytes) -> None:
        """It no longer can."""


class BlockPool:
    """Reference counts of `num_blocks` blocks, and the prefix cache over them.

    A block that nobody uses is either blank, or cached: still findable by its hash until it is needed, least
    recently used first. Both kinds are free.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self.watcher: CacheWatcher | None = None
        self._references = [0] * num_blocks
        self._blank = deque(range(num_blocks))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free_count(self) -> int:
        """Blocks that nobody uses."""
        return len(self._blank) + len(self._reusable)

    def references(self, block: int) -> int:
        """How many sequences use the block."""
        return self._references[block]

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix of a hash chain. Nobody holds them: `share` them."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def free_count_beside(self, blocks: Iterable[int]) -> int:
        """Blocks that stay free once `blocks` are shared."""
        return self.free_count - sum(1 for block in blocks if self._references[block] == 0)

    def share(self, block: int) -> None:
        """Adds a user to a cached block."""
        if self._references[block] == 0:
            del self._reusable[block]
        self._references[block] += 1

    def allocate(self) -> int:
        """A free block for one user, its old content forgotten. IndexError when none is free."""
        if self._blank:
            block = self._blank.popleft()
        elif self._reusable:
            block, _ = self._reusable.popitem(last=False)
            digest = self._hash_of.pop(block)
            del self._block_of[digest]
            self.evictions += 1
            if self.watcher is not None:
                self.watcher.discard(digest)
        else:
            raise IndexError("no KV block is free")
        self._references[block] = 1
        return block

    def release(self, block_table: list[int]) -> None:
        """Takes a user off each block of a sequence and empties its table."""
        # From the end, so that a prefix's tail is evicted before its head, without which the tail cannot be
        # found.
        for block in reversed(block_table):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._reusable[block] = None
                else:
                    self._blank.append(block)
        block_table.clear()

    def remember(self, block: int, digest: bytes) -> None:
        """Makes a full, computed block findable. A second block of the same content stays unlisted."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            if self.watcher is not None:
                self.watcher.add(digest)

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Compares the books with the tables of all sequences that hold blocks. Raises PoolCorrupt."""
        used = Counter(block for table in block_tables for block in table)
        counted = {block: count for block, count in enumerate(self._references) if count != 0}
        if counted != used:
            raise PoolCorrupt(f"reference counts {counted} differ from use {dict(used)}")
        if sorted([*self._blank, *self._reusable, *used]) != list(range(self.num_blocks)):
            raise PoolCorrupt("a block is lost, or both free and used")
        if self._hash_of != {block: digest for digest, block in self._block_of.items()}:
            raise PoolCorrupt("the prefix cache's two tables differ")
        if not self._reusable.keys() <= self._hash_of.keys() or not self._hash_of.keys().isdisjoint(
            self._blank
        ):
            raise PoolCorrupt("a free block is cached without a hash, or blank with one")
