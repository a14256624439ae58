"""Prefix reuse: blocks of prompts that a unit still holds are not computed again.

A prompt is so many blocks of equal size; equal blocks are of equal prompts up to there. A unit where prompts
start keeps the blocks of those that ended for as long as nobody needs their room: the least recently used go
first, of one prompt the last block. Requests that run side by side share blocks; each is held once.
"""

from __future__ import annotations

from atoll.sim.heap import hold
from atoll.sim.sim_arrays import Sim
from atoll.sim.sim_kernel import kernel


@kernel
def blocks_found(z: Sim, u: int, r: int) -> tuple[int, int]:
    """Return how many leading blocks of a prompt a unit holds, and how many of them others use now.

    At least one token is left to compute: that is where the first one of the answer comes from.
    """
    row, c = z.unit[u].cache, z.request[r]
    if row < 0:
        return 0, 0
    found, shared = 0, 0
    for k in range(min(c.blocks, (c.target - 1) // z.run[0].block_tokens)):
        # 0: not held; -1: held, and free to go; above 0: in use.
        users = z.block[row, z.block_id[c.block + k]].users
        if users == 0:
            # What comes after a block that is missing is no prefix.
            break
        found += 1
        if users > 0:
            shared += 1
    return found, shared


@kernel
def drop_free(z: Sim, u: int, b: int) -> None:
    """Take a block off those that are free to go."""
    unit = z.unit[u]
    block = z.block[unit.cache, b]
    if block.older < 0:
        unit.oldest = block.newer
    else:
        z.block[unit.cache, block.older].newer = block.newer
    if block.newer < 0:
        unit.newest = block.older
    else:
        z.block[unit.cache, block.newer].older = block.older
    block.users = 0
    unit.kept -= 1


@kernel
def make_way(z: Sim, u: int) -> None:
    """Drop free blocks, the oldest first, that have no room beside what is used."""
    unit = z.unit[u]
    while unit.kept > 0 and unit.used + unit.kept * z.run[0].block_tokens > unit.room:
        drop_free(z, u, unit.oldest)


@kernel
def use_blocks(z: Sim, u: int, r: int) -> None:
    """Let a request that is held in full use the blocks of its prompt; those that others use count once."""
    unit, c = z.unit[u], z.request[r]
    if unit.cache >= 0 and c.blocks > 0:
        c.sharing = True
        for k in range(c.blocks):
            b = z.block_id[c.block + k]
            if z.block[unit.cache, b].users < 0:
                drop_free(z, u, b)
            elif z.block[unit.cache, b].users > 0:
                # The whole prompt has been held for it: what others hold is counted with them.
                hold(z, u, -float(z.run[0].block_tokens))
            z.block[unit.cache, b].users += 1
    make_way(z, u)


@kernel
def leave_blocks(z: Sim, u: int, r: int) -> None:
    """Let a request that is about to be freed no longer use its blocks; those nobody uses are kept."""
    unit, c = z.unit[u], z.request[r]
    if not c.sharing:
        return
    c.sharing = False
    for i in range(c.blocks):
        # From the end: the start of a prompt is dropped last, since blocks after it are of no use without it.
        b = z.block_id[c.block + c.blocks - 1 - i]
        block = z.block[unit.cache, b]
        block.users -= 1
        if block.users > 0:
            # Others still use it, and the caller takes the whole prompt off.
            hold(z, u, float(z.run[0].block_tokens))
        elif unit.alive:
            block.users = -1
            block.older = unit.newest
            block.newer = -1
            if unit.newest >= 0:
                z.block[unit.cache, unit.newest].newer = b
            else:
                unit.oldest = b
            unit.newest = b
            unit.kept += 1


@kernel
def forget_blocks(z: Sim, u: int) -> None:
    """Drop all free blocks of a unit."""
    while z.unit[u].kept > 0:
        drop_free(z, u, z.unit[u].oldest)
