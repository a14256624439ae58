from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import Phase
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings, slices_of
from atoll.workload.lengths import length_mix
from tests.plan.builders import OFFERS, SERVICES, lengths, offer, problem, service, small


def test_demand_counts_tokens_or_requests_with_headroom() -> None:
    own = service("chat", rate_per_s=3.0, headroom=1.5, lengths=lengths(100, 40))
    prefill, decode = own.roles
    assert (str(prefill), str(decode)) == ("chat/llm/prefill", "chat/llm/decode")
    assert own.demand(prefill) == pytest.approx(3 * 100 * 1.5)
    assert own.demand("chat/llm/decode") == pytest.approx(3 * 40 * 1.5)
    together = service("chat", rate_per_s=3.0, headroom=1.5, phases="together")
    (both,) = together.roles
    assert both.phase is Phase.BOTH
    assert together.demand(both) == pytest.approx(4.5)


def test_demand_of_a_role_the_service_does_not_have() -> None:
    with pytest.raises(UnknownNameError, match="chat/llm/decode"):
        service("chat").demand("chat/llm/both")


@pytest.mark.parametrize(
    ("only", "avoid", "allowed"),
    [
        ((), (), {"L4:1", "L4:2", "L40S:1"}),
        (("L4",), (), {"L4:1", "L4:2"}),
        (("L4:2", "L40S"), (), {"L4:2", "L40S:1"}),
        ((), ("L4",), {"L40S:1"}),
        (("L4",), ("L4:2",), {"L4:1"}),
    ],
)
def test_allows(only: tuple[str, ...], avoid: tuple[str, ...], allowed: set[str]) -> None:
    own = service(only=only, avoid=avoid)
    assert {kind for kind in ("L4:1", "L4:2", "L40S:1") if own.allows(kind)} == allowed


def test_lengths_are_those_of_the_mix() -> None:
    mix = length_mix("azure-conv")
    assert Lengths.of(mix).mix() == mix


@given(st.permutations(SERVICES), st.permutations(OFFERS))
def test_the_order_of_the_input_changes_nothing(
    services: list[Service], offers: list[Offer]
) -> None:
    shuffled = problem(services=services, offers=offers)
    assert shuffled == problem()
    assert shuffled.content_hash() == problem().content_hash()
    assert shuffled.to_json() == problem().to_json()


def test_pinned_names_are_kept_in_order_and_once() -> None:
    orders = itertools.permutations(("L4", "L40S:2", "T4"))
    assert len({service(only=order).content_hash() for order in orders}) == 1
    assert service(only=("L4", "L4")).only == ("L4",)


names = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
numbers = st.floats(0.001, 1e6)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    services = [
        service(
            name,
            ttft_s=draw(numbers),
            tpot_s=draw(numbers),
            rate_per_s=draw(numbers),
            phases=draw(st.sampled_from(("auto", "apart", "together"))),
            lengths=lengths(draw(st.floats(1, 1e5)), draw(st.floats(1, 1e5))),
        )
        for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))
    ]
    kinds = st.sampled_from(("L4:1", "L40S:2", "H100:8"))
    markets = st.sampled_from(("on-demand", "spot", "owned"))
    keys = draw(st.lists(st.tuples(names, kinds, markets), max_size=5, unique=True))
    offers = [
        offer(
            region,
            kind,
            draw(numbers),
            market=market,
            available=draw(st.integers(0, 99)),
            whole=draw(st.booleans()),
        )
        for region, kind, market in keys
    ]
    limits = Limits(
        budget_usd_per_hour=draw(st.none() | numbers), spot_share=draw(st.none() | st.floats(0, 1))
    )
    settings = Settings(
        seed=draw(st.integers(0, 9)), max_stages=draw(st.none() | st.integers(1, 6))
    )
    overlays = draw(st.sampled_from(((), ({"gpus": {"L4": {"memory": "23GB"}}},))))
    running = draw(st.sampled_from(((), small()[1].instances)))
    return problem(
        services=services,
        offers=offers,
        limits=limits,
        settings=settings,
        overlays=overlays,
        running=running,
    )


@given(problems())
def test_json_round_trip(asked: Problem) -> None:
    again = Problem.from_json(asked.to_json())
    assert again == asked
    assert again.content_hash() == asked.content_hash()


def test_the_hash_sees_every_part() -> None:
    asked, made = small()
    variants = [
        asked,
        asked.replace(limits=Limits(spread=2)),
        asked.replace(settings=Settings(seed=1)),
        asked.replace(running=made.instances),
        asked.replace(overlays=({"gpus": {"L4": {"memory": "23GB"}}},)),
        asked.replace(offers=OFFERS[1:]),
        asked.replace(offers=[o.model_copy(update={"whole": True}) for o in OFFERS]),
        asked.replace(services=SERVICES[:1]),
    ]
    assert len({variant.content_hash() for variant in variants}) == len(variants)


def test_catalog_has_the_overlays_in_order() -> None:
    overlays = ({"gpus": {"L4": {"memory": "23GB"}}}, {"gpus": {"L4": {"memory": "22GB"}}})
    assert problem(overlays=overlays).catalog().gpu("L4").memory_bytes == 22e9
    assert problem().catalog() == Catalog.default()


def test_phases_of_auto_are_all_three() -> None:
    own = service("chat", rate_per_s=3.0, headroom=1.5, lengths=lengths(100, 40), phases="auto")
    assert [role.phase for role in own.roles] == [Phase.PREFILL, Phase.DECODE, Phase.BOTH]
    assert [own.demand(role) for role in own.roles] == pytest.approx([450.0, 180.0, 4.5])
    assert own.demand_per_s == pytest.approx(4.5)
    assert Service.model_fields["phases"].default == "auto"


@given(st.integers(1, 1024))
def test_slices_divide_each_other_and_the_machine(gpus: int) -> None:
    sizes = slices_of(gpus)
    assert sizes[0] == 1 or gpus == 1
    assert sizes[-1] == gpus
    assert all(b % a == 0 for a, b in itertools.pairwise(sizes))
    assert all(size == gpus or size.bit_count() == 1 for size in sizes)


@pytest.mark.parametrize(
    ("node_type", "whole", "sizes"),
    [
        ("H100:8", False, (1, 2, 4, 8)),
        ("H100:8", True, (8,)),
        ("L4:6", False, (1, 2, 6)),
        ("L4:3", False, (1, 3)),
        ("L4:1", False, (1,)),
    ],
)
def test_what_a_machine_is_cut_into(node_type: str, whole: bool, sizes: tuple[int, ...]) -> None:
    own = offer("lab", node_type, 1.0, whole=whole)
    assert own.sizes == sizes
    gpu = node_type.partition(":")[0]
    assert own.kinds == tuple(f"{gpu}:{size}" for size in sizes)
    asked = problem(offers=(own, offer("lab", "T4:2", 1.0)))
    assert asked.kinds == tuple(sorted({*own.kinds, "T4:1", "T4:2"}))


def test_views() -> None:
    asked = problem()
    assert asked.regions == ("aws/us-east-2", "lab")
    assert asked.node_types == ("A10G:1", "L40S:1", "L4:1", "T4:1")
    assert asked.kinds_for("chat") == ("L40S:1", "L4:1", "T4:1")
    assert [str(role) for role in asked.roles] == [
        "chat/llm/prefill", "chat/llm/decode", "mini/llm/both",
    ]  # fmt: skip
    found = asked.offer("lab", "L40S:1", "owned")
    assert found is not None
    assert found.available == 2
    assert asked.offer("lab", "L40S:1", "spot") is None
    assert Settings(max_nodes_per_instance=4).stages == 4
    assert Settings(max_nodes_per_instance=4, max_stages=2).stages == 2


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("services", (service("a"), service("a")), "the service 'a' is given twice"),
        ("offers", (OFFERS[0], OFFERS[0]), "'aws/us-east-2 L4:1 on-demand' is given twice"),
        (
            "offers",
            ({"region": "a", "node_type": "L4", "available": 1, "usd_per_hour": 1},),
            "L4:1",
        ),
        ("services", (), "at least 1 needed"),
        ("name", "not a name", "is not a valid name"),
        ("colour", "red", "there is no such field"),
        ("limits", {"spot_share": 1.5}, "less than or equal to 1"),
    ],
)
def test_bad_problems_are_one_line(part: str, value: object, text: str) -> None:
    data = dict(problem()) | {part: value}
    with pytest.raises(InputError, match=text) as caught:
        Problem.parse(data, path="problem.json")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("problem.json: ")


def test_bad_lengths_say_which() -> None:
    data = lengths().model_dump() | {"input_mean_square": 1.0}
    with pytest.raises(InputError, match="input_mean_square"):
        Lengths.parse(data)


@pytest.mark.slow
def test_types_load_neither_numpy_nor_a_solver() -> None:
    code = (
        "import sys, atoll.plan\n"
        "from atoll.plan import Plan, Problem, PlanDiff\n"
        "heavy = ('numpy', 'numba', 'highspy', 'scipy', 'ortools')\n"
        "sys.exit(','.join(name for name in heavy if name in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_planner_loads_no_solver() -> None:
    code = (
        "import sys, atoll.plan.files.fleet_file, atoll.plan.validate.check, atoll.solve.assembly\n"
        "heavy = ('numba', 'highspy', 'scipy', 'ortools')\n"
        "sys.exit(','.join(name for name in heavy if name in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
