"""How soon a federation agrees, by its own clock: 20 of them, two of which are hubs."""

from __future__ import annotations

import pytest

from atoll.fabric.registry.records import SessionState
from tests.fabric.registry.clockwork import Clockwork
from tests.seeds import seeds

MEMBERS = 18
ALL = MEMBERS + 2


def federation(
    seed: int, members: int = MEMBERS, *, loss: float = 0.0, skew_s: float = 0.0
) -> Clockwork:
    net = Clockwork(seed, loss=loss, skew_s=skew_s)
    for slot in ("h0", "h1"):
        net.start(slot, SessionState.JOIN)
    for i in range(members):
        net.start(f"m{i:03d}")
    net.pass_time(12.0)
    assert net.agreed()
    return net


def test_a_change_is_known_at_once_and_costs_one_message_each() -> None:
    net = federation(1)
    before = net.pushes
    net.announce(net.nodes[5], SessionState.SERVING, "new")
    net.pass_time(0.006)
    assert net.agreed()
    assert net.pushes - before == ALL - 1


def test_a_late_joiner_knows_everything_in_half_a_second() -> None:
    net = federation(2)
    joiner = net.start("m900")
    assert net.until(lambda: net.agreed() and joiner.registry.synced, 0.5) < 0.2


def test_a_late_joiner_does_not_make_everybody_talk() -> None:
    net = federation(3)
    pushes, exchanges = net.pushes, net.exchanges
    net.start("m900")
    net.pass_time(1.0)
    assert net.pushes - pushes <= 3 * (ALL + 1)
    assert net.exchanges - exchanges <= 2 * (ALL + 1)


def test_idle_members_say_little() -> None:
    net = federation(4)
    pushes, exchanges = net.pushes, net.exchanges
    net.pass_time(60.0)
    assert net.pushes == pushes
    assert (net.exchanges - exchanges) / 60.0 < ALL / 5 * 1.3


@pytest.mark.parametrize("seed", seeds(3, fast=1))
def test_a_short_partition_heals_within_a_second_and_nobody_is_buried(seed: int) -> None:
    net = federation(10 + seed, skew_s=100.0)
    cut = [net.nodes[1], *net.nodes[ALL // 2 :]]
    sids = {node.sid for node in net.living}
    net.move(cut, 1)
    net.pass_time(10.0)
    net.announce(net.nodes[3], SessionState.SERVING, "here")
    net.announce(net.nodes[ALL - 2], SessionState.DOWN, "there")
    net.start("m901").part = 1
    net.pass_time(10.0)
    assert not net.agreed()
    net.move(cut, 0)
    net.move([net.nodes[-1]], 0)
    assert net.until(net.agreed, 1.0) < 1.0
    assert {node.sid for node in net.living} - {net.nodes[-1].sid} == sids


def test_the_loss_of_all_hubs_links_heals_within_a_second() -> None:
    net = federation(20)
    for part, node in enumerate(net.nodes):  # everybody alone
        net.move([node], part + 1)
    net.pass_time(5.0)
    for node in net.nodes[2:12]:
        net.announce(node, SessionState.SERVING, "meanwhile")
    net.pass_time(5.0)
    net.move(net.nodes, 0)
    assert net.until(net.agreed, 1.0) < 1.0
    net.check_settled()


def test_a_long_partition_buries_and_replaces() -> None:
    net = federation(30, members=10)
    cut = net.nodes[8:]
    old = {node.sid for node in cut}
    net.move(cut, 1)
    net.pass_time(90.0)
    assert all(
        net.nodes[0].registry.entries()[sid].record.state is SessionState.LEFT for sid in old
    )
    net.move(cut, 0)
    net.until(lambda: net.agreed() and not old & {node.sid for node in cut}, 10.0)
    net.pass_time(10.0)
    net.check_settled()
    assert all(len(node.sessions) == 1 for node in cut)


def test_the_dead_are_masked_at_once_and_left_after_a_minute() -> None:
    net = federation(40)
    dead = net.nodes[7]
    net.kill(dead)
    net.pass_time(0.011)
    assert not any(node.registry.alive(dead.sid) for node in net.living)
    assert all(dead.sid in node.registry.peers() for node in net.living)
    net.pass_time(59.0)
    assert all(dead.sid in node.registry.peers() for node in net.living)
    net.pass_time(12.0)
    assert not any(dead.sid in node.registry.peers() for node in net.living)
    obituaries = sum(node.registry.counts["obituaries"] for node in net.living)
    assert obituaries == 1, "the second hub hears it from the first"


def test_lost_pushes_are_made_up_for() -> None:
    net = federation(50, loss=0.5)
    for node in net.nodes[2:12]:
        net.announce(node, SessionState.SERVING, "half of you hear this")
    net.pass_time(0.5)
    assert not net.agreed()
    assert net.until(net.agreed, 20.0) > 0
    net.check_settled()
