"""What handing KV cache over takes: by hand, against the memory model, and for any problem."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.catalog.overlay import apply_overlay
from atoll.core.ids import Phase
from atoll.engines.table import profile_engine
from atoll.perf.memory_model import MemoryModel
from atoll.perf.step import Position
from atoll.plan.capacities import POSITIONS, node_capacity, role_table
from atoll.plan.handover import (
    LINK_SHARE,
    NODE_SHARE,
    handover,
    hop_link,
    kv_bytes,
    kv_bytes_by_layers,
    transfer_s,
)
from atoll.plan.plan import Flow, Instance, Node
from atoll.plan.problem import Offer, Problem, Service
from atoll.solve.array_types import Floats
from tests.plan.builders import EAST, LAYERS, WEST, catalog, few, lengths, offer, problem, service

CHAT = service("chat", phases="apart")
TOKEN_LAYER = 2 * 8 * 128 * 2  # keys and values, 8 heads of 128 numbers of 2 bytes
KV = 512 * LAYERS * TOKEN_LAYER


def over(*offers: Offer, **changes: object) -> Problem:
    return problem(offers=offers, services=(service("chat", **{"phases": "apart"} | changes),))


def kv_bytes_per_unit(facts: Catalog, service: Service, phase: Phase) -> Floats:
    """Return the KV bytes that a node with j layers moves per unit of flow, j = 0..layers.

    Prefill sends the KV of every prompt token; decode receives that of input_mean / output_mean prompt tokens
    for each token it generates; nothing moves where both phases run together.
    """
    spec, lengths = facts.model(service.model).llm, service.lengths
    if phase is Phase.BOTH:
        return np.zeros(spec.layers + 1)
    per_request = lengths.input_mean if phase is Phase.PREFILL else lengths.output_mean
    return kv_bytes_by_layers(spec, lengths.input_mean) / per_request


def test_bytes_by_hand() -> None:
    spec = catalog().model("llama-3.1-8b").llm
    assert kv_bytes(spec, 0, LAYERS, 512) == KV
    assert kv_bytes(spec, 3, 5, 512) == KV / 16
    np.testing.assert_array_equal(
        kv_bytes_by_layers(spec, 512), 512 * TOKEN_LAYER * np.arange(LAYERS + 1)
    )
    per_prompt = kv_bytes_per_unit(catalog(), CHAT, Phase.PREFILL)[LAYERS]
    per_answer = kv_bytes_per_unit(catalog(), CHAT, Phase.DECODE)[LAYERS]
    assert per_prompt == LAYERS * TOKEN_LAYER
    assert per_answer == 4 * per_prompt  # prompts of 512, answers of 128
    assert not kv_bytes_per_unit(catalog(), CHAT, Phase.BOTH).any()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b"])
@given(tokens=st.floats(1.0, 30_000.0), data=st.data())
def test_bytes_are_those_of_the_memory_model(name: str, tokens: float, data: st.DataObject) -> None:
    """Layers with a window too; j layers are bounded by the j that keep most."""
    spec = catalog().model(name).llm
    start = data.draw(st.integers(0, spec.layers - 1))
    end = data.draw(st.integers(start + 1, spec.layers))
    memory = MemoryModel.of(spec, catalog().node("H100:1"), tp=1, engine=profile_engine("vllm"))
    exact = kv_bytes(spec, start, end, tokens)
    assert exact == pytest.approx(memory.kv_bytes_per_sequence(start, end, tokens))
    bound = kv_bytes_by_layers(spec, tokens)
    assert exact <= bound[end - start] * (1 + 1e-12)
    assert bound[spec.layers] == pytest.approx(kv_bytes(spec, 0, spec.layers, tokens))
    assert (np.diff(bound) >= 0).all()


def test_the_allowance_by_hand() -> None:
    asked = over(offer(EAST, "L40S:1", 1.0), offer(EAST, "H100:1", 3.0))
    found = handover(asked, catalog(), asked.services[0])
    assert found is not None
    slow = hop_link(catalog(), "L40S:1", EAST)
    assert slow.bandwidth_bytes_per_s < hop_link(catalog(), "H100:1", EAST).bandwidth_bytes_per_s
    assert found.seconds == pytest.approx(slow.time_s(KV))
    assert found.latency_s == slow.latency_s
    assert found.moving_s == pytest.approx(KV / slow.bandwidth_bytes_per_s)
    assert found.bytes_per_request == KV
    assert found.pairs == frozenset()
    assert found.reaches(EAST, EAST)
    assert not found.reaches(EAST, WEST)


def test_a_slice_sets_the_allowance_with_its_share() -> None:
    asked = over(offer(EAST, "L4:8", 1.0))
    whole = over(offer(EAST, "L4:8", 1.0, whole=True))
    cut, uncut = (handover(p, catalog(), p.services[0]) for p in (asked, whole))
    assert cut is not None
    assert uncut is not None
    assert cut.moving_s == pytest.approx(8 * uncut.moving_s)


def test_what_a_kind_cannot_hold_it_need_not_move() -> None:
    asked = over(offer(EAST, "L4:1", 1.0), model="llama-3-70b", ttft_s=8.0)
    found = handover(asked, catalog(), asked.services[0])
    assert found is not None
    nic = hop_link(catalog(), "L4:1", EAST)
    everything = nic.time_s(found.bytes_per_request)
    assert nic.latency_s < found.seconds < 0.3 * everything


def test_kinds_too_slow_for_the_promise_do_not_set_it_and_carry_little() -> None:
    asked = over(offer(EAST, "L40S:2", 1.0), offer(EAST, "H100:1", 3.0), ttft_s=0.1)
    chat = asked.services[0]
    found = handover(asked, catalog(), chat)
    slow, fast = (hop_link(catalog(), kind, EAST) for kind in ("L40S:2", "H100:1"))
    assert found is not None
    assert slow.time_s(KV) > NODE_SHARE * 0.1 > fast.time_s(KV) == pytest.approx(found.seconds)
    for phase in ("prefill", "decode"):
        table = role_table(asked, catalog(), chat, f"chat/llm/{phase}", "L40S:2", 3)
        share = KV / LAYERS / slow.bandwidth_bytes_per_s
        most = int(found.moving_s / share)
        assert 0 < most < LAYERS
        assert not table[:, :, most + 1 :].any()
        assert table[1, 1:, 1].all()


def test_the_fastest_kind_where_none_is_fast_enough() -> None:
    asked = over(offer(EAST, "L40S:1", 1.0), offer(EAST, "L40S:2", 1.0, whole=True), ttft_s=0.1)
    found = handover(asked, catalog(), asked.services[0])
    assert found is not None
    fast = hop_link(catalog(), "L40S:2", EAST)
    assert fast.time_s(KV) < hop_link(catalog(), "L40S:1", EAST).time_s(KV)
    assert found.seconds == pytest.approx(fast.time_s(KV))
    assert found.seconds > NODE_SHARE * 0.1
    # Where even that takes all of the promise, nothing can be handed over.
    hasty = over(offer(EAST, "L40S:1", 1.0), ttft_s=0.02)
    for phase in ("prefill", "decode"):
        role = f"chat/llm/{phase}"
        rate = node_capacity(
            hasty, catalog(), hasty.services[0], role, "L40S:1", LAYERS, 1, Position.WHOLE
        )
        assert (rate == 0.0) == (phase == "prefill")


def test_together_nothing_is_handed_over() -> None:
    asked = over(offer(EAST, "L40S:1", 1.0), phases="together")
    assert handover(asked, catalog(), asked.services[0]) is None


def linked(bandwidth: str, latency: str = "10ms") -> Catalog:
    link = {"between": [EAST, WEST], "bandwidth": bandwidth, "latency": latency}
    return apply_overlay(catalog(), {"links": {"regions": [link]}})


def test_regions_with_a_fast_link_may_hand_over_and_the_allowance_covers_it() -> None:
    asked = over(offer(EAST, "H100:1", 1.0), offer(WEST, "H100:1", 1.0))
    chat = asked.services[0]
    thin, wide = linked("1Gbit/s"), linked("10Gbit/s")
    apart, joined = handover(asked, thin, chat), handover(asked, wide, chat)
    assert apart is not None
    assert joined is not None
    assert apart.pairs == frozenset()
    assert joined.pairs == {(EAST, WEST), (WEST, EAST)}
    link = wide.links.between(EAST, WEST)
    assert joined.seconds == pytest.approx(link.time_s(KV))
    assert apart.seconds < joined.seconds <= LINK_SHARE * 1.5


# Instances that hand over.


def instance(name: str, region: str, *nodes: Node) -> Instance:
    flows = (Flow(src="source", dst=nodes[0].id, per_s=1.0),)
    return Instance(
        id=name,
        service="chat",
        role=f"chat/llm/{name.partition('-')[0]}",
        region=region,
        stages=1,
        nodes=nodes,
        flows=flows,
        throughput_per_s=1.0,
        usd_per_hour=1.0,
    )


def node(name: str, node_type: str, start: int, end: int, gpus: int | None = None) -> Node:
    cut = {} if gpus is None else {"gpu_ids": tuple(range(gpus)), "slot": 0}
    return Node.model_validate(
        {
            "id": name,
            "node_type": node_type,
            "market": "on-demand",
            "start": start,
            "end": end,
            "tp": 1,
        }
        | cut
    )


def test_the_slowest_node_of_either_side_decides() -> None:
    one = instance("prefill-0", EAST, node("n0", "H100:1", 0, LAYERS))
    two = instance("decode-0", EAST, node("n0", "H100:1", 0, 24), node("n1", "L4:8", 24, LAYERS, 1))
    link = hop_link(catalog(), "L4:8", EAST, 1)
    fast = hop_link(catalog(), "H100:1", EAST)
    assert transfer_s(catalog(), CHAT, one, two) == pytest.approx(link.time_s(KV / 4))
    assert transfer_s(catalog(), CHAT, one, one) == pytest.approx(fast.time_s(KV))
    twice = transfer_s(catalog(), CHAT, one, one, tokens=1024)
    assert twice == pytest.approx(fast.time_s(2 * KV))


def test_across_regions_everything_passes_the_link() -> None:
    wide = linked("1Gbit/s")
    one = instance("prefill-0", EAST, node("n0", "H100:1", 0, LAYERS))
    two = instance("decode-0", WEST, node("n0", "H100:1", 0, LAYERS))
    assert transfer_s(wide, CHAT, one, two) == pytest.approx(
        wide.links.between(EAST, WEST).time_s(KV)
    )


# Whatever is offered.

KINDS = ("L4:1", "L4:8", "T4:4", "L40S:2", "A100-80:8", "H100:1", "H100:8")


@cache
def near() -> Catalog:
    return linked("25Gbit/s", "2ms")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    keys = draw(
        st.sets(
            st.tuples(st.sampled_from((EAST, WEST)), st.sampled_from(KINDS)), min_size=1, max_size=5
        )
    )
    offers = [offer(region, kind, 1.0, whole=draw(st.booleans())) for region, kind in sorted(keys)]
    return over(
        *offers,
        ttft_s=draw(st.floats(0.2, 20.0)),
        model=draw(st.sampled_from(("llama-3.1-8b", "gpt-oss-20b", "llama-3-70b"))),
        lengths=lengths(draw(st.floats(10.0, 8000.0)), 100.0),
        phases=draw(st.sampled_from(("apart", "auto"))),
    )


@few
@given(problems(), st.data())
def test_what_stands_hands_over_in_time(asked: Problem, data: st.DataObject) -> None:
    """Any node that carries something moves its KV within the allowance, at the rate it carries."""
    facts, chat = near(), asked.services[0]
    found = handover(asked, facts, chat)
    assert found is not None
    assert handover(asked, facts, chat) is found
    assert 0 <= found.latency_s <= found.seconds
    spec = facts.model(chat.model).llm
    chosen = data.draw(st.sampled_from(asked.offers))
    gpus = data.draw(st.sampled_from(chosen.sizes))
    kind = chosen.kinds[chosen.sizes.index(gpus)]
    phase = data.draw(st.sampled_from((Phase.PREFILL, Phase.DECODE)))
    stages = data.draw(st.integers(1, 3))
    table = role_table(
        asked, facts, chat, f"chat/llm/{phase}", kind, 3,
        region=chosen.region, machine=chosen.node_type,
    )  # fmt: skip
    assert (np.diff(table[:, :, 1:], axis=2) <= 0).all()
    nic = hop_link(facts, chosen.node_type, chosen.region, gpus)
    rates = table[POSITIONS.index(Position.WHOLE if stages == 1 else Position.MIDDLE), stages - 1]
    per_unit = kv_bytes_per_unit(facts, chat, phase)
    for layers in np.flatnonzero(rates > 0):
        for start in (0, spec.layers - layers):
            moved = kv_bytes(spec, int(start), int(start + layers), chat.lengths.input_mean)
            assert nic.latency_s + moved / nic.bandwidth_bytes_per_s <= found.seconds * (1 + 1e-6)
            for pair in found.pairs:
                link = facts.links.between(*pair)
                took = link.latency_s + moved / nic.bandwidth_bytes_per_s
                assert took <= found.seconds * (1 + 1e-6)
                assert link.time_s(found.bytes_per_request) <= found.seconds * (1 + 1e-6)
                assert link.time_s(found.bytes_per_request) <= LINK_SHARE * chat.ttft_s
        sent = rates[layers] * (per_unit[layers] + (stages > 1) * 2 * spec.hidden)
        assert sent <= nic.bandwidth_bytes_per_s * (1 + 1e-9)


@pytest.mark.parametrize("region", ["aws/us-east-2", "gcp/us-central1"])
@pytest.mark.parametrize("gpu", ["H100", "A100-80", "L40S", "L4"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_more_gpus_never_carry_less_for_want_of_an_interface(
    region: str, gpu: str, phase: str
) -> None:
    kinds = [f"{gpu}:{size}" for size in (1, 2, 4, 8)]
    asked = over(*(offer(region, kind, 1.0) for kind in kinds))
    carried = [
        node_capacity(
            asked, catalog(), asked.services[0], f"chat/llm/{phase}", kind, LAYERS, 1,
            Position.WHOLE, region=region,
        )
        for kind in kinds
    ]  # fmt: skip
    assert carried[0] > 0.0
    assert carried == sorted(carried)
