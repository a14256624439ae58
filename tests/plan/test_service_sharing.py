"""Services of one model that share instances: rates and moments add up, promises are the tightest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.engines.limits import EngineLimits
from atoll.plan.choice import Choice, ModelMix, Variant
from atoll.plan.problem import Lengths, Service
from atoll.plan.service_sharing import (
    MAX_SHARERS,
    MAX_WAYS,
    merge_services,
    share_services,
    sharers_of,
)
from atoll.workload.lengths import LengthMix
from tests.plan.builders import problem, service
from tests.seeds import examples

bounded = examples(50)


@st.composite
def services(draw: st.DrawFn) -> list[Service]:
    found = []
    for number in range(draw(st.integers(2, 9))):
        prompt, answer = draw(st.floats(1, 9000)), draw(st.floats(1, 900))
        spread = draw(st.floats(1.0, 4.0))
        mix = LengthMix(
            prompt,
            answer,
            prompt * prompt * spread,
            answer * answer * spread,
            draw(st.sampled_from([0.0, 4000.0])),
        )
        found.append(
            service(
                f"s{number}",
                model=draw(st.sampled_from(["llama-3.1-8b", "llama-3.2-1b"])),
                rate_per_s=draw(st.floats(0, 50)),
                ttft_s=draw(st.floats(0.1, 5)),
                tpot_s=draw(st.floats(0.01, 0.2)),
                lengths=Lengths.of(mix),
                attainment=draw(st.sampled_from([0.9, 0.99])),
                headroom=draw(st.sampled_from([1.0, 1.3])),
                burstiness=draw(st.sampled_from([1.0, 3.0])),
                phases=draw(st.sampled_from(["apart", "apart", "together"])),
            )
        )
    return found


@bounded
@given(services())
def test_what_is_shared_adds_up(asked: list[Service]) -> None:
    shared = share_services(asked, [])
    by_name = {each.name: each for each in shared.services}
    before = {each.name: each for each in asked}
    assert sum(len(who) > 1 for who in shared.sharers.values()) == len(shared.sharers)
    for way, who in shared.sharers.items():
        merged, parts = by_name[way], [before[name] for name in who]
        assert len(parts) <= MAX_SHARERS
        assert {part.model for part in parts} == {merged.model}
        assert {part.phases for part in parts} == {merged.phases}
        assert merged.ttft_s == min(part.ttft_s for part in parts)
        assert merged.tpot_s == min(part.tpot_s for part in parts)
        assert merged.attainment == max(part.attainment for part in parts)
        assert merged.headroom == max(part.headroom for part in parts)
        assert merged.burstiness == max(part.burstiness for part in parts)
        assert merged.rate_per_s == pytest.approx(sum(part.rate_per_s for part in parts))
        if merged.rate_per_s > 1e-9:
            for moment in (
                "input_mean",
                "output_mean",
                "input_mean_square",
                "output_mean_square",
            ):
                total = sum(part.rate_per_s * getattr(part.lengths, moment) for part in parts)
                mine = merged.rate_per_s * getattr(merged.lengths, moment)
                assert mine == pytest.approx(total, rel=1e-9)
        # Whoever has least time by token for its prompts has as much of the tightest promise.
        by_token = min(
            part.ttft_s / max(part.lengths.input_tail, part.lengths.input_mean) for part in parts
        )
        assert merged.ttft_s / merged.lengths.input_tail == pytest.approx(by_token)
        asked_for = {
            f"text ({part.name})": part
            for part in parts
            if part.rate_per_s > 1e-7 * merged.rate_per_s
        }
        if len(asked_for) < 2:
            assert merged.text_classes == ()
            continue
        assert [klass.name for klass in merged.text_classes] == sorted(asked_for)
        for klass in merged.text_classes:
            part = asked_for[klass.name]
            assert klass.share * merged.rate_per_s == pytest.approx(part.rate_per_s)
            assert (klass.ttft_s, klass.tpot_s) == (part.ttft_s, part.tpot_s)
            assert klass.attainment == part.attainment
            assert klass.text_mix.has_moments_of(part.lengths.mix())
    for model in ("llama-3.1-8b", "llama-3.2-1b"):
        assert sum(by_name[way].model == model for way in shared.sharers) <= MAX_WAYS


@bounded
@given(services())
def test_every_service_keeps_a_way_of_its_own_and_the_problem_stands(asked: list[Service]) -> None:
    shared = share_services(asked, [])
    whole = problem(services=shared.services, choices=shared.choices)
    chosen = {choice.name for choice in whole.choices}
    for each in asked:
        if each.name not in chosen:
            assert whole.service(each.name) == each
            continue
        own = whole.service(f"{each.name}.own")
        assert own.model_copy(update={"name": each.name}) == each
    # Nobody shares: what was asked for is left.
    mixes = [ModelMix.of(choice, {f"{choice.name}.own": 1.0}) for choice in whole.choices]
    settled = whole.settled(mixes)
    rates = {s.name.removesuffix(".own"): s.rate_per_s for s in settled.services}
    assert rates == {each.name: each.rate_per_s for each in asked}


def test_a_model_of_a_choice_shares_with_a_service() -> None:
    small = service("chat.small", rate_per_s=6.0, ttft_s=2.0)
    large = service("chat.large", model="llama-3.2-1b", rate_per_s=6.0)
    draft = service("draft", rate_per_s=2.0, ttft_s=1.0)
    chat = Choice(
        name="chat",
        variants=(
            Variant(service="chat.small", model="llama-3.1-8b", error=0.06),
            Variant(service="chat.large", model="llama-3.2-1b", error=0.02),
        ),
        max_error=0.04,
    )
    shared = share_services([small, large, draft], [chat])
    by_name = {each.name: each for each in shared.services}
    assert set(by_name) == {"chat.small", "chat.large", "draft.own", "shared.llama-3.1-8b"}
    merged = by_name["shared.llama-3.1-8b"]
    assert (merged.rate_per_s, merged.ttft_s) == (8.0, 1.0)
    choices = {choice.name: choice for choice in shared.choices}
    ways = {v.service: v.error for v in choices["chat"].variants}
    assert ways == {"chat.small": 0.06, "chat.large": 0.02, "shared.llama-3.1-8b": 0.06}
    assert {v.service for v in choices["draft"].variants} == {"draft.own", "shared.llama-3.1-8b"}
    # At half of it, half of both.
    whole = problem(services=shared.services, choices=shared.choices)
    levels = {"shared.llama-3.1-8b": 0.5, "chat.large": 0.5, "draft.own": 0.5}
    settled = whole.settled([ModelMix.of(choice, levels) for choice in whole.choices])
    rates = {each.name: each.rate_per_s for each in settled.services}
    assert rates == {"shared.llama-3.1-8b": 4.0, "chat.large": 3.0, "draft.own": 1.0}
    used = sharers_of(
        {"chat": ["shared.llama-3.1-8b", "chat.large"], "draft": ["shared.llama-3.1-8b"]}
    )
    assert used == {"shared.llama-3.1-8b": ("chat", "draft")}


@pytest.mark.parametrize(
    "other",
    [
        {"only": ("L4",)},
        {"avoid": ("L4",)},
        {"phases": "together"},
        {"model": "llama-3.2-1b"},
        {"engine_limits": EngineLimits(max_num_seqs=64)},
    ],
)
def test_who_differs_does_not_share(other: dict[str, object]) -> None:
    asked = [service("a"), service("b", **other)]
    shared = share_services(asked, [])
    assert (shared.services, shared.choices) == (tuple(asked), ())


def test_neighbours_by_promise_share_first_where_there_are_many() -> None:
    asked = [service(f"s{n:02}", ttft_s=0.5 * 1.3**n) for n in range(12)]
    shared = share_services(asked, [])
    groups = list(shared.sharers.values())
    assert len(groups) == MAX_WAYS
    order = [each.name for each in asked]
    for who in groups:
        at = order.index(who[0])
        assert list(who) == order[at : at + len(who)]
    assert set(pairwise(order)) <= set(groups)


def test_alike_where_nothing_arrives() -> None:
    asked = [service("a", rate_per_s=0.0), service("b", rate_per_s=0.0)]
    asked[1] = asked[1].model_copy(update={"lengths": Lengths.of(LengthMix.fixed(1536.0, 128.0))})
    assert merge_services("ab", {s.name: s for s in asked}).lengths.input_mean == 1024.0


def test_long_names_are_cut_in_those_of_classes() -> None:
    asked = {name: service(name) for name in ("x" * 100 + "a", "x" * 100 + "b")}
    names = [klass.name for klass in merge_services("ab", asked).text_classes]
    assert len(set(names)) == 2
