"""What several gateways say, put together, and what happens when they do not answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.control_view import PaceSeen
from atoll.control.operation.control_loop import Gateways
from atoll.control.operation.gateways import (
    GatewayAddress,
    GatewayGroup,
    GatewayReply,
    PooledWindow,
    names_of,
    pool_windows,
    split_rate,
)
from atoll.control.operation.rhythm import RateHistory
from atoll.core.errors import AtollError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.runtime.pool.routes import RoutesTold
from atoll.telemetry.traffic_page import (
    GroupSums,
    InstanceEnd,
    InstancePace,
    ModelTraffic,
    TrafficPage,
    WindowSums,
)
from atoll.workload.lengths import LengthMix
from tests.cli.graphs import SMALL

NOW_S = 1_000_000.0


def service(name: str = "chat", model: str = "llama-3.1-8b", rate_per_s: float = 20.0) -> Service:
    return Service(
        name=name,
        model=model,
        ttft_s=1.0,
        tpot_s=0.06,
        rate_per_s=rate_per_s,
        lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
        phases="together",
        attainment=0.97,
    )


def problem(*services: Service) -> Problem:
    return Problem(
        name="small",
        services=services or (service(),),
        offers=(Offer(region="here", node_type="L40S:1", available=4, usd_per_hour=1.0),),
        settings=Settings(max_nodes_per_instance=1, engine="none"),
    )


def window(
    arrivals: int = 0,
    seconds: float = 3600.0,
    lengths: tuple[tuple[int, int], ...] = (),
    judged: int = 0,
    kept: int = 0,
) -> WindowSums:
    return WindowSums(
        seconds=seconds,
        arrivals=arrivals,
        measured=len(lengths),
        input_sum=sum(a for a, _ in lengths),
        input_square_sum=sum(a * a for a, _ in lengths),
        output_sum=sum(b for _, b in lengths),
        output_square_sum=sum(b * b for _, b in lengths),
        judged=judged,
        kept=kept,
    )


def page(
    models: dict[str, WindowSums],
    *,
    routes: str | None = None,
    ends: tuple[tuple[str, float], ...] = (),
) -> TrafficPage:
    return TrafficPage(
        routes=routes,
        models={
            name: ModelTraffic(minute=one, five_minutes=one, hour=one)
            for name, one in models.items()
        },
        ends=tuple(InstanceEnd(instance=name, ends_s=at_s) for name, at_s in ends),
    )


@dataclass
class Gates:
    """Gateways in memory, by URL; one without a page does not answer."""

    pages: dict[str, TrafficPage | str | None]
    told: dict[str, list[RoutesTold]] = field(default_factory=dict)
    refuses: set[str] = field(default_factory=set)

    async def ask(
        self, address: GatewayAddress, method: str, path: str, body: object
    ) -> GatewayReply:
        url = address.url
        known = self.pages[url]
        if known is None:
            raise AtollError(f"{url} did not answer")
        if method == "GET":
            assert path == "/atoll/v1/traffic"
            return GatewayReply(
                200, (known if isinstance(known, str) else known.to_json()).encode()
            )
        assert (method, path) == ("PUT", "/atoll/v1/routes")
        if url in self.refuses:
            return GatewayReply(401, b'{"error": "a valid\n admin token"}')
        routes = RoutesTold.from_json(json.dumps(body))
        self.told.setdefault(url, []).append(routes)
        assert isinstance(known, TrafficPage)
        self.pages[url] = known.model_copy(update={"routes": routes.content_hash()})
        return GatewayReply(200, b"{}")

    def group(
        self,
        asked: Problem | None = None,
        say: Callable[[str], None] | None = None,
        rhythm: RateHistory | None = None,
    ) -> GatewayGroup:
        addresses = [GatewayAddress(url) for url in self.pages]
        return GatewayGroup(asked or problem(), addresses, say=say, ask=self.ask, rhythm=rhythm)


counts = st.integers(0, 10**6)
windows = st.builds(
    PooledWindow,
    st.floats(0, 1e4),
    st.floats(10, 3610),
    counts,
    *([st.integers(0, 10**12).map(float)] * 4),
    counts,
    counts,
    st.dictionaries(st.sampled_from(["text+image", "text+audio"]), st.floats(0.0, 1e4)).map(
        lambda kinds: tuple(sorted(kinds.items()))
    ),
)


def close(one: PooledWindow, other: PooledWindow) -> bool:
    *sums, kinds = astuple(one)
    *others, kinds_there = astuple(other)
    same = dict(kinds) == pytest.approx(dict(kinds_there), rel=1e-9)
    return same and sums == pytest.approx(others, rel=1e-9)


@given(windows, windows, windows)
def test_pooling_is_commutative_and_associative(
    a: PooledWindow, b: PooledWindow, c: PooledWindow
) -> None:
    assert pool_windows(a, b) == pool_windows(b, a)
    assert close(pool_windows(pool_windows(a, b), c), pool_windows(a, pool_windows(b, c)))
    assert pool_windows(a, PooledWindow()) == a


lengths = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), min_size=30, max_size=60)


@given(lengths, lengths)
def test_moments_of_both_are_those_of_all_requests(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    both = pool_windows(
        PooledWindow.of(window(lengths=tuple(one))), PooledWindow.of(window(lengths=tuple(two)))
    ).lengths()
    assert both is not None
    every = [*one, *two]
    count = len(every)
    assert both.input_mean == pytest.approx(max(1.0, sum(a for a, _ in every) / count))
    assert both.output_mean_square == pytest.approx(
        max(both.output_mean**2, sum(b * b for _, b in every) / count)
    )


def test_report_of_two_gateways_under_two_names() -> None:
    long = ((1000, 10),) * 40
    gates = Gates(
        {
            "http://a": page(
                {
                    "chat": window(3600, lengths=long, judged=100, kept=90),
                    "llama-3.1-8b": window(1800, 1800.0),
                    "unknown": window(99),
                },
                ends=(("chat-1", 900.0), ("chat-2", 700.0)),
            ),
            "http://b": page(
                {"chat": window(7200, lengths=((2000, 30),) * 40, judged=300, kept=300)},
                ends=(("chat-1", 800.0),),
            ),
        }
    )
    report = gates.group().look(NOW_S)
    (seen,) = report.traffic
    assert seen.service == "chat"
    assert seen.minute.rate_per_s == pytest.approx(1.0 + 1.0 + 2.0)
    assert seen.hour.lengths is not None
    assert seen.hour.lengths.input_mean == pytest.approx(1500.0)
    assert seen.hour.lengths.output_mean_square == pytest.approx(500.0)
    (promise,) = report.promises
    assert (promise.service, promise.kept, promise.target) == ("chat", 0.975, 0.97)
    assert promise.requests == 400
    assert [(n.name, n.ends_s) for n in report.notices] == [("chat-1", 800.0), ("chat-2", 700.0)]


def test_groups_of_requests_are_told_and_pooled() -> None:
    lengths = Lengths.of(LengthMix.lognormal(800.0, 500.0, 200.0, 150.0))
    asked = service().model_copy(update={"length_deciles": True, "lengths": lengths})
    pages = []
    for judged, kept in ((100, 90), (300, 150)):
        one = page({"chat": window(3600, judged=1000, kept=990)})
        groups = {
            "length decile 10": GroupSums(judged=judged, kept=kept),
            "length decile 1": GroupSums(judged=0, kept=0),
            "of an earlier file": GroupSums(judged=10, kept=0),
        }
        traffic = one.models["chat"].model_copy(update={"groups": groups})
        pages.append(one.model_copy(update={"models": {"chat": traffic}}))
    gates = Gates({"http://a": pages[0], "http://b": pages[1]})
    group = gates.group(problem(asked))
    whole, tenth = group.look(NOW_S).promises
    assert (whole.kept, whole.group) == (0.99, None)
    assert (tenth.group, tenth.kept, tenth.requests) == ("length decile 10", 0.6, 400)
    assert tenth.target == asked.target
    assert tenth.is_broken
    promise = group.told().models["chat"].promise
    assert promise is not None
    assert [one.name for one in promise.groups] == [f"length decile {n}" for n in range(1, 11)]
    assert promise.groups[-1].up_to is None
    edges = [one.up_to or 0.0 for one in promise.groups[:-1]]
    assert edges == sorted(edges)
    assert edges[4] == pytest.approx(500.0)


def test_paces_of_an_instance_are_those_of_all_gateways() -> None:
    one = InstancePace(seconds=100.0, requests=50, tokens=900, sum_s=9.0)
    other = InstancePace(seconds=200.0, requests=100, tokens=100, sum_s=3.0)
    idle = InstancePace(seconds=200.0, requests=1, tokens=0, sum_s=0.0)
    pages = (
        page({}).model_copy(update={"paces": {"chat-0": one, "chat-1": idle}}),
        page({}).model_copy(update={"paces": {"chat-0": other}}),
    )
    gates = Gates({"http://a": pages[0], "http://b": pages[1]})
    assert gates.group().look(NOW_S).paces == (PaceSeen("chat-0", 0.012, 1_000, 1.0),)


def test_few_requests_say_nothing_about_lengths() -> None:
    gates = Gates({"http://a": page({"chat": window(29, lengths=((5, 5),) * 29)})})
    assert gates.group().look(NOW_S).traffic[0].hour.lengths is None
    impossible = PooledWindow(measured=30, input_sum=1e30, output_sum=30.0)
    assert impossible.lengths() is None


def test_one_that_does_not_answer_is_left_out_and_said_once() -> None:
    gates = Gates({"http://a": page({"chat": window(3600)}), "http://b": None, "http://c": "{}]"})
    said: list[str] = []
    group = gates.group(say=said.append)
    for _ in range(3):
        assert group.look(NOW_S).traffic[0].minute.rate_per_s == 1.0
    assert len(said) == 2
    assert all("\n" not in line for line in said)
    assert "http://b is left out" in said[0]
    gates.pages["http://b"] = page({"chat": window(7200)})
    assert group.look(NOW_S).traffic[0].minute.rate_per_s == 3.0
    assert said[2:] == ["gateway http://b answers again"]
    gates.pages["http://b"] = None
    group.look(NOW_S)
    assert len(said) == 4


def test_nobody_answers() -> None:
    gates = Gates({"http://a": None})
    group = gates.group()
    assert group.look(NOW_S).traffic == ()
    gates.pages["http://a"] = page(
        {"chat": window(3600, judged=5, kept=1)}, ends=(("chat-1", 800.0),)
    )
    seen = group.look(NOW_S)
    gates.pages["http://a"] = None
    # Silence is not nothing asked.
    held = group.look(NOW_S + 3000.0)
    assert (held.traffic, held.notices) == (seen.traffic, seen.notices)
    assert held.promises == ()
    assert group.look(NOW_S + 3700.0).traffic == ()


def test_bug_in_asking_does_not_stop_a_controller() -> None:
    async def broken(address: GatewayAddress, method: str, path: str, body: object) -> GatewayReply:
        raise RuntimeError("a bug")

    said: list[str] = []
    group = GatewayGroup(problem(), [GatewayAddress("http://a")], say=said.append, ask=broken)
    assert group.look(NOW_S).traffic == ()
    group.route([Route(service="chat", instances=("chat-1",), share=1.0)])
    assert len(said) == 2


def test_gateways_are_told_the_shares_of_pairs() -> None:
    group = Gates({"http://a": page({})}).group()
    group.route(
        [
            Route(service="chat", instances=("p-1", "d-1"), share=0.5),
            Route(service="chat", instances=("p-1", "d-2"), share=0.3),
            Route(service="chat", instances=("b-1",), share=0.2),
        ]
    )
    told = group.told()
    assert told.models["chat"].pairs == (("p-1", "d-1", 0.5), ("p-1", "d-2", 0.3))
    assert told.models["chat"].weights == {"b-1": 0.2, "d-1": 0.5, "d-2": 0.3, "p-1": 0.8}
    assert told.pair_shares("chat") == {("p-1", "d-1"): 0.5, ("p-1", "d-2"): 0.3}
    # Without pairs nothing is written that an older gateway would not read.
    group.route([Route(service="chat", instances=("b-1",), share=1.0)])
    assert "pairs" not in group.told().model_dump()["models"]["chat"]


def test_no_gateways() -> None:
    group: Gateways = GatewayGroup(problem(), [])
    assert group.look(NOW_S).traffic == ()
    group.route([])


def test_young_gateway_before_a_new_service_says_nothing_yet() -> None:
    gates = Gates({"http://a": page({"chat": window(0, 30.0)})})
    group = gates.group()
    assert group.look(NOW_S).traffic == ()
    # More than the file asks for is believed at once.
    gates.pages["http://a"] = page({"chat": window(900, 30.0)})
    assert group.look(NOW_S + 30.0).traffic[0].minute.rate_per_s == 30.0
    # And then the service is known: a gateway that starts again is believed.
    gates.pages["http://a"] = page({"chat": window(10, 10.0)})
    assert group.look(NOW_S + 60.0).traffic[0].minute.rate_per_s == 1.0
    gates = Gates({"http://a": page({}), "http://b": page({"chat": window(0, 900.0)})})
    assert gates.group().look(NOW_S).traffic[0].minute.rate_per_s == 0.0


def test_what_is_told() -> None:
    gates = Gates({"http://a": page({}), "http://b": page({})})
    group = gates.group()
    group.route(
        [
            Route(service="chat", instances=("p1", "d1"), share=0.25),
            Route(service="chat", instances=("p1", "d2"), share=0.5),
            Route(service="chat", instances=("both",), share=0.25),
        ]
    )
    (told,) = gates.told["http://a"]
    assert gates.told["http://b"] == [told]
    assert told.fleet == "small"
    assert set(told.models) == {"chat", "llama-3.1-8b"}
    routes = told.models["chat"]
    assert routes.weights == {"p1": 0.75, "d1": 0.25, "d2": 0.5, "both": 0.25}
    assert routes.promise is not None
    assert (routes.promise.ttft_s, routes.promise.target) == (1.0, 0.97)
    # What had a share has none now, until it has one again.
    group.route([Route(service="chat", instances=("both",), share=1.0)])
    assert gates.told["http://a"][-1].models["chat"].weights == {
        "both": 1.0,
        "d1": 0.0,
        "d2": 0.0,
        "p1": 0.0,
    }
    group.route([Route(service="chat", instances=(f"n{k}",), share=0.001) for k in range(500)])
    group.route([Route(service="chat", instances=("p1",), share=1.0)])
    weights = gates.told["http://a"][-1].models["chat"].weights
    assert weights["p1"] == 1.0
    assert len(weights) == 257


def test_those_that_were_not_told_are_told_at_the_next_look() -> None:
    gates = Gates({"http://a": page({}), "http://b": None})
    said: list[str] = []
    group = gates.group(say=said.append)
    group.look(NOW_S)
    assert gates.told == {}  # nothing to tell yet
    group.route([Route(service="chat", instances=("chat-1",), share=1.0)])
    assert len(gates.told["http://a"]) == 1
    gates.pages["http://b"] = page({})
    group.look(NOW_S)
    group.look(NOW_S)
    assert (len(gates.told["http://a"]), len(gates.told["http://b"])) == (1, 1)
    gates.pages["http://a"] = page({})  # it has started again
    group.look(NOW_S)
    assert len(gates.told["http://a"]) == 2
    gates.refuses.add("http://a")
    gates.pages["http://a"] = page({})
    group.look(NOW_S)
    group.look(NOW_S)
    assert len([line for line in said if "refused its routes" in line]) == 1
    # Another promise in the fleet file is news as well.
    gates.refuses.clear()
    group.problem = problem(service().model_copy(update={"ttft_s": 2.0}))
    group.look(NOW_S)
    promise = gates.told["http://b"][-1].models["chat"].promise
    assert promise is not None
    assert promise.ttft_s == 2.0


def test_names() -> None:
    two = (service("a"), service("b"))
    assert names_of(two) == {"a": ("a",), "b": ("b",)}
    assert names_of((service("a"), service("b", "llama-3-70b"))) == {
        "a": ("a", "llama-3.1-8b"),
        "b": ("b", "llama-3-70b"),
    }
    gates = Gates({"http://a": page({"org/big": window(3600), "x": window(7200)})})
    group = GatewayGroup(
        problem(), [GatewayAddress("http://a")], names={"chat": ("org/big", "x")}, ask=gates.ask
    )
    assert group.look(NOW_S).traffic[0].minute.rate_per_s == 3.0


def test_rhythm_reaches_the_report(tmp_path: Path) -> None:
    path = tmp_path / "rhythm.json"
    gates = Gates({"http://a": page({"chat": window(3600)})})
    group = gates.group(rhythm=RateHistory(path))
    for step in range(144):
        busy = 60 <= step % 144 < 100
        gates.pages["http://a"] = page({"chat": window(36_000 if busy else 3600)})
        group.look(step * 600.0 + 5.0)
    group.look(86_400.0)
    assert len(group.look(86_401.0).traffic[0].profile) == 144
    # A controller that starts again knows it at once.
    again = gates.group(rhythm=RateHistory(path)).look(86_400.0)
    profile = again.traffic[0].profile
    assert profile[80] == pytest.approx(10.0)
    assert profile[20] == pytest.approx(1.0)
    assert replace(again.traffic[0], profile=()).period_s == 86_400.0


def test_rhythm_that_cannot_be_kept_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    gates = Gates({"http://a": page({"chat": window(3600)})})
    group = gates.group(say=said.append, rhythm=RateHistory(tmp_path / "file" / "rhythm.json"))
    for step in range(4):
        assert group.look(step * 600.0).traffic[0].minute.rate_per_s == 1.0
    assert len(said) == 1
    assert "rhythm" in said[0]


def test_classes_are_told_apart_by_what_requests_bring() -> None:
    fleet = parse_fleet(SMALL)
    (look,) = fleet.services
    kinds = {"text+image": 2400, "text+image -> text+audio": 1}
    seen = window(3600).model_copy(update={"kinds": kinds})
    gates = Gates({url: page({"look": seen}) for url in ("http://a", "http://b")})
    (traffic,) = gates.group(fleet).look(NOW_S).traffic
    assert traffic.minute.rate_per_s == pytest.approx(2.0)
    rates = {one.service: one.hour.rate_per_s for one in traffic.classes}
    assert sum(rates.values()) == pytest.approx(2.0)
    assert rates["image+text"] == pytest.approx(2 * 2400 / 3600, abs=1e-3)
    # What no class has is as all are, and what cannot be read too.
    assert split_rate(look, 10.0, [("text -> image", 10.0)]) == pytest.approx(
        {"image+text": 6.0, "text": 4.0}
    )
    assert split_rate(look, 10.0, [("nonsense!", 10.0)])["text"] == pytest.approx(4.0)


def test_classes_that_bring_the_same_share_by_what_is_written() -> None:
    text = SMALL.replace("text: {share: 40%", "text (short): {share: 10%")
    more = "      text (long): {share: 30%, input: 3000, output: 100}\n      image+text"
    (look,) = parse_fleet(text.replace("      image+text", more)).services
    found = split_rate(look, 8.0, [("text+image", 4.0)])
    assert found == pytest.approx({"image+text": 4.0, "text (long)": 3.0, "text (short)": 1.0})
