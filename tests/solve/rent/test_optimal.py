"""Which of equal running instances stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.plan import Flow, Instance, Node
from atoll.solve.rent.optimal import choose_kept


def standing(name: str, slot: int, first: int, gpus: int) -> Instance:
    """Return an instance on some GPUs of machine `slot` of one offer."""
    node = Node(
        id="n0",
        node_type="H100:4",
        market="spot",
        start=0,
        end=32,
        tp=gpus,
        slot=slot,
        gpu_ids=tuple(range(first, first + gpus)),
    )
    return Instance(
        id=name,
        service="m",
        role="m/llm/both",
        region="here",
        stages=1,
        nodes=(node,),
        flows=(
            Flow(src="source", dst="n0", per_s=1.0),
            Flow(src="n0", dst="sink", per_s=1.0),
        ),
        throughput_per_s=1.0,
        usd_per_hour=1.0,
    )


def test_of_equals_those_stay_that_share_a_machine_with_others() -> None:
    equal = [standing(f"m-both-{k}", k, 0, 2) for k in range(3)]
    alone = standing("m-both-9", 2, 3, 1)

    kept = choose_kept([(equal, 1), ([alone], 1)])

    assert [one.id for one in kept] == ["m-both-9", "m-both-2"]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4))
def test_as_many_of_each_group_stay_as_are_wanted(sizes: list[tuple[int, int]]) -> None:
    groups = [
        ([standing(f"m-both-{10 * g + k}", k, 0, 1) for k in range(size)], min(size, number))
        for g, (size, number) in enumerate(sizes)
    ]

    kept = choose_kept(groups)

    assert len({one.id for one in kept}) == len(kept)
    for group, number in groups:
        assert sum(one in kept for one in group) == number
