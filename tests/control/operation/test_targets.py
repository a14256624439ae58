"""Which machines of a pool belong to which target, and how much of them there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.operation.targets import TargetMap, bound_offers, open_targets, own_regions
from atoll.core.errors import AtollError, InputError, UnknownNameError, UsageError
from atoll.deploy.target import DeployError
from atoll.deploy.target_table import TARGETS, TargetSettings, read_names, read_settings
from atoll.plan.plan import Market
from atoll.plan.problem import Offer, Problem
from tests.control.operation.test_control_loop import PROBLEM
from tests.runtime.local.test_placing import instance


def offer(
    region: str, kind: str = "L4:1", count: int = 4, market: Market = "owned", usd: float = 1.0
) -> Offer:
    return Offer(region=region, node_type=kind, available=count, market=market, usd_per_hour=usd)


def pool(*regions: str) -> Problem:
    return PROBLEM.replace(offers=tuple(offer(region) for region in regions))


def settings(*names: str, **sections: object) -> TargetSettings:
    slurm = {"slurm": {"work_folder": "/work"}} if "slurm" in names else {}
    return TargetSettings.parse({"names": names, **slurm, **sections})


def test_names_are_read_in_order() -> None:
    assert read_names("slurm, kubernetes") == ("slurm", "kubernetes")
    with pytest.raises(UnknownNameError, match="kubernetes"):
        read_names("kubernets")
    with pytest.raises(UsageError, match="twice"):
        read_names("local,local")


def test_the_only_region_is_the_only_targets() -> None:
    assert read_settings(["local"], pool("basement")).local.region == "basement"
    assert read_settings(["kubernetes"], pool("east")).kubernetes.region == "east"
    several = read_settings(["local"], pool("basement", "attic"))
    assert several.local.region == "local"
    assert read_settings(["local", "slurm"], pool("basement")).local.region == "local"


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text("slurm: {account: lab, work-folder: /scratch, region: hpc}\n")
    given_there = {"slurm": {"account": "other"}}
    found = read_settings(["slurm"], pool("a"), path=path, given=given_there).slurm
    assert found is not None
    assert (found.account, found.work_folder, found.region) == ("other", "/scratch", "hpc")


def test_what_is_not_said_again_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text("kubernetes: {image: mine, namespace: ml}\n")
    first = read_settings(["kubernetes"], pool("a"), path=path)
    again = TargetSettings.from_json(first.to_json())
    assert read_settings(["kubernetes"], pool("a"), known=again) == first
    given_later = {"kubernetes": {"namespace": "other"}}
    later = read_settings(["kubernetes"], pool("b"), given=given_later, known=again).kubernetes
    assert (later.image, later.namespace, later.region) == ("mine", "other", "b")
    both = read_settings(["kubernetes", "slurm"], pool("a"), known=again)
    assert both.kubernetes == first.kubernetes
    assert both.names == ("kubernetes", "slurm")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slum: {}", "unknown target 'slum'"),
        ("slurm: 3", "a mapping of settings"),
        ("- slurm", "a mapping of targets"),
        ("slurm: {acount: lab}", "acount"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        read_settings(["slurm"], pool("a"), path=path)
    assert "\n" not in str(caught.value)


def test_regions_go_to_the_targets_that_are_called_so() -> None:
    offers = [offer(r) for r in ("local", "slurm", "cluster", "aws/us-east-2", "attic")]
    chosen = settings("local", "slurm", "kubernetes", "skypilot")
    regions = [own_regions(name, chosen, offers) for name in chosen.names]
    assert regions == [{"local"}, {"slurm"}, {"cluster"}, {"aws/us-east-2"}]
    found = TargetMap(chosen, offers)
    assert found.list_unclaimed(offers) == ("attic",)
    assert found.of_region("slurm") == "slurm"
    pretending = settings("local", "slurm", local={"pretend": True})
    assert own_regions("local", pretending, offers) == {
        "local",
        "cluster",
        "aws/us-east-2",
        "attic",
    }


@given(
    names=st.lists(st.sampled_from(TARGETS), min_size=1, unique=True),
    regions=st.lists(
        st.sampled_from(["local", "slurm", "cluster", "aws/us-east-2", "gcp/x", "attic"]),
        unique=True,
    ),
    pretend=st.booleans(),
)
def test_no_region_is_two_targets(names: list[str], regions: list[str], pretend: bool) -> None:
    chosen = settings(*names, local={"pretend": pretend})
    offers = [offer(region) for region in regions]
    claimed = [region for name in chosen.names for region in own_regions(name, chosen, offers)]
    assert len(claimed) == len(set(claimed))
    assert set(claimed) <= set(regions)


def test_an_instance_stands_where_its_region_is() -> None:
    one = instance([(0, 32)])
    chosen = settings("slurm", "kubernetes", kubernetes={"region": one.region})
    offers = [offer(one.region), offer("slurm")]
    assert TargetMap(chosen, offers).of_instance(one) == "kubernetes"
    elsewhere = settings("slurm", "kubernetes", kubernetes={"region": "cluster"})
    with pytest.raises(DeployError, match="no single target"):
        TargetMap(elsewhere, offers).of_instance(one)
    assert TargetMap(settings("slurm"), offers).of_instance(one) == "slurm"


def counts(offers: Sequence[Offer]) -> list[int]:
    return [each.available for each in offers]


def test_the_pool_bounds_what_is_there() -> None:
    there = [offer("a", "L4:4", 2, "on-demand", 8.0)]
    assert counts(bound_offers([offer("a", "L4:4", 5)], there)) == [2]
    assert counts(bound_offers([offer("a", "L4:4", 1)], there)) == [1]
    # A large machine is as many small ones as it holds.
    assert counts(bound_offers([offer("a", "L4:1", 50)], there)) == [8]
    assert counts(bound_offers([offer("a", "L4:8", 5)], there)) == [0]
    assert counts(bound_offers([offer("b", "L4:4", 5)], there)) == [0]
    assert counts(bound_offers([offer("a", "T4:4", 5)], there)) == [0]
    assert counts(bound_offers([offer("a", "L4:4", 5, "spot")], there)) == [0]
    free = bound_offers([offer("a", "L4:2", 1, usd=0.0), offer("a", "L4:1", 1, usd=0.5)], there)
    assert [each.usd_per_hour for each in free] == [4.0, 0.5]
    # A GPU in shares is one GPU there.
    halves = offer("a", "L4/2:2", 50)
    assert counts(bound_offers([halves], there)) == [8]
    assert counts(bound_offers([halves], [offer("a", "L4/2:2", 3)])) == [3]


def test_targets_that_give_gpus_whole_refuse_shares_by_name(tmp_path: Path) -> None:
    pool = [offer("cluster", "L4/2:2", 1)]
    for name in ("slurm", "kubernetes", "ray", "skypilot"):
        chosen = settings(name)
        with pytest.raises(DeployError) as error:
            open_targets(chosen, pool, tmp_path)
        assert error.value.kind == "settings"
        said = f"{name} gives a GPU to one instance, and L4:1 in cluster is offered in 2 shares"
        assert said in str(error.value)
    assert open_targets(settings("local"), pool, tmp_path)["local"].pool == tuple(pool)


markets = st.sampled_from(["owned", "on-demand", "spot"])
some_offers = st.lists(
    st.builds(
        offer,
        st.sampled_from(["a", "b"]),
        st.sampled_from(["L4:1", "L4:2", "T4:4"]),
        st.integers(0, 9),
        markets,
    ),
    max_size=6,
    unique_by=lambda each: each.key,
)


@given(wanted=some_offers, there=some_offers)
def test_never_more_than_the_pool_or_the_target_has(
    wanted: list[Offer], there: list[Offer]
) -> None:
    found = bound_offers(wanted, there)
    assert [each.key for each in found] == [each.key for each in wanted]
    for before, after in zip(wanted, found, strict=True):
        assert after.available <= before.available
        gpus = sum(each.available * each.gpus for each in there if each.region == after.region)
        assert after.available * after.gpus <= gpus


def test_targets_are_opened_and_offer_what_the_pool_has(tmp_path: Path) -> None:
    chosen = settings("local", "skypilot", local={"pretend": True})
    offers = [offer("attic", count=2), offer("aws/us-east-2", market="spot")]
    opened = open_targets(chosen, offers, tmp_path)
    assert list(opened) == ["local", "skypilot"]
    assert [each.key for each in opened["local"].offers()] == [offers[0].key]
    assert [each.key for each in opened["skypilot"].offers()] == [offers[1].key]
    assert list(opened["local"].list("lab")) == []


def test_a_missing_kubeconfig_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "nothing"
    chosen = settings("kubernetes", kubernetes={"kubeconfig": str(path)})
    with pytest.raises(AtollError) as caught:
        open_targets(chosen, [], tmp_path)
    assert "\n" not in str(caught.value)
    assert "fix:" in str(caught.value)
