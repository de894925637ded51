"""The block pool: counts, the prefix cache's chain, eviction, and the self-check."""

import pytest

from service.engine.block_pool import BlockPool, PoolCorrupt, block_hash, root_hash


def chain(extra_key: str, *blocks: list[int]) -> list[bytes]:
    hashes = [root_hash(extra_key)]
    for block in blocks:
        hashes.append(block_hash(hashes[-1], block))
    return hashes[1:]


def cached(pool: BlockPool, digest: bytes) -> int:
    block = pool.allocate()
    pool.remember(block, digest)
    return block


def test_hash_names_tokens_history_and_key():
    assert chain("k", [1, 2], [3, 4]) == chain("k", [1, 2], [3, 4])
    assert chain("k", [1, 2], [3, 4])[1] != chain("k", [2, 1], [3, 4])[1]
    assert chain("k", [1, 2])[0] != chain("other", [1, 2])[0]
    assert chain("k", [1], [23])[1] != chain("k", [12], [3])[1]


def test_released_block_is_found_and_shared_until_it_is_evicted():
    pool = BlockPool(2, 4)
    first, second = chain("k", [1, 2, 3, 4], [5, 6, 7, 8])
    table = [cached(pool, first), cached(pool, second)]
    kept = list(table)
    pool.release(table)
    assert pool.free_count == 2
    assert pool.find([first, second]) == kept
    assert pool.free_count_beside(kept) == 0
    pool.share(kept[0])
    assert pool.free_count == 1
    # The other block is needed for something else: its content is gone, the shared one stays.
    assert pool.allocate() == kept[1]
    assert pool.evictions == 1
    assert pool.find([first, second]) == kept[:1]
    pool.check([[kept[0]], [kept[1]]])


def test_least_recently_used_goes_first_and_the_tail_of_a_prefix_before_its_head():
    pool = BlockPool(4, 1)
    old = chain("k", [1], [2])
    new = chain("k", [3], [4])
    pool.release([cached(pool, digest) for digest in old])
    pool.release([cached(pool, digest) for digest in new])
    pool.share(pool.find(old)[0])
    pool.release(pool.find(old)[:1])
    pool.allocate()
    assert (len(pool.find(old)), len(pool.find(new))) == (1, 2)
    pool.allocate()
    assert (len(pool.find(old)), len(pool.find(new))) == (1, 1)
    pool.allocate()
    assert (len(pool.find(old)), len(pool.find(new))) == (1, 0)


def test_blank_blocks_are_used_before_cached_ones():
    pool = BlockPool(3, 4)
    digest = chain("k", [1, 2, 3, 4])[0]
    pool.release([cached(pool, digest)])
    held = [pool.allocate(), pool.allocate()]
    assert pool.find([digest])
    pool.check([held])


def test_second_block_of_the_same_content_stays_unlisted():
    pool = BlockPool(2, 4)
    digest = chain("k", [1, 2, 3, 4])[0]
    one, two = cached(pool, digest), cached(pool, digest)
    assert pool.find([digest]) == [one]
    pool.release([two])
    pool.check([[one]])


def test_no_free_block():
    pool = BlockPool(1, 4)
    pool.allocate()
    with pytest.raises(IndexError, match="no KV block"):
        pool.allocate()


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0)])
def test_pool_without_room_is_refused(blocks, size):
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(blocks, size)


def leak_a_block(_pool: BlockPool, table: list[int]) -> None:
    table.pop()


def free_a_used_block(pool: BlockPool, table: list[int]) -> None:
    pool._blank.append(table[0])


def lose_a_free_block(pool: BlockPool, _table: list[int]) -> None:
    pool._blank.pop()


def forget_one_way(pool: BlockPool, _table: list[int]) -> None:
    pool._block_of.clear()


def cache_a_blank_block(pool: BlockPool, _table: list[int]) -> None:
    digest = block_hash(b"", [9])
    pool._block_of[digest] = pool._blank[0]
    pool._hash_of[pool._blank[0]] = digest


@pytest.mark.parametrize(
    "damage", [leak_a_block, free_a_used_block, lose_a_free_block, forget_one_way, cache_a_blank_block]
)
def test_check_finds(damage):
    pool = BlockPool(4, 4)
    table = [cached(pool, chain("k", [1, 2, 3, 4])[0]), pool.allocate()]
    pool.check([table])
    damage(pool, table)
    with pytest.raises(PoolCorrupt):
        pool.check([table])
