"""A controller that dies in the midst of a start: the next one finishes what it left."""

from __future__ import annotations

from tests.slow.targets.crash_points import CHANGES, run


def test_what_a_controller_left_halfway_is_finished() -> None:
    whole = run(0)
    assert whole.serving == tuple(sorted(CHANGES[-1]))
    # The first object of an instance is there, the next is asked for and never comes.
    asked = [at for at, place in enumerate(whole.places, 1) if place == "PATCH asked"]
    found = run(asked[1])
    assert (found.serving, found.shares) == (whole.serving, whole.shares)
    assert (found.started, found.orphans) == (whole.started, 0)
