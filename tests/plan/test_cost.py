from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.cost import CostReport, cost_report, idle_by_region, price_again
from atoll.plan.validate.check import validate
from atoll.solve.assembly import NewInstance, infeasible
from tests.plan import boxes
from tests.plan.builders import CHOSEN, SERVICES, few, plan_of, problem, service, small

ASKED, MADE = small()
REPORT = cost_report(MADE, ASKED)


@few
@given(st.booleans(), st.data())
def test_every_breakdown_adds_up(cut: bool, data: st.DataObject) -> None:
    asked, choices = (boxes.problem(), boxes.CHOSEN) if cut else (ASKED, CHOSEN)
    offers = [offer.model_copy(update={"available": 12}) for offer in asked.offers]
    asked = asked.replace(offers=offers)
    chosen: list[NewInstance] = data.draw(st.lists(st.sampled_from(choices), max_size=6))
    made = plan_of(asked, *chosen)
    report = cost_report(made, asked)
    assert sum(idle_by_region(made, asked).values()) == pytest.approx(report.idle.usd_per_hour)
    by_service = [cost.usd_per_hour for cost in report.services]
    for cost in report.services:
        if cost.served > 0:
            shares = [phase.share for phase in cost.phases if phase.phase != "decode"]
            assert sum(shares) == pytest.approx(1.0)
    assert sum(by_service) + report.idle.usd_per_hour == pytest.approx(made.usd_per_hour)
    for parts in (report.regions, report.node_types, report.markets):
        assert sum(part.usd_per_hour for part in parts) == pytest.approx(made.usd_per_hour)
    for lines in (report.regions, report.node_types, report.markets):
        assert sum(line.nodes for line in lines) == made.nodes
        assert sum(line.gpus for line in lines) == made.gpus
        assert sum(line.share for line in lines) == pytest.approx(1.0 if made.usd_per_hour else 0.0)
    assert CostReport.from_json(report.to_json()) == report


def test_lines_by_hand() -> None:
    assert [(line.name, line.nodes) for line in REPORT.regions] == [
        ("aws/us-east-2", 4),
        ("lab", 3),
    ]
    assert REPORT.regions[0].usd_per_hour == pytest.approx(2 * 0.8 + 2 * 1.9)
    assert [(line.name, line.nodes) for line in REPORT.markets] == [("on-demand", 5), ("owned", 2)]
    assert REPORT.init_usd == pytest.approx(0.1 * REPORT.usd_per_hour)


def test_cost_of_tokens_by_hand() -> None:
    chat, mini = REPORT.services
    assert (chat.service, mini.service) == ("chat", "mini")
    assert chat.requests_per_s == 4.0
    assert chat.usd_per_million_tokens == pytest.approx(chat.usd_per_hour / (4 * 640 * 3600) * 1e6)
    assert chat.usd_per_thousand_requests == pytest.approx(chat.usd_per_hour / (4 * 3600) * 1e3)
    prefill, decode = chat.phases
    assert prefill.tokens_per_s == pytest.approx(4 * 512)
    assert decode.tokens_per_s == pytest.approx(4 * 128)
    supply = sum(i.throughput_per_s for i in MADE.of_role("chat/llm/decode"))
    assert decode.utilisation == pytest.approx(4 * 128 / supply)
    (both,) = mini.phases
    assert both.tokens_per_s == pytest.approx(2 * 640)
    assert both.utilisation == pytest.approx(2 / MADE.of_role("mini/llm/both")[0].throughput_per_s)


def test_headroom_is_not_sold() -> None:
    roomy = problem(services=(service("chat", headroom=1.5), SERVICES[1]))
    report = cost_report(plan_of(roomy, *CHOSEN), roomy)
    assert report.services[0].requests_per_s == pytest.approx(4.0)


def test_only_what_is_served_counts() -> None:
    busy = problem(services=(service("chat", rate_per_s=4000.0), SERVICES[1]))
    made = plan_of(busy, *CHOSEN)
    served = made.served_fraction["chat"]
    assert 0 < served < 1
    report = cost_report(made, busy)
    assert report.services[0].requests_per_s == pytest.approx(4000 * served)


def test_nothing_costs_nothing() -> None:
    report = cost_report(infeasible(ASKED, solver="s", reasons=()), ASKED)
    assert report.usd_per_hour == 0.0
    assert report.usd_per_million_tokens is None
    assert report.services[0].usd_per_million_tokens is None


def test_idle_gpus_of_a_cut_machine() -> None:
    asked, made = boxes.boxes()
    report = cost_report(made, asked)
    assert report.idle.usd_per_hour == pytest.approx(boxes.USD / 8)
    assert report.idle.gpus == made.idle_gpus == 1
    assert idle_by_region(made, asked) == {"aws/us-east-2": pytest.approx(boxes.USD / 8)}
    assert [(line.name, line.nodes, line.gpus) for line in report.node_types] == [
        ("L40S:8", 2, 15),
        ("L40S:1", 1, 1),
    ]
    (chat,) = report.services
    shares = {str(phase.phase): phase.share for phase in chat.phases}
    assert shares["prefill"] == shares["decode"] == pytest.approx(1 - shares["both"])
    for phase in chat.phases:
        assert phase.demand_per_s <= phase.capacity_per_s * (1 + 1e-9)


def test_a_plan_has_the_costs_of_other_prices() -> None:
    offers = [
        each.model_copy(update={"usd_per_hour": 3 * each.usd_per_hour}) for each in ASKED.offers
    ]
    dearer = ASKED.replace(offers=offers)
    made = price_again(MADE, dearer)
    assert made is not None
    assert not [found for found in validate(made, dearer) if found.rule == "cost"]
    assert made.usd_per_hour == pytest.approx(3 * MADE.usd_per_hour)
    assert made.init_usd == pytest.approx(3 * MADE.init_usd)
    assert made.bound is None
    used = min(MADE.count_nodes())
    rest = [each for each in offers if (each.region, each.node_type, each.market) != used]
    assert price_again(MADE, ASKED.replace(offers=rest)) is None
