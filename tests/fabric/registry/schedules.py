"""One random schedule: a few dozen steps of everything that may happen, then the reckoning."""

from __future__ import annotations

import random

from atoll.fabric.registry.records import SessionState
from tests.fabric.registry.network import Network, Node

SLOTS = ("m001", "m002", "m003")
STATES = (SessionState.JOIN, SessionState.SERVING, SessionState.SERVING, SessionState.DOWN)


def run(seed: int, steps: int = 24) -> Network:
    """Run the schedule of this seed; raises Broken if anything happens that must not."""
    rng = random.Random(seed)
    net = Network(seed, skew_s=100.0)
    net.start("h0", SessionState.JOIN)
    if rng.random() < 0.5:
        net.start("h1", SessionState.JOIN)
    for slot in SLOTS[: rng.randint(1, 3)]:
        net.start(slot)
    for _ in range(steps):
        step(net, rng)
    net.settle()
    return net


def step(net: Network, rng: random.Random) -> None:
    """Let one thing happen."""
    kind = rng.random()
    if kind < 0.30 and net.flying:
        index = rng.randrange(len(net.flying))
        if rng.random() < 0.3:
            net.drop(index)
        else:
            net.deliver(index, keep=rng.random() < 0.3)
        return
    node = rng.choice(net.living)
    if kind < 0.45:
        net.now_s += rng.choice((0.1, 3.0, 30.0, 100.0))
        net.tick(node)
    elif kind < 0.60:
        net.look(node)
    elif kind < 0.72:
        other = rng.choice(net.living)
        if other is not node:
            net.exchange(node, other, lost_after=rng.choice((None, None, 0, 1)))
    elif kind < 0.80:
        net.announce(node, rng.choice(STATES), rng.choice("abc"))
    elif kind < 0.87:
        node.part = rng.randint(0, 1)
    elif kind < 0.92:
        net.replay(node, rng.choice(net.said))
    else:
        fate(net, node, rng)


def fate(net: Network, node: Node, rng: random.Random) -> None:
    """Let a process die, leave, or be followed by another of its slot; one hub always stays."""
    slot = node.registry.slot
    if slot == "h0":
        return
    if rng.random() < 0.3:
        net.leave(node)
    if rng.random() < 0.7:
        net.kill(node)
        if rng.random() < 0.6:
            net.start(slot, rng.choice(STATES[:2]))
