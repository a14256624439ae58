"""From a problem to templates: kinds of nodes, slices, their slowest source, and what time allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atoll.catalog.overlay import apply_overlay
from atoll.core.ids import parse_role
from atoll.core.paths import CACHE_VARIABLE
from atoll.perf.step import Position
from atoll.plan.capacities import node_capacity, role_table
from atoll.plan.handover import cut_sizes
from atoll.plan.problem import Offer, Problem, Settings
from atoll.solve.templates.library import (
    libraries,
    role_tables,
    slowest_sources,
    template_key,
    template_libraries,
)
from atoll.solve.templates.template_cache import TemplateCache
from tests.plan.builders import EAST, LAYERS, WEST, catalog, lengths, offer, problem, service


def asked(*offers: Offer, most: int = 2, **changes: object) -> Problem:
    return problem(
        offers=offers,
        services=(service("chat", **{"phases": "auto"} | changes),),
        settings=Settings(max_nodes_per_instance=most),
    )


def test_templates_are_made_of_kinds() -> None:
    cut = asked(offer(EAST, "L4:4", 1.0))
    found = libraries(cut, catalog())
    assert found.kinds == found.node_types == ("L4:1", "L4:2", "L4:4")
    assert set(found.roles) == {f"chat/llm/{phase}" for phase in ("prefill", "decode", "both")}
    assert not found.cut_short
    for library in found.roles.values():
        assert library.tables.node_types == found.kinds
        assert library.tables.memory_bytes == tuple(
            float(catalog().node(kind).memory_bytes) for kind in found.kinds
        )
    whole = libraries(asked(offer(EAST, "L4:4", 1.0, whole=True)), catalog())
    assert whole.kinds == ("L4:4",)


@pytest.mark.parametrize(
    ("sold", "slowest"),
    # 20 Gbit/s of its own, half of 20 Gbit/s, a quarter of 100 Gbit/s, an eighth of 400 Gbit/s: a slice with
    # less than machines of its size is not cut, nor one with less than half of what the best slices have.
    [
        (("L40S:1", "L40S:2", "L40S:8"), "L40S:1"),
        (("L40S:2", "L40S:4", "L40S:8"), "L40S:4"),
        (("L40S:2", "L40S:8"), "L40S:8"),
        (("L40S:2",), "L40S:2"),
    ],
)
def test_a_kind_counts_as_its_slowest_source(sold: tuple[str, ...], slowest: str) -> None:
    """A machine of its own, or a slice with a share of a larger one's interface."""
    regions = {machine: WEST if machine == "L40S:8" else EAST for machine in sold}
    links = {"nics": {"L40S:1": "20Gbit/s"}}
    fleet = asked(*(offer(regions[machine], machine, 1.0) for machine in sold))
    fleet = fleet.replace(overlays=({"links": links},))
    facts = fleet.catalog()
    share = {"L40S:1": 2.5e9, "L40S:2": 2.5e9 / 2, "L40S:4": 12.5e9 / 4, "L40S:8": 50e9 / 8}
    (source,) = slowest_sources(fleet, facts, "L40S:1")
    assert source.link.bandwidth_bytes_per_s == share[slowest]
    chat, role = fleet.services[0], parse_role("chat/llm/decode")
    tables = role_tables(fleet, facts, role)
    at = tables.node_types.index("L40S:1")
    cuts = cut_sizes(fleet, facts)
    cut = {own.node_type for own in fleet.offers if 1 in cuts[own.key]}
    assert cut == {machine for machine in sold if share[machine] >= share[slowest]}
    for machine in cut:
        own = role_table(
            fleet, facts, chat, role, "L40S:1", 2, region=regions[machine], machine=machine
        )
        assert (tables.rates[1, :, at] <= own[:3, 1]).all()
        if machine == slowest:
            np.testing.assert_array_equal(tables.rates[1, :, at], own[:3, 1])


def test_slices_of_machines_joined_otherwise_count_with_the_slower_joint() -> None:
    mixed = apply_overlay(catalog(), {"nodes": {"L40S:8": {"interconnect": "nvlink3"}}})
    both = asked(offer(EAST, "L40S:4", 1.0), offer(EAST, "L40S:8", 2.0))
    sources = slowest_sources(both, mixed, "L40S:2")
    assert {source.node.interconnect.kind for source in sources} == {"nvlink", "pcie"}
    assert len({source.link for source in sources}) == 1
    # What is sold as a machine of its own is not cut out of machines that join their GPUs otherwise.
    (whole,) = slowest_sources(both, mixed, "L40S:4")
    assert whole.node.interconnect.kind == "pcie"
    # One GPU is joined to nothing.
    assert len(slowest_sources(both, mixed, "L40S:1")) == 1


def test_one_node_templates_carry_exactly_what_the_node_does() -> None:
    """Requests of 100,000 tokens: 0.005 of them a second, which whole numbers once made 1 % less."""
    long = asked(
        offer("r", "L40S:1", 1.86, available=400),
        most=1,
        phases="together",
        ttft_s=60.0,
        tpot_s=0.5,
        lengths=lengths(100_000.0, 3_000.0),
    )
    (library,) = libraries(long, catalog()).roles.values()
    rate = node_capacity(
        long, catalog(), long.services[0], "chat/llm/both", "L40S:1", LAYERS, 1, Position.WHOLE,
        region="r",
    )  # fmt: skip
    assert 0 < rate < 0.1
    assert library.throughput.tolist() == [rate]


def test_what_a_service_avoids_carries_nothing() -> None:
    both = asked(offer(EAST, "L4:2", 1.0), offer(EAST, "L40S:1", 2.0), avoid=("L4:2",))
    tables = role_tables(both, catalog(), parse_role("chat/llm/both"))
    carries = {kind: tables.rates[:, :, c].any() for c, kind in enumerate(tables.node_types)}
    assert carries == {"L4:1": True, "L4:2": False, "L40S:1": True}


@pytest.mark.parametrize("calls", [0, 1, 4, 8, 100])
def test_when_time_is_up_every_role_still_has_templates(calls: int) -> None:
    fleet = asked(offer(EAST, "L4:4", 1.0), offer(EAST, "L40S:1", 1.0), most=5)
    questions = itertools.count()
    cut = libraries(fleet, catalog(), until=lambda: next(questions) >= calls)
    whole = libraries(fleet, catalog())
    assert set(cut.roles) == set(whole.roles)
    assert cut.cut_short == (calls < 100)
    for name, library in cut.roles.items():
        full = whole.roles[name]
        assert 1 <= library.max_nodes <= 5
        kept = full.counts.sum(axis=1) <= library.max_nodes
        assert np.array_equal(library.counts, full.counts[kept])
        assert np.array_equal(library.throughput, full.throughput[kept])
    if calls == 0:
        assert {library.max_nodes for library in cut.roles.values()} == {1}
    if calls == 100:
        assert {library.max_nodes for library in cut.roles.values()} == {5}


def test_what_was_cut_short_is_not_taken_for_the_whole_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    fleet = asked(offer(EAST, "L4:1", 1.0), most=3)
    assert template_libraries(fleet, catalog(), until=lambda: True).cut_short
    assert not template_libraries(fleet, catalog(), until=lambda: False).cut_short
    # From memory nothing is to wait for; from disk, capacities: they say which templates are meant.
    assert not template_libraries(fleet, catalog(), until=lambda: True).cut_short
    cache, questions = TemplateCache(), itertools.count()
    roles = len(fleet.roles)
    read = libraries(fleet, catalog(), cache=cache, until=lambda: next(questions) >= roles)
    assert not read.cut_short
    assert libraries(fleet, catalog(), cache=cache, until=lambda: True).cut_short
    # Where there is time to read them, they are read before any of single nodes are made.
    refused = libraries(fleet, catalog(), cache=cache, until=lambda: True, read=lambda _: False)
    assert refused.cut_short
    found = libraries(fleet, catalog(), cache=cache, until=lambda: True, read=lambda _: True)
    assert not found.cut_short
    empty = TemplateCache(tmp_path / "empty")
    assert libraries(
        fleet, catalog(), cache=empty, until=lambda: True, read=lambda _: True
    ).cut_short


@pytest.mark.parametrize("calls", [0, 1, 2, 4, 8, 100])
@pytest.mark.parametrize("single", [False, True])
def test_what_was_cut_short_is_gone_on_with(calls: int, single: bool) -> None:
    fleet = asked(offer(EAST, "L4:4", 1.0), offer(EAST, "L40S:1", 1.0), most=4)
    questions = itertools.count()
    cut = libraries(fleet, catalog(), until=lambda: next(questions) >= calls, single=single)
    whole = libraries(fleet, catalog())
    for until in (None, lambda: False):
        gone_on = libraries(fleet, catalog(), until=until, start=cut)
        assert not gone_on.cut_short
        assert gone_on.complete
        for name, library in gone_on.roles.items():
            assert np.array_equal(library.tables.rates, whole.roles[name].tables.rates)
            assert np.array_equal(library.counts, whole.roles[name].counts)
            assert np.array_equal(library.throughput, whole.roles[name].throughput)


@pytest.mark.parametrize("until", [None, lambda: False])
def test_capacities_can_be_had_without_templates(until: Callable[[], bool] | None) -> None:
    fleet = asked(offer(EAST, "L4:4", 1.0), offer(EAST, "L40S:1", 1.0), most=4)
    some = libraries(fleet, catalog(), until=until, single=True)
    assert some.complete
    assert some.cut_short
    for name, library in libraries(fleet, catalog()).roles.items():
        assert np.array_equal(some.roles[name].tables.rates, library.tables.rates)
        assert some.roles[name].max_nodes == 1
    assert not libraries(fleet, catalog(), until=lambda: True).complete


def test_what_no_single_node_can_serve_has_templates_of_several_whatever_the_time() -> None:
    large = asked(offer(EAST, "L40S:2", 1.0), most=4, model="llama-3-70b", ttft_s=60.0, tpot_s=0.5)
    cut = libraries(large, catalog(), until=lambda: True)
    assert cut.complete
    for library in cut.roles.values():
        sizes = library.counts.sum(axis=1)
        assert library.max_nodes == 3
        assert set(sizes.tolist()) <= {2, 3}
    assert any(len(library) for library in cut.roles.values())


def test_roles_that_are_asked_the_same_share_their_templates() -> None:
    fleet = problem(
        offers=(offer(EAST, "L4:2", 1.0),),
        services=(
            service("a", phases="together"),
            service("b", phases="together", rate_per_s=9.0, priority=3.0, headroom=2.0),
            service("c", phases="together", tpot_s=0.04),
            service("d", phases="together", avoid=("L4:1",)),
        ),
        settings=Settings(max_nodes_per_instance=3),
    )
    for until in (None, lambda: False, lambda: True):
        roles = libraries(fleet, catalog(), until=until).roles
        a, b, c, d = (roles[f"{name}/llm/both"] for name in "abcd")
        assert a is b
        assert not np.array_equal(a.tables.rates, c.tables.rates)
        assert not np.array_equal(a.tables.rates, d.tables.rates)


def test_progress_ends_for_every_role() -> None:
    fleet = asked(offer(EAST, "L4:2", 1.0), most=3)
    seen: dict[str, list[float]] = {}
    libraries(
        fleet,
        catalog(),
        progress=lambda role, done, total: seen.setdefault(role, []).append(done / total),
        until=lambda: False,
    )
    assert set(seen) == {str(role) for role in fleet.roles}
    for shares in seen.values():
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_the_key_of_templates_covers_how_machines_are_cut() -> None:
    keys = {
        template_key(asked(offer(EAST, "L4:4", 1.0))),
        template_key(asked(offer(EAST, "L4:4", 1.0, whole=True))),
        template_key(asked(offer(WEST, "L4:4", 1.0))),
        template_key(asked(offer(EAST, "L4:4", 1.0), phases="apart")),
    }
    assert len(keys) == 4
    cheaper = asked(offer(EAST, "L4:4", 0.5, available=9))
    assert template_key(cheaper) in keys
