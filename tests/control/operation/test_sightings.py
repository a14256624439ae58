"""What targets do not list any more: missing for a while before it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.control.operation.sightings import Sightings
from atoll.deploy.labels import Labels
from atoll.deploy.target import InstanceState, InstanceStatus


def status(name: str, state: InstanceState = "ready") -> InstanceStatus:
    labels = Labels(
        fleet="lab", instance=name, plan="p", placement="l", service="chat", role="chat/llm/both"
    )
    return InstanceStatus(f"job-{name}", labels, state, 5.0)


def open_sightings(folder: Path, known: str = "abc") -> Sightings:
    return Sightings(folder / "seen.json", 60.0, lambda name: name in known)


def names(sightings: Sightings) -> list[str]:
    return [each.labels.instance for each in sightings.by_target().get("t", ())]


def test_one_answer_without_it_is_no_end(tmp_path: Path) -> None:
    sightings = open_sightings(tmp_path)
    sightings.hear("t", [status("a"), status("b")], 0.0)
    sightings.hear("t", [status("b")], 10.0)
    assert names(sightings) == ["b", "a"]
    held = sightings.by_target()["t"][1]
    assert (held.state, held.reason) == ("ready", "t has not listed it for 0 s")
    # Listed again, the time begins anew.
    sightings.hear("t", [status("a"), status("b")], 60.0)
    for now_s in (65.0, 90.0, 124.0):
        sightings.hear("t", [], now_s)
        assert set(names(sightings)) == {"a", "b"}
    sightings.hear("t", [], 125.0)
    assert names(sightings) == []


def test_few_answers_are_not_enough_however_far_apart(tmp_path: Path) -> None:
    sightings = open_sightings(tmp_path)
    sightings.hear("t", [status("a")], 0.0)
    for now_s in (1000.0, 2000.0):
        sightings.hear("t", [], now_s)
        assert names(sightings) == ["a"]
    sightings.hear("t", [], 3000.0)
    assert names(sightings) == []


def test_who_answers_requests_is_not_gone(tmp_path: Path) -> None:
    sightings = open_sightings(tmp_path)
    sightings.hear("t", [status("a")], 0.0, {"a"})
    for now_s in range(10, 1000, 10):
        sightings.hear("t", [], float(now_s), {"a"})
    assert names(sightings) == ["a"]
    sightings.hear("t", [], 1000.0)
    assert names(sightings) == []


@pytest.mark.parametrize("state", ["draining", "failed", "gone"])
def test_what_was_ending_is_gone_with_the_list(tmp_path: Path, state: InstanceState) -> None:
    sightings = open_sightings(tmp_path)
    sightings.hear("t", [status("a", state)], 0.0)
    sightings.hear("t", [], 1.0)
    assert names(sightings) == []


def test_what_was_told_to_end_is_gone_with_the_list(tmp_path: Path) -> None:
    sightings = open_sightings(tmp_path)
    sightings.hear("t", [status("a"), status("b")], 0.0)
    sightings.end("a")
    sightings.hear("t", [], 1.0)
    assert names(sightings) == ["b"]


def test_another_controller_knows_what_stood(tmp_path: Path) -> None:
    sightings = open_sightings(tmp_path)
    sightings.hear("t", [status("a"), status("b"), status("c", "gone")], 0.0)
    sightings.write()
    # What b consisted of was forgotten: it was ended for good.
    follower = open_sightings(tmp_path, known="ac")
    follower.hear("t", [], 100.0)
    (held,) = follower.by_target()["t"]
    assert (held.handle, held.labels, held.state) == ("job-a", status("a").labels, "ready")


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "seen.json").write_text("{")
    sightings = open_sightings(tmp_path)
    assert sightings.by_target() == {}
    sightings.hear("t", [status("a")], 0.0)
    sightings.write()
    assert open_sightings(tmp_path).by_target() == {
        "t": (status("a"),),
    }
