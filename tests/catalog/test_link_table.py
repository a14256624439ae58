from __future__ import annotations

import pickle
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.catalog.link_table import Link, LinkTable, default_links
from atoll.core.errors import InputError

GBIT = 1e9 / 8


def test_time() -> None:
    assert Link(1e9, 0.01).time_s(5e8) == pytest.approx(0.51)


@pytest.mark.parametrize("bad", [(0, 0), (-1, 0), (float("nan"), 0), (1, -1), (1, float("nan"))])
def test_impossible_links(bad: tuple[float, float]) -> None:
    with pytest.raises(InputError):
        Link(*bad)


def test_defaults() -> None:
    links = default_links()
    assert links.between("basement", "basement") == Link(10 * GBIT, 0.25e-3)
    assert links.between("mars", "venus") == Link(0.1 * GBIT, 0.05)
    assert links.between("us-east-2", "ap-northeast-2").latency_s > 0.05
    assert links.between("us-east-2", "us-west-2") == links.between("us-west-2", "us-east-2")


def test_two_nodes_share_the_slower_interface() -> None:
    links = default_links()
    assert links.between("r", "r", "H100:8", "H100:8").bandwidth_bytes_per_s == 3200 * GBIT
    assert links.between("r", "r", "H100:8", "L40S:4").bandwidth_bytes_per_s == 100 * GBIT
    assert links.between("r", "r", "H100:8", "L4:1").bandwidth_bytes_per_s == 10 * GBIT
    assert links.between("r", "r", "H100:8") == links.in_region
    assert links.between("r", "s", "H100:8", "H100:8") == links.between_regions


@pytest.mark.parametrize("region", ["", "us-east-2", "us-central1", "gcp/us-central1"])
def test_no_size_of_a_gpu_carries_less_than_a_smaller_one(region: str) -> None:
    links = default_links()
    for gpu, nodes in groupby(Catalog.default().nodes.values(), key=lambda node: node.gpu.name):
        sizes = sorted(node.count for node in nodes)
        carried = [links.nic_bytes_per_s(region, f"{gpu}:{size}") for size in sizes]
        assert carried == sorted(carried), gpu
        if region != "us-east-2":
            assert carried[0] >= links.in_region.bandwidth_bytes_per_s


@given(
    figures=st.dictionaries(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 90)),
    here=st.dictionaries(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 90)),
    size=st.integers(1, 12),
)
def test_a_size_without_a_figure_carries_no_less_than_a_smaller_one(
    figures: dict[int, int], here: dict[int, int], size: int
) -> None:
    links = LinkTable(
        Link(40.0, 0.0),
        Link(1.0, 0.1),
        nics={f"L4:{n}": float(figure) for n, figure in figures.items()} | {"L40S:1": 99.0},
        region_nics={("r", f"L4:{n}"): float(figure) for n, figure in here.items()},
    )
    for region, known in (("elsewhere", figures), ("r", {**figures, **here})):
        smaller = [figure for n, figure in known.items() if n < size]
        expected = known.get(size, max([40, *smaller]))
        assert links.nic_bytes_per_s(region, f"L4:{size}") == expected
        for name in ("n1", "rack:a", "L4", "A10G:2"):
            assert links.nic_bytes_per_s(region, name) == 40.0


def test_interfaces_of_a_cloud_stand_in_its_region() -> None:
    links = default_links()
    for size, elsewhere, there in ((1, 100, 25), (2, 100, 50), (4, 100, 100), (8, 3200, 1000)):
        node = f"H100:{size}"
        assert links.between("us-east-2", "us-east-2", node, node).bandwidth_bytes_per_s == (
            elsewhere * GBIT
        )
        assert links.between("us-central1", "us-central1", node, node).bandwidth_bytes_per_s == (
            there * GBIT
        )
        assert links.nic_bytes_per_s("gcp/us-central1", node) == there * GBIT
        assert links.nic_bytes_per_s("aws/us-east-2", node) == elsewhere * GBIT
    assert links.nic_bytes_per_s("us-central1", "L4:2") == 32 * GBIT


@pytest.mark.parametrize(
    ("node", "gbit"),
    [
        ("A10G:1", 2.5),
        ("L4:1", 2.5),
        ("L40S:1", 2.5),
        ("V100-16:1", 2.5),
        ("T4:1", 5),
        ("L4:4", 40),
    ],
)
def test_small_instances_carry_their_baseline_and_not_what_they_burst_to(
    node: str, gbit: float
) -> None:
    links = default_links()
    for region in ("us-east-2", "ap-northeast-2", "eu-central-1", "us-gov-west-1", "aws/anything"):
        assert links.nic_bytes_per_s(region, node) == gbit * GBIT
        assert links.between(region, region, node, "H100:8").bandwidth_bytes_per_s == gbit * GBIT
    # Somebody's own machines, and those of a cloud that does not burst.
    for region in ("here", "us-lab", "eu-office-1", "us-central1", "lambda/us-east-1"):
        assert links.nic_bytes_per_s(region, node) >= 10 * GBIT


def test_what_a_region_has_comes_before_what_its_cloud_has() -> None:
    links = LinkTable(
        Link(40.0, 0.0),
        Link(1.0, 0.1),
        nics={"L4:1": 30.0},
        region_nics={("aws", "L4:1"): 3.0, ("us-east-1", "L4:1"): 5.0},
    )
    regions = ("us-east-1", "us-east-2", "aws/us-east-1", "gcp/us-east-2", "here")
    assert [links.nic_bytes_per_s(region, "L4:1") for region in regions] == [5, 3, 5, 30, 30]


def test_regions_with_their_cloud_are_the_same_places() -> None:
    links = default_links()
    known = links.between("us-east-2", "us-central1")
    assert known != links.between_regions
    assert links.between("aws/us-east-2", "gcp/us-central1") == known
    far = Link(1e6, 0.9)
    own = links.with_pairs(regions={("aws/us-east-2", "gcp/us-central1"): far, ("any", "any"): far})
    assert own.between("aws/us-east-2", "gcp/us-central1") == far
    assert own.between("us-east-2", "us-central1") == known
    # Equal names in two clouds are two places.
    assert own.between("lambda/any", "lambda/any") == far
    assert own.between("lambda/any", "runpod/any") == links.between_regions


def test_inside_a_node() -> None:
    catalog = Catalog.default()
    nvlink = catalog.links.inside(catalog.node("H100:8"))
    pcie = catalog.links.inside(catalog.node("L4:2"))
    assert nvlink.bandwidth_bytes_per_s > 5 * pcie.bandwidth_bytes_per_s
    with pytest.raises(InputError, match="no GPU-to-GPU link inside L4:1"):
        catalog.links.inside(catalog.node("L4:1"))


def test_the_max_specific_pair_wins() -> None:
    fast, slow = Link(1e10, 1e-5), Link(1e6, 0.2)
    links = default_links().with_pairs(
        regions={("r", "r"): slow, ("us-east-2", "us-west-2"): slow}, nodes={("n1", "n2"): fast}
    )
    assert links.between("r", "r", "n1", "n2") == fast
    assert links.between("r", "r", "n2", "n1") == slow
    assert links.between("us-east-2", "us-west-2") == slow
    assert links.between("us-west-2", "us-east-2") != slow


def test_tables_compare_and_pickle() -> None:
    links = default_links()
    assert pickle.loads(pickle.dumps(links)) == links
    assert hash(links) == hash(
        LinkTable(
            links.in_region,
            links.between_regions,
            dict(links.region_pairs),
            {},
            dict(links.nics),
            dict(links.region_nics),
            share_bytes_per_s=links.share_bytes_per_s,
        )
    )


def test_a_share_of_a_gpu_sends_over_the_host_and_no_faster_than_the_machine() -> None:
    links = default_links()
    halves = links.between("r", "r", "H200/2:2", "H200/2:2")
    assert halves.bandwidth_bytes_per_s == 2 * links.share_bytes_per_s == 0.85e9
    assert halves.share(1, 2).bandwidth_bytes_per_s == 0.425e9
    # A machine whose interface is slower than its shares together is as slow as that.
    assert links.nic_bytes_per_s("aws/us-east-2", "L4/8:8") == links.nic_bytes_per_s(
        "aws/us-east-2", "L4:1"
    )


def test_a_share_of_a_link_has_less_bandwidth_and_the_same_latency() -> None:
    link = Link(8e9, 0.01)
    assert link.share(2, 8) == Link(2e9, 0.01)
    assert link.share(8, 8) is link


@pytest.mark.parametrize("gpu", ["H200", "B200", "B300"])
def test_successors_of_the_h100_carry_no_less_than_it(gpu: str) -> None:
    """With phases apart an H200:1 used to carry less than an H100:1, for want of a figure."""
    links = default_links()
    for count in (1, 2, 4, 8):
        own, old = (links.nic_bytes_per_s("us-east-2", f"{name}:{count}") for name in (gpu, "H100"))
        assert own >= old
