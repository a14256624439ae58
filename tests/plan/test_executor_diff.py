"""What changes of executors and paths: by pattern, not one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.plan import Instance, Plan
from atoll.plan.plan_diff import diff
from tests.plan import builders, graphs
from tests.plan.builders import few

MADE = graphs.plan()
MORE = graphs.executor("see-2", "omni", "vision", "T4:1", 0.5)
WHOLE = graphs.executor("all-0", "omni", "vision+llm", "L40S:4", 2.5, gpus=(2,), slot=0)


def with_executors(*executors: Instance, paths: tuple[object, ...] | None = None) -> Plan:
    fields: dict[str, object] = {"instances": executors}
    if paths is not None:
        fields["paths"] = paths
    return MADE.model_copy(update=fields)


def test_a_plan_does_not_differ_from_itself() -> None:
    change = diff(MADE, MADE)
    assert change.empty
    assert change.text() == "nothing changes"
    assert change.paths == ()
    assert not any(one.changes for one in change.executors)


def test_equal_executors_are_one_line() -> None:
    another = MORE.model_copy(update={"id": "see-3"})
    change = diff(MADE, with_executors(*MADE.instances, MORE, another))
    lines = change.text().splitlines()
    assert "+ 2x omni: vision on T4:1 in lab, $2.00/h for all 4" in lines
    assert not any("see-2" in line for line in lines)
    assert {one.id for one in change.started} == {"see-2", "see-3"}


def test_other_gpus_mean_starting_again() -> None:
    moved = MADE.instances[0]
    for one in MADE.instances:
        if one.id == "think-0":
            node = one.nodes[0].model_copy(update={"gpu_ids": (3,)})
            moved = one.model_copy(update={"nodes": (node,)})
    others = tuple(one for one in MADE.instances if one.id != "think-0")
    change = diff(MADE, with_executors(*others, moved))
    assert "~ 1x omni: audio+llm on L40S:1 in lab: starts again: same nodes, other GPUs" in (
        change.text().splitlines()
    )
    assert not change.empty


def test_paths_that_change_are_told_with_shares() -> None:
    split = (
        graphs.path("omni", graphs.SCANS, 0.75, ("vision", "see-0 see-1"), ("llm", "think-0")),
        graphs.path("omni", graphs.SCANS, 0.25, ("vision+llm", "all-0")),
        *(p for p in MADE.paths if p.klass != graphs.SCANS),
    )
    change = diff(MADE, with_executors(*MADE.instances, WHOLE, paths=split))
    assert [(p.before, p.after) for p in change.paths] == [(1.0, 0.75), (0.0, 0.25)]
    told = f"path of omni, '{graphs.SCANS}', 100% -> 75%: vision on T4:1 -> llm on L40S:1"
    assert told in change.text().splitlines()


def test_which_executors_of_a_kind_a_path_takes_is_no_change() -> None:
    one = (
        graphs.path("omni", graphs.SCANS, 1.0, ("vision", "see-0"), ("llm", "think-0")),
        *(p for p in MADE.paths if p.klass != graphs.SCANS),
    )
    assert diff(MADE, with_executors(*MADE.instances, paths=one)).empty


def test_plain_plans_have_no_such_fields() -> None:
    _, made = builders.small()
    fields = diff(made, made.model_copy(update={"instances": ()})).model_dump(mode="json")
    assert not {"executors", "paths"} & set(fields)
    assert set(fields["kept"][0] if fields["kept"] else {}) <= {
        "before",
        "after",
        "relaid",
        "moved",
    }


@few
@given(st.sets(st.sampled_from(range(5))), st.sets(st.sampled_from(range(5))))
def test_what_stays_starts_and_stops_adds_up(old: set[int], new: set[int]) -> None:
    before, after = (
        with_executors(*(graphs.EXECUTORS[i] for i in sorted(some))) for some in (old, new)
    )
    change = diff(before, after)
    assert sum(one.kept + one.stopped for one in change.executors) == len(old)
    assert sum(one.kept + one.started for one in change.executors) == len(new)
    assert all(
        min(one.kept, one.started, one.stopped, one.restarted) >= 0 for one in change.executors
    )
    assert sum(one.usd_after for one in change.executors) == sum(
        one.usd_per_hour for one in after.instances
    )
