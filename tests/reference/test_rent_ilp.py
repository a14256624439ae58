"""The reference itself: small problems whose optimum can be worked out by hand."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ids import Phase
from atoll.perf.step import Position
from atoll.plan.capacities import best_tp, node_capacity
from atoll.plan.plan import SINK, SOURCE, Flow, Instance, Market, Node
from atoll.plan.problem import Lengths, Limits, Offer, Phases, Problem, Service, Settings
from tests.reference.quiet import silence_output
from tests.reference.rent_ilp import RentReference, layouts, own_throughput
from tests.reference.rent_layouts import Floats, best_cut, rates_by_kind
from tests.seeds import examples

FAST_LINK = {
    "links": {"regions": [{"between": ["r/a", "r/b"], "bandwidth": "100Gbit/s", "latency": "1ms"}]}
}


def service(name: str = "chat", phases: Phases = "together", rate: float = 1.0) -> Service:
    return Service(
        name=name,
        model="llama-3.1-8b",
        ttft_s=2.0,
        tpot_s=0.1,
        rate_per_s=rate,
        lengths=Lengths(
            input_mean=512, output_mean=128, input_mean_square=512.0**2, output_mean_square=128.0**2
        ),
        phases=phases,
    )


def offer(
    node_type: str = "L40S:1",
    usd: float = 2.0,
    *,
    region: str = "r/a",
    market: Market = "on-demand",
    available: int = 8,
    whole: bool = False,
) -> Offer:
    return Offer(
        region=region,
        node_type=node_type,
        market=market,
        available=available,
        usd_per_hour=usd,
        whole=whole,
    )


def problem(*services: Service, offers: list[Offer], nodes: int = 1, **changes: object) -> Problem:
    made = Problem(
        name="small",
        services=services,
        offers=tuple(offers),
        settings=Settings(max_nodes_per_instance=nodes),
    )
    return made.replace(**changes)


def one_node(kind: str = "L40S:1", phase: Phase = Phase.BOTH) -> float:
    """Requests/s of one node that holds the whole model."""
    phases: Phases = "together" if phase is Phase.BOTH else "apart"
    asked = problem(service(phases=phases), offers=[offer(kind)])
    role = next(r for r in asked.roles if r.phase is phase)
    rate = node_capacity(
        asked, asked.catalog(), asked.services[0], role, kind, 32, 1, Position.WHOLE
    )
    return rate / asked.demand(role)


def reference(asked: Problem) -> RentReference:
    return RentReference(asked, asked.catalog())


def cost(asked: Problem) -> float | None:
    found = reference(asked).min_cost()
    assert found.proved
    return found.value


def with_rate(factor: float) -> Service:
    return service(rate=factor * one_node())


# Layouts


def plain_best(tables: dict[str, Floats], kinds: tuple[str, ...]) -> float:
    """The best layout of nodes taken one by one, every order of groups and every cut."""
    first = next(iter(tables.values()))
    stages, layers = first.shape[1], first.shape[2] - 1
    best = sum(float(tables[kind][3, 0, layers]) for kind in kinds)
    for number in range(2, min(stages, len(kinds), layers) + 1):
        for where in itertools.product(range(number), repeat=len(kinds)):
            if len(set(where)) < number:
                continue
            for cuts in itertools.combinations(range(1, layers), number - 1):
                edges = (0, *cuts, layers)
                carried = []
                for stage in range(number):
                    place = 0 if stage == 0 else 2 if stage == number - 1 else 1
                    held = edges[stage + 1] - edges[stage]
                    carried.append(
                        sum(
                            float(tables[kind][place, number - 1, held])
                            for kind, at in zip(kinds, where, strict=True)
                            if at == stage
                        )
                    )
                best = max(best, min(carried))
    return best


@examples(30)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from("ABC"), min_size=1, max_size=4))
def test_layouts_are_the_best_of_all(seed: int, kinds: list[str]) -> None:
    rng = np.random.default_rng(seed)
    # Any rates at all, nought among them: nothing is taken for granted.
    tables = {
        name: rng.integers(0, 50, (4, 4, 8)).astype(np.float64) * (rng.random((4, 4, 8)) < 0.8)
        for name in "ABC"
    }
    chosen = tuple(sorted(kinds))
    cut = best_cut(tables, chosen)
    assert cut.throughput == plain_best(tables, chosen)
    assert sorted(kind for stage in cut.stages for kind in stage) == list(chosen)
    assert cut.ends[-1] == 7
    assert all(a < b for a, b in itertools.pairwise((0, *cut.ends)))


def test_layouts_that_are_left_out_change_nothing() -> None:
    asked = problem(service(), offers=[offer("L4:1"), offer("T4:1")], nodes=3)
    role = asked.roles[0]
    useful = layouts(asked, asked.catalog(), role)
    tables = rates_by_kind(asked, asked.catalog(), role)
    for size in (1, 2, 3):
        for kinds in itertools.combinations_with_replacement(sorted(tables), size):
            best = best_cut(tables, kinds).throughput
            assert _carried_by(useful, kinds) >= best * (1 - 1e-12)


def _carried_by(useful: dict[tuple[str, ...], float], kinds: tuple[str, ...]) -> float:
    """What nodes carry as instances of the layouts that were kept, in the best division of them."""
    best = useful.get(kinds, 0.0)
    for size in range(1, len(kinds)):
        for part in itertools.combinations(range(len(kinds)), size):
            one = tuple(kinds[i] for i in part)
            rest = tuple(kinds[i] for i in range(len(kinds)) if i not in part)
            best = max(best, useful.get(one, 0.0) + _carried_by(useful, rest))
    return best


# Cost


@pytest.mark.parametrize(("factor", "machines"), [(0.3, 1), (1.0, 1), (2.5, 3), (7.99, 8)])
def test_as_many_machines_as_the_rate_takes(factor: float, machines: int) -> None:
    assert cost(problem(with_rate(factor), offers=[offer()])) == pytest.approx(2.0 * machines)


def test_all_that_can_be_served_where_machines_run_out() -> None:
    asked = problem(with_rate(4.0), offers=[offer(available=3)])
    found = reference(asked)
    assert found.min_cost().value is None
    assert found.most_common().value == pytest.approx(0.75)
    assert found.max_weighted().value == pytest.approx(0.75)
    assert found.min_cost({"chat": 0.5}).value == pytest.approx(4.0)


def test_the_cheaper_market_first() -> None:
    offers = [offer(available=8), offer(usd=0.5, market="spot", available=2)]
    assert cost(problem(with_rate(2.5), offers=offers)) == pytest.approx(2 * 0.5 + 2.0)


def test_spot_within_its_share() -> None:
    offers = [offer(available=8), offer(usd=0.5, market="spot", available=8)]
    half = problem(with_rate(3.5), offers=offers, limits=Limits(spot_share=0.5))
    assert cost(half) == pytest.approx(2 * 2.0 + 2 * 0.5)
    none = problem(with_rate(3.5), offers=offers, limits=Limits(spot_share=0.0))
    assert cost(none) == pytest.approx(8.0)


def test_budget_and_number_of_machines() -> None:
    tight = problem(with_rate(4.0), offers=[offer()], limits=Limits(budget_usd_per_hour=7.0))
    assert reference(tight).most_common().value == pytest.approx(0.75)
    few = problem(with_rate(4.0), offers=[offer()], limits=Limits(max_nodes=2))
    assert reference(few).most_common().value == pytest.approx(0.5)


def test_two_services_share_a_machine_that_is_cut() -> None:
    small = [service("one", rate=0.1), service("two", rate=0.1)]
    box = problem(*small, offers=[offer("A100-40:8", 20.0)])
    assert cost(box) == pytest.approx(20.0)
    whole = problem(*small, offers=[offer("A100-40:8", 20.0, whole=True)])
    assert cost(whole) == pytest.approx(40.0)


def test_slices_add_up_to_machines() -> None:
    # Nine slices of one GPU each need two machines of eight: no larger slice does better here.
    share = one_node("A100-40:1", Phase.BOTH)
    offers = [offer("A100-40:8", 20.0)]
    only = service(rate=8.5 * share).model_copy(update={"only": ("A100-40:1",)})
    assert cost(problem(only, offers=offers)) == pytest.approx(40.0)


# Phases


def test_phases_apart_need_both_in_one_region() -> None:
    asked = problem(
        service(phases="apart", rate=0.5),
        offers=[offer(available=1), offer(region="r/b", usd=3.0, available=1)],
    )
    assert reference(asked).most_common().value == pytest.approx(0.0)
    joined = asked.replace(overlays=(FAST_LINK,))
    assert cost(joined) == pytest.approx(5.0)


def test_auto_takes_whichever_is_cheaper() -> None:
    alone = problem(service(phases="auto", rate=0.5), offers=[offer()])
    assert cost(alone) == pytest.approx(2.0)
    apart = problem(service(phases="apart", rate=0.5), offers=[offer()])
    assert cost(apart) == pytest.approx(4.0)


def test_the_link_between_regions_carries_all_services() -> None:
    """Two services that each fill more than half of a link: only one may cross it."""
    catalog_free = problem(service(phases="apart"), offers=[offer()])
    spec = catalog_free.catalog().model("llama-3.1-8b").llm
    kv = 2.0 * spec.kv_heads * spec.head_dim * spec.kv_dtype.bytes_per_weight * spec.layers * 512
    rate = 1.0
    bandwidth = 1.5 * kv * rate
    asked = problem(
        service("one", "apart", rate),
        service("two", "apart", rate),
        offers=[offer(available=1), offer(region="r/b", available=3)],
        limits=Limits(),
        overlays=(
            {
                "links": {
                    "regions": [
                        {
                            "between": ["r/a", "r/b"],
                            "bandwidth": f"{bandwidth * 8:.0f}bit/s",
                            "latency": "1ms",
                        }
                    ]
                }
            },
        ),
    )
    slow = asked.services[0].model_copy(update={"ttft_s": 12.0})
    asked = asked.replace(services=(slow, slow.model_copy(update={"name": "two"})))
    # Four machines, four roles, one of them alone in its region: it has to cross, and may.
    assert cost(asked) == pytest.approx(8.0)
    busy = asked.replace(
        services=tuple(s.model_copy(update={"rate_per_s": 2.0}) for s in asked.services)
    )
    # Now the link carries three quarters of one service.
    assert reference(busy).most_common().value == pytest.approx(0.75, rel=1e-3)


def test_spread_puts_every_role_in_two_regions() -> None:
    offers = [offer(), offer(region="r/b", usd=3.0)]
    asked = problem(service(rate=0.1), offers=offers, limits=Limits(spread=2))
    assert cost(asked) == pytest.approx(5.0)
    lone = problem(service(rate=0.1), offers=[offer()], limits=Limits(spread=2))
    assert reference(lone).max_standing().value == pytest.approx(0.0)


def test_as_many_services_as_can_stand() -> None:
    names = ("one", "two", "three")
    asked = problem(*(service(n, rate=0.1) for n in names), offers=[offer(available=2)])
    found = reference(asked)
    assert found.most_common().value == pytest.approx(0.0)
    assert found.max_standing().value == pytest.approx(2.0)
    assert found.most_common(["one", "three"]).value == pytest.approx(1.0)


# What runs


def running(cut: int | None = None, market: Market = "on-demand", name: str = "old") -> Instance:
    """One L40S that holds the whole model, or two with the layers before and after a cut."""
    edges = [(0, 32)] if cut is None else [(0, cut), (cut, 32)]
    nodes = tuple(
        Node(id=f"n{i}", node_type="L40S:1", market=market, start=a, end=b, tp=1)
        for i, (a, b) in enumerate(edges)
    )
    way = [SOURCE, *(node.id for node in nodes), SINK]
    return Instance(
        id=name,
        service="chat",
        role="chat/llm/both",
        region="r/a",
        stages=len(nodes),
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=1.0) for a, b in itertools.pairwise(way)),
        throughput_per_s=1.0,
        usd_per_hour=2.0 * len(nodes),
    )


def test_what_runs_costs_no_initialisation() -> None:
    fresh = problem(
        with_rate(1.5),
        offers=[offer()],
        settings=Settings(init_penalty=0.5, max_nodes_per_instance=1),
    )
    assert cost(fresh) == pytest.approx(2 * 3.0)
    assert cost(fresh.replace(running=(running(),))) == pytest.approx(2.0 + 3.0)


def test_what_runs_gives_way_to_a_cheaper_market() -> None:
    offers = [offer(), offer(usd=0.5, market="spot")]
    asked = problem(with_rate(1.5), offers=offers, running=(running(), running(name="older")))
    assert cost(asked) == pytest.approx(1.0)
    dear = asked.replace(settings=Settings(init_penalty=4.0, max_nodes_per_instance=1))
    # Staying costs $2 each, starting a spot machine 0.5 * (1 + 4).
    assert cost(dear) == pytest.approx(4.0)


def test_what_runs_counts_with_its_own_layout() -> None:
    asked = problem(service(), offers=[offer()], nodes=2)
    even, skewed = (own_throughput(asked, asked.catalog(), running(cut)) for cut in (16, 26))
    assert 0.0 < skewed < even
    tight = asked.replace(
        services=(service(rate=skewed * 0.99),),
        offers=(offer(available=2),),
        settings=Settings(init_penalty=3.0, max_nodes_per_instance=1),
        running=(running(26),),
    )
    assert cost(tight) == pytest.approx(4.0)
    more = tight.replace(services=(service(rate=skewed * 1.01),))
    # It no longer carries the rate, and no machine is left beside it.
    fresh = cost(more.replace(running=()))
    assert fresh is not None
    assert fresh > 4.5
    assert cost(more) == fresh


def test_what_runs_on_machines_that_are_gone_does_not_count() -> None:
    asked = problem(service(rate=0.1), offers=[offer(usd=0.5, market="spot")], running=(running(),))
    assert cost(asked) == pytest.approx(0.5)


def test_every_kind_has_a_tensor_parallel_size() -> None:
    """Rates of a table are those of the best size that a plan can name."""
    asked = problem(service(), offers=[offer("L40S:4")])
    role, catalog = asked.roles[0], asked.catalog()
    args = (asked, catalog, asked.services[0], role, "L40S:4", 32, 1, Position.WHOLE)
    table = rates_by_kind(asked, catalog, role)["L40S:4"]
    assert table[3, 0, 32] == pytest.approx(node_capacity(*args, tp=best_tp(*args)))


def test_what_c_code_prints_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where C writes it out later than it prints it, as it does to files and pipes."""
    libc = ctypes.CDLL(None)
    with silence_output():
        libc.puts(b"stray")
    libc.puts(b"wanted")
    libc.fflush(None)
    assert capfd.readouterr().out == "wanted\n"
