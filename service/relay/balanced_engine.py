"""A worker's engine and those of its siblings as one: each request runs where there is most room."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Protocol

from placement.board import Board, BoardRow
from service.engine.async_engine import EngineUnavailable
from service.engine.request import EngineRequest, RequestOutput
from service.relay.choice import Candidate, choose
from service.relay.peer import Peer

# Blocks of a prompt that are looked up in the siblings' caches: hashing these takes about 0.2 ms.
_MOST_BLOCKS = 128


class LocalEngine(Protocol):
    """What is needed of the worker's own engine."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        """As `AsyncEngine.generate`."""

    def prefix_hashes(self, request: EngineRequest, most_blocks: int) -> list[bytes]:
        """As `Engine.prefix_hashes`."""


class BalancedEngine:
    """Runs each request on `local`, the engine of the worker with row `index`, or on a sibling. For one event loop.

    Workers are told by their rows on the board. `socket_path` gives the relay socket of one. `distances` are those
    from this worker's node, by node. `block_size` is in tokens. Requests with the id `own_request_id` are for this worker
    alone.
    """

    def __init__(
        self,
        local: LocalEngine,
        index: int,
        board: Board,
        socket_path: Callable[[int], str],
        distances: Mapping[int, int],
        block_size: int,
        own_request_id: str = "",
    ) -> None:
        self._own_request_id = own_request_id
        self._local = local
        self._index = index
        self._board = board
        self._socket_path = socket_path
        self._distances = distances
        self._block_size = block_size
        self._peers: dict[int, Peer] = {}

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        """As `AsyncEngine.generate`. A request whose worker goes away before its first output is given to another."""
        avoided: set[int] = set()
        is_own = bool(self._own_request_id) and request.request_id == self._own_request_id
        while True:
            worker = self._index if is_own else self._choose(request, avoided)
            engine = self._local if worker == self._index else self._peer(worker)
            begun = False
            self._board.place(self._index, worker, request.params.n)
            try:
                async with aclosing(engine.generate(request)) as outputs:
                    async for output in outputs:
                        begun = True
                        yield output
                return
            except EngineUnavailable:
                avoided.add(worker)
                if begun or is_own or (self._index in avoided and not self._siblings(avoided)):
                    raise
            finally:
                self._board.place(self._index, worker, -request.params.n)

    def close(self) -> None:
        """Close the connections to siblings."""
        for peer in self._peers.values():
            peer.close()

    def _peer(self, worker: int) -> Peer:
        if worker not in self._peers:
            self._peers[worker] = Peer(self._socket_path(worker))
        return self._peers[worker]

    def _siblings(self, avoided: set[int]) -> dict[int, BoardRow]:
        """Serving workers over the same weights, this one left out."""
        generation = self._board.read(self._index).generation
        return {
            worker: self._board.read(worker)
            for worker in self._board.serving(generation)
            if worker != self._index and worker not in avoided
        }

    def _choose(self, request: EngineRequest, avoided: set[int]) -> int:
        siblings = self._siblings(avoided)
        if not siblings:
            return self._index
        own = self._board.read(self._index)
        hashes = self._local.prefix_hashes(request, _MOST_BLOCKS)
        prompt_blocks = -(-len(request.prompt_token_ids) // self._block_size)
        rows = siblings if self._index in avoided else {self._index: own, **siblings}
        candidates = [
            Candidate(
                worker=worker,
                load=self._board.placed(worker),
                is_local=worker == self._index,
                distance=10 if row.unit == own.unit else max(10, self._distances.get(row.node, 20)),
                cached_share=self._cached(worker, hashes) / prompt_blocks,
                has_room=row.kv_blocks_free >= prompt_blocks,
            )
            for worker, row in rows.items()
        ]
        return choose(candidates).worker

    def _cached(self, worker: int, hashes: list[bytes]) -> int:
        """How many leading blocks of a prompt a worker has cached."""
        table = self._board.prefixes(worker)
        for count, digest in enumerate(hashes):
            if digest not in table:
                return count
        return len(hashes)
