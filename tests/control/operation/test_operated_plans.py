"""Which models answer while a fleet is operated: mixes are kept as long as they fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.control.operation.fleet_home import FleetRecord
from atoll.control.operation.gateways import GatewayAddress, GatewayGroup
from atoll.control.operation.operated import FleetSource
from atoll.control.operation.operated_plans import MixSettler
from atoll.control.operation.options import OperationOptions, make_record
from atoll.core.errors import InfeasibleError, UnknownNameError, UsageError
from atoll.deploy.target_table import TargetSettings
from atoll.plan.choice import Choice, ModelMix, Variant, fit_mixes
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.runtime.local.serving import choices_of, services_of
from tests.plan.builders import problem, service, small
from tests.plan.files.test_fleet_choices import CHOICE

CHAT = Choice(
    name="chat",
    variants=(
        Variant(service="chat.a", model="llama-3.1-8b", error=0.06),
        Variant(service="chat.b", model="llama-3.2-1b", error=0.02),
    ),
    max_error=0.04,
    min_share={"llama-3.2-1b": 0.1},
)
MIX = ModelMix.of(CHAT, {"chat.a": 0.5, "chat.b": 0.5}, 1.5)
ASKED = problem(
    services=(service("chat.a"), service("chat.b", model="llama-3.2-1b"), service("other")),
    choices=(CHAT,),
)


def planned(*mixes: ModelMix) -> Plan:
    return Plan(
        problem_hash="",
        problem_name="x",
        usd_per_hour=0.0,
        status="feasible",
        solver="x",
        mixes=mixes,
    )


class Planner:
    """Answers with a plan, and counts how often it was asked."""

    def __init__(self, *mixes: ModelMix) -> None:
        self.asked = 0
        self._plan = planned(*mixes)

    def __call__(self, asked: Problem) -> Plan:
        self.asked += 1
        return self._plan


def test_a_plan_is_made_once() -> None:
    planner = Planner(MIX)
    settler = MixSettler((), planner)
    settled = settler.settle(ASKED)
    assert not settled.choices
    assert {s.name: s.rate_per_s for s in settled.services} == {
        "chat.a": 2.0,
        "chat.b": 2.0,
        "other": 4.0,
    }
    assert settler.settle(ASKED) == settled
    busier = ASKED.replace(
        services=(*(s.model_copy(update={"rate_per_s": 8.0}) for s in ASKED.services),)
    )
    assert {s.rate_per_s for s in settler.settle(busier).services} == {4.0, 8.0}
    assert planner.asked == 1
    assert MixSettler((MIX,), planner).settle(ASKED) == settled
    assert planner.asked == 1
    plain = problem()
    assert settler.settle(plain) is plain
    assert settler.mixes == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_error": 0.03},
        {"min_share": {"llama-3.2-1b": 0.6}},
        {"name": "talk"},
        {"variants": CHAT.variants[:1], "max_error": None, "min_share": {}},
    ],
)
def test_what_does_not_fit_is_planned_anew(changes: dict[str, object]) -> None:
    choice = Choice.model_validate({**dict(CHAT), **changes})
    assert fit_mixes((CHAT,), (MIX,)) == (MIX,)
    assert fit_mixes((choice,), (MIX,)) is None


def test_what_fits_takes_over_what_else_the_file_says() -> None:
    choice = CHAT.model_copy(update={"sticky": True, "max_error": 0.05})
    fitted = fit_mixes((choice,), (MIX,))
    assert fitted is not None
    assert (fitted[0].sticky, fitted[0].max_error, fitted[0].usd_per_point) == (True, 0.05, 1.5)
    assert fitted[0].shares == MIX.shares


def test_a_way_that_is_not_all_shared_does_not_fit() -> None:
    both = [
        Choice(name=n, variants=(Variant(service=f"{n}.own", model="m"), Variant(service="s", model="m")))
        for n in ("a", "b")
    ]  # fmt: skip
    mixes = [ModelMix.of(c, {f"{c.name}.own": 0.4, "s": 0.6}) for c in both]
    assert fit_mixes(both, mixes) is not None
    assert fit_mixes(both, [mixes[0], ModelMix.of(both[1], {"b.own": 1.0})]) is None


def test_no_plan_is_told_so() -> None:
    with pytest.raises(InfeasibleError, match="which models answer"):
        MixSettler((), Planner()).settle(ASKED)


def test_gateways_are_told_how_to_deal() -> None:
    settled = ASKED.settled([MIX])
    group = GatewayGroup(settled, [GatewayAddress("http://x")], mixes=[MIX])
    told = group.told()
    assert told.choices["chat"].shares == {"chat.a": 0.5, "chat.b": 0.5}
    assert told.choices["chat"].errors == {"chat.a": 0.06, "chat.b": 0.02}
    assert set(told.models) >= {"chat.a", "chat.b", "other"}
    assert not GatewayGroup(settled, []).told().choices


def test_a_file_is_settled_whenever_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(CHOICE)
    source = FleetSource(path)
    (choice,) = source.problem.choices
    names = [variant.service for variant in choice.variants]
    mix = ModelMix.of(choice, {names[0]: 0.6, names[1]: 0.4})
    source.settle(MixSettler((), Planner(mix)))
    assert source.mixes == (mix,)
    assert sorted(s.rate_per_s for s in source.problem.services) == pytest.approx([0.8, 1.2])
    path.write_text(CHOICE.replace("2/s", "20/s"))
    assert source.read_again()
    assert not source.problem.choices
    assert sorted(s.rate_per_s for s in source.problem.services) == pytest.approx([8.0, 12.0])


def test_a_fabric_without_a_gateway_to_tell_is_refused(tmp_path: Path) -> None:
    asked = parse_fleet(CHOICE)
    (choice,) = asked.choices
    mix = ModelMix.of(choice, {choice.variants[0].service: 1.0})
    token = tmp_path / "token"
    token.write_text("x")
    options = OperationOptions.model_validate({"fabric": f"@{token}", "pretend": True})
    with pytest.raises(UsageError, match=r"requests for chat .* no gateway"):
        make_record(options, asked.settled([mix]), tmp_path / "f.yaml", None, [mix])
    record = make_record(
        OperationOptions.model_validate({"stand_in": True}),
        asked.settled([mix]),
        tmp_path / "f.yaml",
        None,
        [mix],
    )
    assert FleetRecord.from_json(record.to_json()) == record
    assert record.mixes == (mix,)
    assert isinstance(record.targets, TargetSettings)


def test_what_is_served_here_is_dealt() -> None:
    _, plan = small()
    first, second = sorted({instance.service for instance in plan.instances})
    mix = ModelMix(
        name="talk", shares={first: 0.75, second: 0.25}, models={first: "a", second: "b"}, error=0.1
    )
    mixed = plan.model_copy(update={"mixes": (mix,)})
    assert set(services_of(mixed, ["talk"])) == {first, second}
    assert services_of(mixed, [second]) == [second]
    with pytest.raises(UnknownNameError, match=r"known: .*talk"):
        services_of(mixed, ["zap"])
    # A choice that no instance answers must not stand for all of them.
    ghost = mix.model_copy(update={"name": "ghost", "shares": {"else": 1.0}})
    with pytest.raises(UnknownNameError, match="'ghost'"):
        services_of(plan.model_copy(update={"mixes": (ghost,)}), ["ghost"])
    assert choices_of(mixed, [first, second])["talk"].shares == {first: 0.75, second: 0.25}
    assert choices_of(mixed, [second])["talk"].models == {second: "b"}
    assert choices_of(mixed, ["else"]) == {}
