"""Mixes of models: the mean error that is stated is that of their shares, and kept to the last digit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.core.errors import InputError
from atoll.plan.choice import Choice, ModelMix, Variant
from atoll.plan.plan import Plan
from tests.plan.builders import small


def choice_of(errors: list[float], max_error: float | None) -> Choice:
    variants = tuple(
        Variant(service=f"chat.m{i}", model=f"m{i}", error=error) for i, error in enumerate(errors)
    )
    return Choice(name="chat", variants=variants, max_error=max_error)


@given(
    errors=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    hair=st.sampled_from([-1e-3, -1e-16, 0.0, 1e-17, 1e-12, 1e-8, 9e-8]),
)
def test_a_mean_error_is_what_is_allowed_to_the_last_digit(
    errors: list[float], weights: list[float], hair: float
) -> None:
    """A solver keeps an error to within its tolerance; a plan keeps it."""
    total = sum(weights[: len(errors)])
    levels = {f"chat.m{i}": weights[i] / total for i in range(len(errors))}
    mean = sum(levels[f"chat.m{i}"] * error for i, error in enumerate(errors))
    most = min(1.0, max(mean - hair, min(errors)))
    mix = ModelMix.of(choice_of(errors, most), levels)
    stated = math.fsum(share * mix.errors[name] for name, share in mix.shares.items())
    assert mix.error <= most
    assert abs(mix.error - stated) < 1e-9
    assert abs(sum(mix.shares.values()) - 1.0) < 1e-12
    spread = max(errors) - min(errors)
    if spread > 1e-2:
        assert all(abs(share - levels[name]) < 1e-4 for name, share in mix.shares.items())


def test_a_mix_that_errs_too_much_says_so() -> None:
    mix = ModelMix.of(choice_of([0.02, 0.06], 0.04), {"chat.m0": 0.25, "chat.m1": 0.75})
    assert abs(mix.error - 0.05) < 1e-12
    assert mix.shares == {"chat.m0": 0.25, "chat.m1": 0.75}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shares": {"chat.m0": 0.5}}, "add up to 0.5"),
        ({"shares": {}}, "add up to 0"),
        ({"models": {"chat.m0": "m0"}}, "models of chat lack chat.m1"),
        ({"errors": {"chat.m0": 0.02}}, "errors of chat lack chat.m1"),
        ({"error": 0.01}, "errs 4.0000% by its shares, 1.0000% is stated"),
    ],
)
def test_a_mix_that_cannot_be_right_is_not_read(change: dict[str, object], said: str) -> None:
    mix = ModelMix.of(choice_of([0.02, 0.06], 0.04), {"chat.m0": 0.5, "chat.m1": 0.5})
    assert ModelMix.model_validate(mix.model_dump()) == mix
    with pytest.raises(ValidationError, match=said):
        ModelMix.model_validate(mix.model_dump() | change)


def test_a_plan_mixes_a_choice_once() -> None:
    mix = ModelMix.of(choice_of([0.02], None), {"chat.m0": 1.0})
    made = small()[1].model_copy(update={"mixes": (mix,)})
    assert Plan.from_json(made.to_json()) == made
    twice = made.model_copy(update={"mixes": (mix, mix)})
    with pytest.raises(InputError, match="chat is mixed twice"):
        Plan.from_json(twice.to_json())
