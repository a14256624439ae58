"""Tables of steps become profiles, and the simulator takes what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.plan.cluster import NodeProfile
from atoll.plan.cluster_profiles import at
from atoll.runtime.local.layer_profile import RangeTable, profile_of

SECONDS = st.floats(1e-3, 1.0)


def table(layers: int, shared_s: float, beside_s: float = 0.0) -> RangeTable:
    """Steps of 4 ms a layer and 1 ms for every row; both kinds in one step share some of it."""

    def step_s(prompt: int, sequences: int) -> float:
        both = min(prompt, 1) + min(sequences, 1)
        rows = prompt + sequences
        return beside_s + layers * (4e-3 * both + 1e-3 * rows - shared_s * (both == 2))

    return RangeTable(
        start=0,
        end=layers,
        prefill_s=tuple((n, step_s(n, 0)) for n in (1, 16, 64)),
        decode_s=tuple((n, step_s(0, n)) for n in (1, 2, 8)),
        mixed_s=tuple((p, n, step_s(p, n)) for p, n in ((16, 2), (64, 8), (40, 4))),
    )


@given(st.floats(0.0, 4e-3), st.floats(0.0, 2e-2))
def test_what_prompts_and_sequences_share_is_found(shared_s: float, beside_s: float) -> None:
    found = profile_of(table(10, shared_s, beside_s), table(5, shared_s, beside_s), (1.0,) * 10)
    assert found.step_s == pytest.approx(beside_s, abs=1e-9)
    assert found.shared_s_per_layer == pytest.approx(shared_s, abs=1e-9)
    assert at(found.decode_s_per_layer, 2.0) == pytest.approx(6e-3)


@given(st.lists(SECONDS, min_size=3, max_size=3), st.lists(SECONDS, min_size=2, max_size=2))
def test_whatever_is_measured_is_a_valid_profile(steps: list[float], mixed: list[float]) -> None:
    rough = RangeTable(
        start=0,
        end=4,
        prefill_s=((16, steps[0]), (64, steps[1])),
        decode_s=((1, steps[2]),),
        mixed_s=((16, 1, mixed[0]), (64, 1, mixed[1])),
    )
    found = profile_of(rough, None, (1.0,) * 4)
    assert 0.0 <= found.shared_s_per_layer <= min(steps) / 4.0


def test_no_more_is_shared_than_a_step_takes() -> None:
    with pytest.raises(ValidationError, match="more than a step takes"):
        NodeProfile(
            max_layers=1,
            kv_tokens=(1.0,),
            prefill_s_per_layer=((1, 0.1),),
            decode_s_per_layer=((1, 0.2),),
            shared_s_per_layer=0.11,
        )


def test_a_profile_that_shares_nothing_is_written_as_before() -> None:
    plain = profile_of(table(2, 0.0), None, (1.0, 1.0)).model_copy(
        update={"shared_s_per_layer": 0.0}
    )
    assert "shared_s_per_layer" not in plain.model_dump()
    assert "shared_s_per_layer" in profile_of(table(2, 2e-3), None, (1.0, 1.0)).model_dump()
