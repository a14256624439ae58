"""The simulation of many members, in small: it agrees, and is the same every time."""

from __future__ import annotations

import pytest

from benchmarks.federation.registry_scale import (
    grow,
    heals,
    joins,
    loses_hub,
    measure_traffic,
    one_leaves,
)
from benchmarks.federation.registry_world import RegistryWorld, shared_records


def story(members: int, sample: int, seed: int) -> tuple[object, ...]:
    """Everything that may happen; returns what can be seen of it."""
    with shared_records():
        world = RegistryWorld(members, hubs=2, sample=sample, seed=seed)
        times = [grow(world), joins(world), loses_hub(world), heals(world)]
        world.pass_time(15.0)
        traffic = measure_traffic(world, 20.0)
        one_leaves(world)
        world.newcomer()
        world.pass_time(90.0)
        assert world.agreed()
        figures = [(node.messages, node.bytes, node.registry.hash) for node in world.nodes]
        return (*times, traffic.messages, traffic.bytes, figures)


@pytest.mark.parametrize(("members", "sample"), [(24, 24), (100, 12)])
def test_all_agree_after_joins_a_lost_hub_and_a_partition(members: int, sample: int) -> None:
    mass_s, join_s, hub_s, partition_s, messages, size, _ = story(members, sample, 3)
    for took_s, max_s in ((mass_s, 2.0), (join_s, 1.0), (hub_s, 6.0), (partition_s, 6.0)):
        assert isinstance(took_s, float)
        assert took_s < max_s
    # An exchange every five seconds, asked and answered, of two short messages; and its load.
    assert isinstance(messages, float)
    assert isinstance(size, float)
    assert 2000 < messages < 6000
    assert size < 2_000_000


def test_equal_seeds_give_equal_runs() -> None:
    assert story(30, 8, 7) == story(30, 8, 7)
    assert story(30, 8, 7) != story(30, 8, 8)


@pytest.mark.slow
def test_a_hundred_members_agree_and_say_little() -> None:
    mass_s, join_s, hub_s, partition_s, _, size, _ = story(100, 100, 1)
    assert all(isinstance(took_s, float) for took_s in (mass_s, join_s, hub_s, partition_s))
    assert isinstance(size, float)
    assert size < 1_000_000
