"""What a gateway counts for a controller, under a clock of the test's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.traffic_tally import (
    EndedRequest,
    ModelTally,
    SumRing,
    TrafficTally,
    keeps_promise,
)
from atoll.runtime.pool.member import Backend, Facts
from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.pool.routes import LengthGroup, ModelPromise, ModelRoutes, RoutesTold

PROMISE = ModelPromise(ttft_s=1.0, tpot_s=0.1, target=0.95)
FINE = EndedRequest(200, "ok", True, 1.4, 0.5, 10)


class Aliases:
    """Other names of models."""

    def find_alias(self, name: str) -> str | None:
        return {"nick": "m", "old": "gone"}.get(name)


def tally_of(*models: str, now_s: float = 0.0) -> tuple[BackendPool, TrafficTally]:
    pool = BackendPool()
    for number, model in enumerate(models):
        pool.add(Backend(id=f"b{number}", url="http://127.0.0.1:1", models=(model,)))
    return pool, TrafficTally(pool, Aliases(), now_s)


def test_rates_over_the_three_windows() -> None:
    tally = ModelTally(0.0)
    for second in range(7200):
        tally.arrive(float(second))
        if second >= 7200 - 60:
            tally.arrive(float(second))
    read = tally.read(7200.0, 0.0)
    assert (read.minute.seconds, read.five_minutes.seconds, read.hour.seconds) == (60, 300, 3600)
    assert read.minute.arrivals == 120
    assert read.five_minutes.arrivals == 360
    assert read.hour.arrivals == 3660


def test_step_that_is_not_over_counts_with_its_time() -> None:
    tally = ModelTally(0.0)
    for second in range(1000):
        tally.arrive(second + 0.5)
    read = tally.read(1004.0, 0.0).minute
    # The whole steps from 940 on, and four seconds without a request.
    assert (read.seconds, read.arrivals) == (64.0, 60)


def test_arrivals_are_told_apart_by_what_they_bring_and_want() -> None:
    tally = ModelTally(0.0)
    for second in range(1200):
        tally.arrive(float(second), "text+image" if second % 4 == 0 else "")
    tally.refuse(1199.5, "text -> text+audio")
    read = tally.read(1200.0, 0.0)
    assert read.minute.kinds == {"text+image": 15, "text -> text+audio": 1}
    assert read.five_minutes.kinds == {"text+image": 75, "text -> text+audio": 1}
    assert read.hour.kinds["text+image"] == 300
    # What is over is forgotten, and older controllers see nothing new of a model of text.
    assert tally.read(8000.0, 0.0).hour.kinds == {}
    assert "kinds" not in tally.read(8000.0, 0.0).to_json()


def test_young_gateway_divides_by_what_it_saw() -> None:
    tally = ModelTally(1003.0)
    for _ in range(40):
        tally.arrive(1010.0)
    read = tally.read(1023.0, 1003.0)
    assert read.minute.seconds == read.hour.seconds == 20.0
    assert read.hour.arrivals == 40
    # The first moment is no rate.
    first = ModelTally(1003.0)
    first.arrive(1003.1)
    assert first.read(1003.2, 1003.0).minute.seconds == 10.0


def test_what_is_over_is_forgotten_and_gaps_are_empty() -> None:
    tally = ModelTally(0.0)
    for _ in range(5):
        tally.arrive(5.0)
    tally.arrive(1000.0)
    assert tally.read(1009.0, 0.0).hour.arrivals == 6
    assert tally.read(1009.0, 0.0).five_minutes.arrivals == 1
    assert tally.read(3605.0, 0.0).hour.arrivals == 6
    assert tally.read(3625.0, 0.0).hour.arrivals == 1
    tally.arrive(50_000.0)
    assert tally.read(50_001.0, 0.0).hour.arrivals == 1
    assert tally.read(90_000.0, 0.0).hour.arrivals == 0


@given(
    st.lists(st.tuples(st.floats(0, 5000), st.integers(0, 400), st.integers(0, 400)), max_size=60),
    st.floats(5000, 9000),
)
def test_windows_hold_what_came_since_their_beginning(
    events: list[tuple[float, int, int]], now_s: float
) -> None:
    tally = ModelTally(0.0)
    for at_s, read, written in sorted(events):
        tally.arrive(at_s)
        tally.measure(at_s, read, written)
    said = tally.read(now_s, 0.0)
    for window, steps in ((said.minute, 6), (said.five_minutes, 30), (said.hour, 360)):
        since_s = (now_s // 10.0 - steps) * 10.0
        assert window.seconds == pytest.approx(now_s - max(0.0, since_s))
        inside = [(r, w) for at_s, r, w in events if at_s >= since_s]
        assert window.arrivals == window.measured == len(inside)
        assert window.input_sum == sum(r for r, _ in inside)
        assert window.input_square_sum == sum(r * r for r, _ in inside)
        assert window.output_sum == sum(w for _, w in inside)
        assert window.output_square_sum == sum(w * w for _, w in inside)


class EventList:
    """The same windows by a list of all that ever happened."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, float, int]] = []

    def since(self, since_s: float, kind: str) -> list[tuple[float, int]]:
        return [(x, n) for at_s, k, x, n in self.events if k == kind and at_s >= since_s]


ONE_EVENT = st.tuples(
    st.floats(0, 90_000),
    st.sampled_from(["stream", "whole", "kept", "missed", "refused", "look"]),
    st.floats(0.001, 50),
    st.integers(0, 300),
)
DAY_S = 86_400.0


@given(st.lists(ONE_EVENT, max_size=80), st.floats(0, 200_000))
def test_day_and_times_are_those_of_a_list(
    events: list[tuple[float, str, float, int]], later_s: float
) -> None:
    tally, known = ModelTally(0.0), EventList()
    tally.promise = PROMISE
    for at_s, kind, seconds, tokens in sorted(events):
        if kind == "stream":
            tally.measure(at_s, 7, tokens, seconds, 2 * seconds)
        elif kind == "whole":
            tally.measure(at_s, 7, tokens)
        elif kind == "kept":
            tally.judge(at_s, FINE)
        elif kind == "missed":
            tally.judge(at_s, FINE._replace(first_s=5.0, seconds=6.0))
        elif kind == "refused":
            tally.refuse(at_s)
        else:
            # Whoever looks changes nothing.
            tally.day(at_s)
            tally.read(at_s, 0.0)
        known.events.append((at_s, kind, seconds, tokens))
    now_s = max((at_s for at_s, *_ in known.events), default=0.0) + later_s
    day_s = (now_s // 600.0 - 144) * 600.0
    kept = len(known.since(day_s, "kept"))
    missed = len(known.since(day_s, "missed")) + len(known.since(day_s, "refused"))
    assert tally.day(now_s) == (kept + missed, kept)
    assert now_s - 600.0 - DAY_S <= day_s <= now_s - DAY_S
    said = tally.read(now_s, 0.0)
    for window, steps in ((said.minute, 6), (said.five_minutes, 30), (said.hour, 360)):
        streams = known.since((now_s // 10.0 - steps) * 10.0, "stream")
        assert window.firsts == len(streams)
        assert window.first_sum_s == pytest.approx(sum(s for s, _ in streams))
        assert window.rest_tokens == sum(n - 1 for _, n in streams if n > 1)
        assert window.rest_sum_s == pytest.approx(sum(2 * s for s, n in streams if n > 1))


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 5)), max_size=30),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_ring_holds_its_last_steps(
    steps: int, added: list[tuple[int, int, int]], begin: int, length: int
) -> None:
    ring, rows = SumRing(steps, 2), dict[int, list[int]]()
    step = 0
    for gap, a, b in added:
        step += gap
        ring.add(step, (a, b))
        row = rows.setdefault(step, [0, 0])
        row[0], row[1] = row[0] + a, row[1] + b
    oldest = step - steps + 1
    inside = [row for at, row in rows.items() if max(begin, oldest) <= at < begin + length]
    assert ring.total(begin, begin + length) == [sum(r[k] for r in inside) for k in (0, 1)]


def test_watched_model_is_looked_at_without_counting() -> None:
    _, tally = tally_of("m")
    assert tally.look("m", 0.0) is None
    counted = tally.find("m", 0.0)
    assert counted is not None
    tally.promise(RoutesTold(models={"m": ModelRoutes(promise=PROMISE)}), 0.0)
    counted.judge(1.0, FINE)
    look = tally.look("m", 2.0)
    assert look is not None
    assert (look.judged_day, look.kept_day, look.promise) == (1, 1, PROMISE)
    assert look.traffic == counted.read(2.0, 0.0)


@pytest.mark.parametrize(
    ("ended", "kept"),
    [
        (FINE, True),
        (FINE._replace(first_s=1.1, seconds=1.9), False),
        (FINE._replace(seconds=1.5), False),  # 1.0 s for nine further tokens
        (FINE._replace(tokens=1, seconds=0.6), True),  # no further token, no time for one
        (FINE._replace(tokens=0, seconds=0.6), True),
        # No stream: its end has the time of all tokens.
        (EndedRequest(200, "ok", False, 1.9, 1.9, 10), True),
        (EndedRequest(200, "ok", False, 1.91, 1.91, 10), False),
        # Refused, failed, broken off.
        (EndedRequest(503, "error", True, 0.0, None), False),
        (EndedRequest(502, "error", True, 0.1, None), False),
        (EndedRequest(429, "error", True, 0.1, None), False),
        (EndedRequest(502, "truncated", True, 0.6, 0.5), False),
        # The client's own fault, or its own will.
        (EndedRequest(400, "error", True, 0.0, None), None),
        (EndedRequest(499, "cancelled", True, 0.9, None), None),
        (EndedRequest(499, "cancelled", True, 1.1, None), False),
        (EndedRequest(499, "cancelled", True, 1.0, 0.5, 5), True),
        (EndedRequest(499, "cancelled", True, 1.1, 0.5, 5), False),
        (EndedRequest(499, "cancelled", True, 1.5, 1.2, 5), False),
    ],
)
def test_who_keeps_a_promise(ended: EndedRequest, kept: bool | None) -> None:
    assert keeps_promise(PROMISE, ended) is kept


def test_share_that_kept_the_promise() -> None:
    tally = ModelTally(0.0)
    tally.judge(1.0, FINE)
    tally.refuse(1.0)
    assert tally.read(2.0, 0.0).minute.judged == 0  # nothing was promised yet
    tally.promise = PROMISE
    tally.judge(3.0, FINE)
    tally.judge(13.0, FINE._replace(first_s=2.0, seconds=3.0))
    tally.judge(13.0, FINE._replace(status=400, outcome="error"))
    tally.refuse(13.0)
    said = tally.read(14.0, 0.0).minute
    assert (said.judged, said.kept) == (3, 1)
    assert (said.arrivals, said.measured) == (2, 0)


def test_lengths_that_cannot_be_are_bounded() -> None:
    tally = ModelTally(0.0)
    tally.measure(0.0, 10**18, -5)
    said = tally.read(1.0, 0.0).minute
    assert (said.input_sum, said.output_sum) == (1e7, 0.0)


def test_only_known_names_are_counted() -> None:
    pool, tally = tally_of("m", "other")
    assert tally.find("made-up", 0.0) is None
    assert tally.find("old", 0.0) is None  # an alias of what nobody serves
    counted = tally.find("nick", 0.0)
    assert counted is not None
    assert counted is tally.find("m", 0.0)
    counted.arrive(1.0)
    assert list(tally.page(2.0).models) == ["m"]
    # What a controller told of is counted before anybody serves it, and after.
    tally.promise(RoutesTold(models={"told": ModelRoutes(promise=PROMISE)}), 2.0)
    told = tally.find("told", 3.0)
    assert told is not None
    assert told.promise == PROMISE
    pool.remove("b0")
    assert tally.find("m", 4.0) is counted
    assert set(tally.page(5.0).models) == {"m", "told"}


def test_promises_are_replaced() -> None:
    _, tally = tally_of("m")
    counted = tally.find("m", 0.0)
    assert counted is not None
    tally.promise(RoutesTold(models={"m": ModelRoutes(promise=PROMISE)}), 0.0)
    assert counted.promise == PROMISE
    tally.promise(RoutesTold(), 0.0)
    assert counted.promise is None


def test_memory_has_a_bound() -> None:
    pool, tally = tally_of()
    names = tuple(f"m{number}" for number in range(400))
    pool.add(Backend(id="0", url="http://127.0.0.1:1", models=names[:1]))
    pool.add(Backend(id="1", url="http://127.0.0.1:1", models=names[1:]))
    for name in names:
        tally.find(name, 0.0)
    assert len(tally.page(1.0).models) == 256
    assert tally.find("m399", 1.0) is None
    pool.remove("0")
    assert tally.find("m399", 2.0) is not None
    assert "m0" not in tally.page(3.0).models


def test_ends_are_said_of_instances() -> None:
    pool, tally = tally_of("m")

    def add(name: str, ends_s: float | None, **metadata: str) -> None:
        backend = Backend(id=name, url=f"fabric://{name}", models=("m",), metadata=metadata)
        pool.add(backend, Facts(ends_s=ends_s))

    add("s1", 500.0, instance="chat-1")
    add("s2", 400.0, instance="chat-1")
    add("s3", 300.0)  # belongs to no fleet
    add("s4", None, instance="chat-2")
    assert [(e.instance, e.ends_s) for e in tally.page(0.0).ends] == [("chat-1", 400.0)]


def test_paces_are_those_of_instances_within_five_minutes() -> None:
    pool, tally = tally_of()
    for name in ("s1", "s2"):
        named = {"instance": f"chat-{name}"}
        pool.add(Backend(id=name, url=f"fabric://{name}", models=("m",), metadata=named))
    tally.pace("chat-s1", 5.0, 99, 2.0)
    tally.pace("chat-s1", 25.0, 1, 3.0)
    tally.pace("chat-s2", 25.0)
    paces = tally.page(30.0).paces
    assert (paces["chat-s1"].requests, paces["chat-s1"].tokens) == (2, 100)
    assert (paces["chat-s1"].sum_s, paces["chat-s1"].seconds) == (5.0, 30.0)
    assert (paces["chat-s2"].requests, paces["chat-s2"].tokens) == (1, 0)
    # The first step is over five minutes old.
    assert tally.page(319.0).paces["chat-s1"].tokens == 1
    pool.remove("s1")
    assert set(tally.page(320.0).paces) == {"chat-s2"}
    assert "paces" not in tally.page(900.0).to_json()


def test_page_survives_json() -> None:
    pool, tally = tally_of("m")
    counted = tally.find("m", 0.0)
    assert counted is not None
    counted.arrive(0.0)
    page = tally.page(1.0)
    assert page.routes is None
    assert type(page).from_json(page.to_json()) == page
    routes = RoutesTold(models={"m": ModelRoutes(weights={"b0": 1.0})})
    pool.route(routes)
    assert tally.page(1.0).routes == routes.content_hash()
    # An earlier gateway does not say how long first tokens took.
    said = json.loads(page.to_json())
    for window in said["models"]["m"].values():
        for name in ("firsts", "first_sum_s", "rest_tokens", "rest_sum_s"):
            del window[name]
    assert type(page).from_json(json.dumps(said)) == page
    # A field of a later version is left out.
    later = page.to_json().replace('"ends":', '"later": 1, "ends":')
    assert type(page).from_json(later) == page


def test_promises_of_the_settings_count_where_a_controller_gives_none() -> None:
    pool, _ = tally_of("m", "n")
    stated = {name: ModelPromise(ttft_s=2.0, tpot_s=0.1, target=0.9) for name in ("m", "n", "x")}
    tally = TrafficTally(pool, Aliases(), 0.0, stated)
    look = tally.look("m", 1.0)
    assert look is not None
    assert look.promise == stated["m"]
    assert tally.look("x", 1.0) is None  # nobody serves it
    told = ModelPromise(ttft_s=1.0, tpot_s=0.05, target=0.95)
    routes = RoutesTold(models={"m": ModelRoutes(promise=told), "n": ModelRoutes()})
    pool.route(routes)
    tally.promise(routes, 2.0)
    looks = [tally.look(name, 3.0) for name in ("m", "n")]
    assert [look and look.promise for look in looks] == [told, stated["n"]]
    tally.state({})
    looks = [tally.look(name, 4.0) for name in ("m", "n")]
    assert [look and look.promise for look in looks] == [told, None]


GROUPS = (
    LengthGroup(name="short", up_to=1000.0, target=0.95),
    LengthGroup(name="long", up_to=None, target=0.8),
)


def test_groups_are_judged_by_the_length_of_prompts() -> None:
    tally = ModelTally(0.0)
    tally.promise = PROMISE.model_copy(update={"groups": GROUPS})
    late = FINE._replace(first_s=1.2)
    for second in range(400):
        tally.judge(float(second), FINE._replace(prompt_tokens=1000))
        tally.judge(float(second), late._replace(prompt_tokens=1001))
        # A backend that failed has not said how long the prompt was.
        tally.judge(float(second), EndedRequest(502, "error", True, 0.1, None))
    read = tally.read(400.0, 0.0)
    assert {name: (one.judged, one.kept) for name, one in read.groups.items()} == {
        "short": (300, 300),
        "long": (300, 0),
    }
    assert (read.five_minutes.judged, read.five_minutes.kept) == (900, 300)
    # In a step that has just begun nothing is lost, and what is old is.
    tally.judge(409.0, FINE._replace(prompt_tokens=1))
    assert tally.read(409.0, 0.0).groups["short"].judged == 301
    assert tally.read(800.0, 0.0).groups["short"].judged == 0


def test_groups_may_have_promises_of_their_own() -> None:
    tally = ModelTally(0.0)
    patient = GROUPS[1].model_copy(update={"ttft_s": 2.0})
    tally.promise = PROMISE.model_copy(update={"groups": (GROUPS[0], patient)})
    late = FINE._replace(first_s=1.2)
    for tokens in (1000, 1001):
        tally.judge(0.0, late._replace(prompt_tokens=tokens))
    read = tally.read(1.0, 0.0)
    assert {name: one.kept for name, one in read.groups.items()} == {"short": 0, "long": 1}
    assert read.five_minutes.kept == 1
    assert "ttft_s" not in json.loads(GROUPS[0].model_dump_json())


def test_other_groups_begin_anew() -> None:
    tally = ModelTally(0.0)
    tally.promise = PROMISE.model_copy(update={"groups": GROUPS})
    tally.judge(0.0, FINE._replace(prompt_tokens=5))
    tally.promise = PROMISE.model_copy(update={"groups": GROUPS, "target": 0.9})
    assert tally.read(1.0, 0.0).groups["short"].judged == 1
    tally.promise = PROMISE.model_copy(update={"groups": GROUPS[1:]})
    assert {name: one.judged for name, one in tally.read(1.0, 0.0).groups.items()} == {"long": 0}
    tally.promise = PROMISE
    assert tally.read(1.0, 0.0).groups == {}


def test_promises_without_groups_are_read_by_older_gateways() -> None:
    assert "groups" not in json.loads(PROMISE.model_dump_json())
    with_groups = PROMISE.model_copy(update={"groups": GROUPS})
    assert ModelPromise.model_validate_json(with_groups.model_dump_json()) == with_groups
