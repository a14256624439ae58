from __future__ import annotations

import math

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.link_table import Link
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.capacity import RoleLoad
from atoll.perf.compare import MAX_STAGES, NodeChoice, Promise, compare
from atoll.perf.step import Position, analytic, step_seconds
from atoll.perf.step_curves import decode_steps, layer_steps, prefill_steps, throughput_by_layers
from atoll.workload.lengths import LengthMix
from tests.perf.builders import model, node_type
from tests.reference.capacity_tables import capacity_table

CATALOG = Catalog.default()
LLAMA = model("llama-3.1-8b")
LENGTHS = LengthMix.fixed(1024, 256)
PROMISE = Promise(ttft_s=1.5, tpot_s=0.1)
NAMES = ("L4:1", "A10G:1", "L40S:1", "H100:1", "T4:1")


def choices(*names: str, llm: str = "llama-3.1-8b", promise: Promise = PROMISE) -> list[NodeChoice]:
    nodes = [node_type(name) for name in names]
    return compare(model(llm), promise, LENGTHS, nodes, CATALOG)


def test_cheapest_request_first_and_every_node_once() -> None:
    found = choices(*NAMES)
    assert {choice.node for choice in found} == set(NAMES)
    prices = [math.inf if c.request_usd is None else c.request_usd for c in found]
    assert prices == sorted(prices)
    assert prices[0] < math.inf
    turned = choices(*NAMES[::-1])
    assert turned == found


def test_a_copy_is_the_best_equal_pipeline() -> None:
    (choice,) = choices("L40S:8")
    roles = [
        RoleLoad("prefill", LLAMA, Phase.PREFILL, PROMISE.ttft_s, LENGTHS),
        RoleLoad("decode", LLAMA, Phase.DECODE, PROMISE.tpot_s, LENGTHS),
    ]
    # Stages hand over through the interfaces of the nodes.
    link = CATALOG.links.between("", "", "L40S:8", "L40S:8")
    assert link != CATALOG.links.in_region
    tables = capacity_table(roles, [node_type("L40S:8")], MAX_STAGES, link=link)
    for name, copy in (("prefill", choice.prefill), ("decode", choice.decode)):
        assert copy is not None
        table = tables[name, "L40S:8"]
        rates = {s: table.at(math.ceil(32 / s), s) for s in range(1, MAX_STAGES + 1)}
        assert copy.tokens_per_s == rates[copy.nodes]
        assert copy.tokens_per_s / copy.nodes == max(rate / s for s, rate in rates.items())


def test_prices_by_hand() -> None:
    (choice,) = choices("L40S:1")
    assert choice.usd_per_hour is not None
    assert choice.prefill is not None
    assert choice.decode is not None
    hourly = choice.usd_per_hour
    usd = 0.0
    for copy, tokens in ((choice.prefill, 1024), (choice.decode, 256)):
        assert copy.usd_per_hour == pytest.approx(hourly * copy.nodes)
        per_token = hourly * copy.nodes / 3600 / copy.tokens_per_s
        assert copy.usd_per_million_tokens == pytest.approx(per_token * 1e6)
        usd += per_token * tokens
    assert choice.request_usd == pytest.approx(usd)


def test_the_best_split_is_shown() -> None:
    (choice,) = choices("L40S:8")
    (single,) = choices("L40S:1")
    assert choice.prefill is not None
    assert single.prefill is not None
    assert (choice.prefill.nodes, choice.prefill.tp) == (1, 1)
    assert choice.prefill.tokens_per_s == pytest.approx(8 * single.prefill.tokens_per_s)


def test_promises_nobody_keeps() -> None:
    (choice,) = choices("T4:1", llm="llama-3-70b", promise=Promise(1e-4, 1e-4))
    assert (choice.prefill, choice.decode, choice.request_usd) == (None, None, None)
    first, last = choices("T4:1", "H100:8", llm="llama-3-70b")
    assert (first.node, last.node) == ("H100:8", "T4:1")


def test_layers_to_draw() -> None:
    assert layer_steps(32, 100) == (32, 16, 8)
    assert layer_steps(80, 20) == (20, 10, 5)
    assert layer_steps(80, 0) == (1,)
    assert layer_steps(2, 2) == (2, 1)


def test_curves_are_the_step_model() -> None:
    own = analytic(LLAMA, node_type("L4:1"))
    prefill = prefill_steps(own, (32, 8), 4096)
    assert [curve.name for curve in prefill.curves] == ["32 layers", "8 layers"]
    for curve, layers in zip(prefill.curves, (32, 8), strict=True):
        assert (curve.x[0], curve.x[-1]) == pytest.approx((16.0, 4096.0))
        for x, y in zip(curve.x, curve.y, strict=True):
            assert y == pytest.approx(step_seconds(own, Batch.prefill(x), 0, layers) * 1e3)
    decode = decode_steps(own, (32,), 1000.0, 64)
    for x, y in zip(decode.curves[0].x, decode.curves[0].y, strict=True):
        assert y == pytest.approx(step_seconds(own, Batch.decode(x, 1000), 0, 32) * 1e3)


def test_throughput_is_drawn_where_there_is_any() -> None:
    own = analytic(LLAMA, node_type("L4:1"))
    load = RoleLoad("x", LLAMA, Phase.DECODE, 0.1, LENGTHS)
    link = Link(10e9 / 8, 0.5e-3)
    picture = throughput_by_layers(load, own, (1, 4), link)
    table = capacity_table([load], [node_type("L4:1")], 4, link=link)["x", "L4:1"]
    for curve, stages, position in zip(
        picture.curves, (1, 4), (Position.WHOLE, Position.MIDDLE), strict=True
    ):
        assert curve.x[0] == 1.0
        drawn = dict(zip(curve.x, curve.y, strict=True))
        for layers in range(1, 33):
            assert drawn.get(float(layers), 0.0) == table.at(layers, stages, position)
    assert [curve.name for curve in picture.curves] == ["1 stage", "4 stages"]
