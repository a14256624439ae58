"""The block pool of a node: which KV blocks are whose, which hold a known prefix, which are free.

A block holds `block_size` positions of every layer of the node. A full block is known by a hash of
the tokens in it and of all tokens before it, and of the layer range that filled it; a later request
with the same beginning shares it. A freed block keeps its content until the room is needed, and
blocks freed longest ago go first. Sequences get neighbouring blocks where possible, because a run
of neighbours is read in place while scattered blocks are gathered first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InternalError, UsageError


class OutOfBlocks(Exception):  # noqa: N818 - a signal to the batcher, not an error of anyone
    """The pool has too few free blocks; nothing was taken."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence on one node, in order, and how many positions are written.

    `chain` holds the hashes of the leading full blocks; `room` is how many blocks the sequence
    may come to need, a hint for where to put it.
    """

    seed: bytes
    room: int = 1
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    chain: list[bytes] = field(default_factory=list)
    contiguous: bool = True

    def append(self, block: int) -> None:
        """Add a block at the end."""
        if self.blocks and block != self.blocks[-1] + 1:
            self.contiguous = False
        self.blocks.append(block)


class BlockPool:
    """Hands out `count` blocks of `block_size` positions; see the module for the rules."""

    def __init__(self, count: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if count < 1 or block_size < 1:
            raise UsageError(f"a pool needs blocks, got {count} of {block_size} positions")
        self.count = count
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._users = [0] * count
        self._hash: list[bytes | None] = [None] * count
        self._known: dict[bytes, int] = {}
        # Free blocks that hold nothing worth keeping, and those that do, oldest first.
        self._blank: set[int] = set(range(count))
        # The blank ones again, a mark for each block: runs are found in it without a loop over all.
        self._is_blank = np.ones(count, np.bool_)
        self._kept: OrderedDict[int, None] = OrderedDict()
        # Where each open table is going to grow, by its identity.
        self._claims: dict[int, range] = {}
        self.hits = 0
        self.lookups = 0

    @property
    def free(self) -> int:
        """How many blocks could be handed out now."""
        return len(self._blank) + len(self._kept)

    @property
    def used(self) -> int:
        """How many blocks belong to running sequences."""
        return self.count - self.free

    def open(self, tokens: Sequence[int], seed: bytes, room_positions: int) -> BlockTable:
        """Start a table with the longest known prefix of `tokens`, short of the last token.

        At least one token is left to run, because its output is what the caller wants.
        """
        table = BlockTable(seed=seed, room=-(-max(room_positions, 1) // self.block_size))
        if not self.prefix_caching:
            return table
        size = self.block_size
        full = max(0, (len(tokens) - 1) // size)
        self.lookups += full
        parent = seed
        for index in range(full):
            parent = _digest(parent, tokens[index * size : (index + 1) * size])
            block = self._known.get(parent)
            if block is None:
                break
            self._take(block)
            table.append(block)
            table.chain.append(parent)
        table.length = len(table.blocks) * size
        self.hits += len(table.blocks)
        return table

    def missing(self, table: BlockTable, positions: int) -> int:
        """Return how many blocks the table lacks for `positions`."""
        return max(0, -(-positions // self.block_size) - len(table.blocks))

    def grow(self, table: BlockTable, positions: int) -> None:
        """Give the table room for `positions`; raises OutOfBlocks and takes nothing if it cannot."""
        need = self.missing(table, positions)
        if need > self.free:
            raise OutOfBlocks
        for _ in range(need):
            block = self._pick(table)
            # Its content is about to be written over, so nobody may find it any more.
            self._forget(block)
            self._take(block)
            table.append(block)

    def commit(self, table: BlockTable, length: int, tokens: Sequence[int]) -> None:
        """Note that positions up to `length` are written and make full blocks known.

        `tokens` are those from the start of the sequence; blocks past what is known of them stay
        unknown.
        """
        table.length = length
        if not self.prefix_caching:
            return
        size = self.block_size
        full = min(length, len(tokens)) // size
        while len(table.chain) < full:
            index = len(table.chain)
            parent = table.chain[-1] if table.chain else table.seed
            digest = _digest(parent, tokens[index * size : (index + 1) * size])
            table.chain.append(digest)
            block = table.blocks[index]
            # The same content may be known from another block: that one stays the one to share.
            if digest not in self._known and self._hash[block] is None:
                self._known[digest] = block
                self._hash[block] = digest

    def truncate(self, table: BlockTable, length: int) -> None:
        """Give back blocks wholly past `length` positions (a neighbour had a shorter prefix)."""
        keep = -(-length // self.block_size)
        # From the end: blocks freed first are reused first, and a prefix is of use only with its beginning.
        for block in reversed(table.blocks[keep:]):
            self._drop(block)
        del table.blocks[keep:]
        del table.chain[length // self.block_size :]
        table.length = min(table.length, length)
        table.contiguous = _is_run(table.blocks)

    def close(self, table: BlockTable) -> None:
        """Free every block of the table at once."""
        self.truncate(table, 0)
        self._claims.pop(id(table), None)

    def check(self) -> None:
        """Raise InternalError where the books do not balance (tests and debug runs)."""
        for block, users in enumerate(self._users):
            places = (block in self._blank) + (block in self._kept) + (users > 0)
            if places != 1 or users < 0:
                raise InternalError(f"block {block} is in {places} places with {users} users")
            digest = self._hash[block]
            if digest is not None and self._known.get(digest) != block:
                raise InternalError(f"block {block} has a hash that leads elsewhere")
            if block in self._blank and digest is not None:
                raise InternalError(f"block {block} is blank and known")
            if (block in self._blank) != bool(self._is_blank[block]):
                raise InternalError(f"block {block} is blank in one book and not in the other")

    def _take(self, block: int) -> None:
        if self._users[block] == 0:
            self._blank.discard(block)
            self._is_blank[block] = False
            self._kept.pop(block, None)
        self._users[block] += 1

    def _drop(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            if self._hash[block] is None:
                self._blank.add(block)
                self._is_blank[block] = True
            else:
                self._kept[block] = None

    def _forget(self, block: int) -> None:
        digest = self._hash[block]
        if digest is not None:
            del self._known[digest]
            self._hash[block] = None

    def _pick(self, table: BlockTable) -> int:
        """Choose the next block: the neighbour of the last, else the start of a fitting run.

        A start keeps clear of where other sequences will grow, as long as there is room elsewhere.
        """
        neighbour = table.blocks[-1] + 1 if table.blocks else -1
        # Known content is given up only when no blank block is left.
        if neighbour in self._blank or (not self._blank and neighbour in self._kept):
            return neighbour
        if not self._blank:
            return next(iter(self._kept))
        room = max(1, table.room - len(table.blocks))
        clear = self._is_blank.copy()
        # Where other tables will grow is left to them.
        for owner, span in self._claims.items():
            if owner != id(table):
                clear[span.start : span.stop] = False
        # Claims are wishes: where they cover everything, any blank block is taken.
        start = _best_run(clear if clear.any() else self._is_blank, room)
        self._claims[id(table)] = range(start, start + room)
        return start


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    # Signed: marks of vectors are negative.
    body = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
    return hashlib.blake2b(parent + body, digest_size=16).digest()


def _is_run(blocks: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(blocks))


def _best_run(free: NDArray[np.bool_], want: int) -> int:
    """Return the start of the shortest run of at least `want`, else of the longest; of equals the first."""
    # A border on both sides, so that every run has a beginning and an end.
    marks = np.zeros(len(free) + 2, np.int8)
    marks[1:-1] = free
    edges = np.flatnonzero(np.diff(marks))
    starts, sizes = edges[::2], edges[1::2] - edges[::2]
    if not len(starts):
        raise InternalError("no run where no block is free")
    fits = sizes >= want
    if fits.any():
        return int(starts[np.argmin(np.where(fits, sizes, len(free) + 1))])
    return int(starts[np.argmax(sizes)])
