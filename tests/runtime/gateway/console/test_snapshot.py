"""What a snapshot says, under a clock of the test's."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.console.shown_machines import ShownMachine, ShownService
from atoll.runtime.gateway.console.snapshot import GatewaySnapshots, MachinePrices
from atoll.runtime.gateway.traffic_tally import EndedRequest
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.routes import ModelPromise, ModelRoutes, RoutesTold
from tests.runtime.gateway.console.viewing import Asked, Nodes, Stats, View, node, service

PROMISE = ModelPromise(ttft_s=1.0, tpot_s=0.1, target=0.95)
FINE = EndedRequest(200, "ok", True, 1.4, 0.5, 10)


def read(view: View, pages: GatewaySnapshots) -> dict[str, Any]:
    """The snapshot, made anew."""
    view.clock.now_s += 1.5
    page: dict[str, Any] = json.loads(pages.snapshot())
    return page


def promise(view: View, *models: str) -> None:
    routes = RoutesTold(models={model: ModelRoutes(promise=PROMISE) for model in models})
    view.pool.route(routes)
    view.traffic.promise(routes, view.clock.now_s)


def alarms(page: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {alarm["id"]: alarm for alarm in page["alarms"]}


def test_models_with_rates_times_and_promises() -> None:
    view = View()
    view.add("a", "m")
    view.add("b", "m", "quiet")
    promise(view, "m", "away")
    tally = view.traffic.find("m", view.clock.now_s)
    assert tally is not None
    for _ in range(40):
        tally.arrive(view.clock.now_s)
        tally.measure(view.clock.now_s, 100, 11, 0.4, 0.5)
        tally.judge(view.clock.now_s, FINE)
    tally.measure(view.clock.now_s, 100, 10)  # no stream: its first token is not known
    view.clock.now_s += 58.5
    view.relays = [Asked("m"), Asked("m"), Asked("quiet")]
    view.connections = [object()] * 7
    page = read(view, GatewaySnapshots(view))
    assert (page["status"], page["running"], page["connections"]) == ("serving", 3, 7)
    assert (page["backends"], page["backends_up"], page["usd_per_hour"]) == (2, 2, None)
    assert page["uptime_s"] == pytest.approx(time.time() - view.started_s, abs=60)
    shown = {model["name"]: model for model in page["models"]}
    assert list(shown) == ["m", "quiet", "away"]
    m = shown["m"]
    assert (m["backends"], m["up"], m["running"]) == (2, 2, 2)
    assert m["requests_per_s"] == pytest.approx(40 / 60, rel=1e-4)
    assert m["input_tokens_per_s"] == pytest.approx(4100 / 60, rel=1e-4)
    assert m["output_tokens_per_s"] == pytest.approx(450 / 60)
    assert (m["first_token_s"], m["token_s"]) == (0.4, 0.05)
    assert m["promise"] == {"ttft_s": 1.0, "tpot_s": 0.1, "target": 0.95}
    assert m["now"] == m["day"] == {"judged": 40, "kept": 40}
    assert shown["quiet"]["requests_per_s"] == 0.0
    assert shown["quiet"]["promise"] is None
    assert (shown["away"]["backends"], shown["away"]["up"]) == (0, 0)
    assert m["usd_per_mtoken"] is None


def test_money_of_machines_that_say_what_they_cost() -> None:
    fabric = Nodes([node("s-1", "gpu1", price_usd_per_hour=3.0, services=[service("m", [0, 4])])])
    view = View(federation=fabric)
    view.add("a", "m", metadata={"usd_per_hour": "6"})
    view.add("b", "m", metadata={"price": "free"})
    view.add("c", "other", metadata={"usd_per_hour": "-1"})
    tally = view.traffic.find("m", view.clock.now_s)
    assert tally is not None
    tally.measure(view.clock.now_s, 900_000, 100_000)
    view.clock.now_s += 1800.0 - 1.5
    page = read(view, GatewaySnapshots(view))
    assert page["usd_per_hour"] == 9.0
    prices = {model["name"]: model["usd_per_mtoken"] for model in page["models"]}
    # Half an hour at 9 dollars for a million tokens.
    assert prices == {"m": pytest.approx(4.5), "other": None}


@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(0, 100),
            st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True),
        ),
        max_size=8,
    ),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0, 1e9)),
)
def test_costs_of_models_sum_up_to_that_of_all(
    machines: list[tuple[float | None, list[str]]], tokens: dict[str, float]
) -> None:
    shown = tuple(
        ShownMachine(
            id=str(number),
            name="x",
            role="node",
            state="up",
            usd_per_hour=usd,
            services=tuple(map(ShownService, models)),
        )
        for number, (usd, models) in enumerate(machines)
    )
    prices = MachinePrices(shown)
    assert sum(prices.split(tokens).values()) == pytest.approx(prices.usd_per_hour or 0.0)
    if all(usd is None for usd, _ in machines):
        assert prices.usd_per_hour is None


def test_version_rises_with_models_and_machines_and_not_with_traffic() -> None:
    fabric = Nodes()
    view = View(federation=fabric)
    member = view.add("a", "m")
    pages = GatewaySnapshots(view)
    version = pages.check_version()
    assert pages.check_version() == version
    member.inflight += 1
    member.requests += 1
    assert pages.check_version() == version

    def rises() -> None:
        nonlocal version
        before, version = version, pages.check_version()
        assert version == before + 1
        assert pages.check_version() == version

    view.add("b", "m")
    rises()
    view.pool.set_health("b", up=False, reason="refused")
    rises()
    view.pool.drain("a")
    rises()
    member.inflight -= 1  # nothing runs there any more
    rises()
    view.pool.take_back("a")
    rises()
    view.pool.update(Backend(id="b", url="http://127.0.0.1:2", models=("m",)))
    rises()
    promise(view, "m")
    rises()
    fabric.changes += 1
    rises()
    # A gateway that was started anew goes on above.
    view.started_s += 100.0
    assert GatewaySnapshots(view).check_version() > version


def test_page_is_made_once_for_all_who_ask_at_once() -> None:
    view = View()
    view.add("a", "m")
    pages = GatewaySnapshots(view)
    assert pages.snapshot() is pages.snapshot()
    assert pages.machines() is pages.machines()
    assert pages.models() is pages.models()
    assert pages.made == 1
    old = pages.machines()
    view.pool.drain("a")
    assert pages.machines() != old  # what was changed is seen at once
    view.clock.now_s += 2.0
    pages.snapshot()
    assert pages.made == 2


def test_backends_that_are_down_ejected_or_drained() -> None:
    view = View()
    for name in ("up", "down", "bad/one", "out"):
        view.add(name, "m")
    view.pool.set_health("down", up=False, reason="connection refused")
    view.pool.drain("out")
    bad = view.pool.members["bad/one"]
    for _ in range(5):
        view.pool.note_failure(bad, view.clock.now_s, "status 500")
    pages = GatewaySnapshots(view)
    page = read(view, pages)
    assert (page["backends"], page["backends_up"]) == (4, 1)
    found = alarms(page)
    assert [a["level"] for a in page["alarms"]] == ["error", "warning", "info"]
    down = found["backend-down:down"]
    assert down["what"] == "backend down does not answer: connection refused"
    assert "DELETE /atoll/v1/backends/down" in down["fix"]
    assert down["since_s"] == pytest.approx(time.time(), abs=60)
    assert "status 500" in found["backend-ejected:bad/one"]["what"]
    assert "/atoll/v1/machines/out/drain" in found["machine-drained:out"]["fix"]
    assert alarms(read(view, pages)).keys() == found.keys()
    view.pool.set_health("down", up=True)
    assert "backend-down:down" not in alarms(read(view, pages))


def test_model_that_nobody_serves() -> None:
    view = View()
    view.add("a", "m")
    promise(view, "m", "away")
    pages = GatewaySnapshots(view)
    assert list(alarms(read(view, pages))) == ["model-unserved:away"]
    view.pool.drain("a")
    found = alarms(read(view, pages))
    assert found["model-unserved:m"]["fix"] == "take back the one that is drained"
    assert found["model-unserved:m"]["level"] == "error"


@pytest.mark.parametrize(
    ("judged", "kept", "level"),
    [(19, 0, None), (20, 19, None), (20, 18, "warning"), (40, 10, "error"), (100, 95, None)],
)
def test_promise_that_is_not_kept(judged: int, kept: int, level: str | None) -> None:
    view = View()
    view.add("a", "m")
    promise(view, "m")
    tally = view.traffic.find("m", view.clock.now_s)
    assert tally is not None
    for number in range(judged):
        late = FINE._replace(first_s=2.0, seconds=3.0)
        tally.judge(view.clock.now_s, FINE if number < kept else late)
    pages = GatewaySnapshots(view)
    found = alarms(read(view, pages))
    assert (found["promise:m"]["level"] if found else None) == level
    if level is None:
        return
    since_s = found["promise:m"]["since_s"]
    view.clock.now_s += 100.0
    assert alarms(read(view, pages))["promise:m"]["since_s"] == since_s
    view.clock.now_s += 300.0
    assert not alarms(read(view, pages))


def test_accounts_that_are_in_trouble() -> None:
    view = View(accounts=Stats({"journal_full": False, "database_up": True, "synced_s": 0.5}))
    view.add("a", "m")
    pages = GatewaySnapshots(view)
    assert not read(view, pages)["alarms"]
    assert view.accounts is not None
    view.accounts.figures |= {"journal_full": True, "database_up": False, "synced_s": 500.0}
    found = alarms(read(view, pages))
    assert list(found) == ["ledger-full", "database-away"]
    assert "refused" in found["ledger-full"]["what"]
    assert found["database-away"]["since_s"] == pytest.approx(time.time() - 500.0, abs=60)


def test_nodes_that_end_and_weights_that_stand_in() -> None:
    view = View()
    soon = view.add("a", "m", metadata={"stand_in": "tiny instead of large"})
    later = view.add("b", "m")
    soon.ends_s, later.ends_s = time.time() + 290.0, time.time() + 5000.0
    found = alarms(read(view, GatewaySnapshots(view)))
    assert list(found) == ["node-ends:a", "stand-in:m"]
    assert found["node-ends:a"]["what"] == "a ends in 5 min"
    assert "tiny instead of large" in found["stand-in:m"]["what"]
