from __future__ import annotations

import pytest

from atoll.core.errors import UnknownNameError
from atoll.perf.engines import ENGINES, EngineProfile, engine


def test_unknown_engine() -> None:
    with pytest.raises(UnknownNameError, match="did you mean vllm") as caught:
        engine("vlm")
    assert caught.value.kind == "engine"
    assert set(caught.value.known) == set(ENGINES)


def test_names_are_those_of_the_profiles() -> None:
    for name, profile in ENGINES.items():
        assert engine(name) is profile
        assert profile.name == name


def test_none_is_kernel_time_alone() -> None:
    assert [engine("none").host_seconds(tp) for tp in (1, 2, 8)] == [0.0, 0.0, 0.0]


def test_a_missing_size_takes_the_next_smaller_one() -> None:
    profile = EngineProfile("x", {2: 2e-3, 8: 8e-3})
    assert profile.host_seconds(2) == 2e-3
    assert profile.host_seconds(3) == profile.host_seconds(7) == 2e-3
    assert profile.host_seconds(8) == profile.host_seconds(16) == 8e-3
    # Nothing smaller is known.
    assert profile.host_seconds(1) == 0.0


@pytest.mark.parametrize("name", ["vllm", "sglang", "atoll"])
def test_host_time_is_milliseconds_and_grows_with_the_group(name: str) -> None:
    times = [engine(name).host_seconds(tp) for tp in (1, 2, 4, 8)]
    assert times == sorted(times)
    # What public measurements show beyond the kernels.
    assert 1.4e-3 <= times[0] <= times[-1] <= 9.5e-3
    assert 0.5 < engine(name).memory_share < 1.0
