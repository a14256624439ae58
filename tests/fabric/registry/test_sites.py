"""Fabrics by site: who keeps what, who speaks, and that summaries merge, heal and leave no ghosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.registry import sites as rules
from atoll.fabric.registry.records import SiteService
from atoll.fabric.registry.sites import ALL, SiteSummary, merge_summaries
from tests.fabric.registry.site_world import LONGEST_LOOK_S, RealMember, SiteWorld

MODEL = "meta-llama/Llama-3.1-70B-Instruct"


def site_of(members: int, site: str, world: SiteWorld) -> list[RealMember]:
    return [world.start(f"{site}-{number}", site=site) for number in range(members)]


def settled(*sizes: int, seed: int = 1) -> tuple[SiteWorld, list[list[RealMember]]]:
    """Return a world with so many members in each site, and who they are, when all have heard of all."""
    world = SiteWorld(seed=seed)
    members = [site_of(size, f"s{number}", world) for number, size in enumerate(sizes)]
    world.pass_time(rules.SETTLED_S + 2 * LONGEST_LOOK_S)
    return world, members


def said_of(world: SiteWorld, site: str) -> set[int]:
    """Return how many members serve at a site, as all who are alive know it."""
    return {
        0 if (known := node.registry.sites().get(site)) is None else known.serving
        for node in world.living
    }


summaries = st.builds(
    SiteSummary,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["m001-00", "m002-00"]),
    st.sampled_from([1.0, 2.0]),
    st.lists(
        st.builds(
            SiteService,
            st.sampled_from(["m", "n"]),
            st.just("llm"),
            st.integers(0, 3),
            st.just(0),
            st.sampled_from([0.0, 0.5]),
        ),
        max_size=2,
    ).map(tuple),
)
views = st.lists(summaries, max_size=4).map(
    lambda some: {summary.site: summary for summary in some}
)


@given(views, views, views)
def test_summaries_merge_in_any_order_and_any_number_of_times(
    a: dict[str, SiteSummary], b: dict[str, SiteSummary], c: dict[str, SiteSummary]
) -> None:
    assert merge_summaries(a, b) == merge_summaries(b, a)
    assert merge_summaries(a, a) == a
    assert merge_summaries(merge_summaries(a, b), c) == merge_summaries(a, merge_summaries(b, c))


def test_members_keep_their_site_and_who_routes_sees_everybody() -> None:
    world, (first, second) = settled(6, 4)
    for node in first:
        workers = {s for s, e in node.registry.peers().items() if e.metadata.role == "worker"}
        assert workers == {other.registry.sid for other in first} - {node.registry.sid}
    everybody = {node.registry.sid for node in (*first, *second)}
    for node in world.nodes:
        if node.follows:
            known = {s for s, e in node.registry.peers().items() if e.metadata.role == "worker"}
            assert known == everybody
            assert all(world.knows(node, sid) for sid in everybody)
    # One speaks for each site, and everybody knows what it says.
    assert [sum(n.registry.speaks for n in site) for site in (first, second)] == [1, 1]
    assert said_of(world, "s0") == {6}
    figures = world.nodes[0].registry.stats()
    assert figures["sessions"] == {"join": 0, "serving": 10 + 3, "down": 0, "left": 0}
    assert (figures["sites"], figures["speaks"]) == (2, False)
    assert said_of(world, "s1") == {4}
    (service,) = first[0].registry.sites()["s1"].services
    assert (service.model, service.serving, service.room) == (MODEL, 4, 4 * 256)
    assert {keys.slot_of(sid) for sid in service.ask} == {"h0", "h1"}
    assert world.agreed()


def test_a_dead_speaker_is_followed_by_another_and_no_ghost_stays() -> None:
    world, (first, second) = settled(5, 3)
    speaker = next(node for node in first if node.registry.speaks)
    old = speaker.registry.all.sid
    world.kill(speaker)
    world.pass_time(LONGEST_LOOK_S + 1.0)
    assert said_of(world, "s0") == {4}
    assert sum(node.registry.speaks for node in first if node.up) == 1
    # A whole site goes: its last speaker's token does, and nobody speaks for it any more.
    for node in second:
        world.kill(node)
    world.pass_time(1.0)
    assert said_of(world, "s1") == {0}
    world.pass_time(90.0)
    for node in world.living:
        assert not node.registry.alive(old)
        entry = node.registry.all.get(old)
        assert entry is not None
        assert entry.record.state.name == "LEFT"
    assert world.agreed()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_partition_through_a_site_heals(seed: int) -> None:
    world, (first, second) = settled(8, 4, seed=seed)
    world.divide([*first[:5], *second[:1], world.nodes[0]])
    world.pass_time(rules.SETTLED_S + 2 * LONGEST_LOOK_S)
    # Each side has a speaker of its own, who tells of those that it sees.
    near = {n.registry.sites()["s0"].serving for n in world.living if n.side == 0}
    far = {n.registry.sites()["s0"].serving for n in world.living if n.side == 1}
    assert (near, far) == ({3}, {5})
    newcomer = world.start("s0-new", site="s0")
    world.heal()
    world.pass_time(2 * LONGEST_LOOK_S + rules.SETTLED_S)
    assert sum(node.registry.speaks for node in (*first, newcomer)) == 1
    assert said_of(world, "s0") == {9}
    assert world.agreed()


def test_a_fabric_that_is_not_by_site_has_one_part() -> None:
    world = SiteWorld(by_site=False)
    members = [*site_of(3, "s0", world), *site_of(2, "s1", world)]
    world.pass_time(rules.SETTLED_S + LONGEST_LOOK_S)
    for node in world.living:
        assert list(node.registry.parts) == [ALL]
        assert node.registry.sites() == {}
        assert sum(world.knows(node, member.registry.sid) for member in members) == 5


def test_one_certificate_cannot_open_any_number_of_sites() -> None:
    world = SiteWorld()
    hub = world.nodes[0].registry
    for number in range(40):
        hub.token_up(f"{number:08x}", "m007", f"m007-{number:016x}", world.now_s)
    assert len(hub.parts) == 1 + rules.MAX_SITES_OF_SLOT
