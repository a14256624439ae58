from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UnknownNameError
from atoll.workload.lengths import BUILT_IN, LengthMix, length_mix

tokens = st.integers(1, 10**6).map(float)


@given(tokens, tokens)
def test_fixed_lengths_have_no_spread(prompt: float, answer: float) -> None:
    mix = LengthMix.fixed(prompt, answer)
    assert (mix.input_mean, mix.output_mean) == (prompt, answer)
    assert (mix.input_mean_square, mix.output_mean_square) == (prompt**2, answer**2)
    assert mix.input_tail == 0.0
    assert mix.decode_context == pytest.approx(prompt + answer / 2)


@given(
    st.floats(10, 1e5), st.floats(0.1, 1.0), st.floats(10, 1e5), st.floats(0.1, 1.0)
)  # fmt: skip
def test_lognormal_moments(
    input_mean: float, input_share: float, output_mean: float, output_share: float
) -> None:
    mix = LengthMix.lognormal(
        input_mean, input_mean * input_share, output_mean, output_mean * output_share
    )
    for mean, share, square in (
        (input_mean, input_share, mix.input_mean_square),
        (output_mean, output_share, mix.output_mean_square),
    ):
        # mean = exp(mu + s^2/2) and median = exp(mu) give s^2; E[x^2] = exp(2 mu + 2 s^2).
        variance = 2 * math.log(1 / share)
        mu = math.log(mean * share)
        assert square == pytest.approx(math.exp(2 * mu + 2 * variance), rel=1e-9)


def test_lognormal_moments_against_draws() -> None:
    rng = np.random.default_rng(3)
    drawn = rng.lognormal(math.log(500), 0.6, size=400_000)
    mix = LengthMix.lognormal(float(drawn.mean()), 500.0, 100.0, 100.0)
    assert mix.input_mean_square == pytest.approx(float((drawn**2).mean()), rel=0.02)


# The context of a steady state.


def steady_context(prompts: np.ndarray, answers: np.ndarray, sequences: int, steps: int) -> float:
    """The mean context over the steps of a server that always runs this many sequences."""
    next_request = sequences
    prompt, answer = prompts[:sequences].copy(), answers[:sequences].copy()
    # Start each somewhere inside its answer, so that the first steps are steady too.
    done = np.floor(answer * (np.arange(sequences) + 0.5) / sequences)
    total, count = 0.0, 0
    for step in range(steps):
        # A token attends to the prompt, the answer so far, and itself.
        if step > steps // 4:
            total += float((prompt + done + 1).sum())
            count += sequences
        done += 1
        for i in np.flatnonzero(done >= answer):
            at = next_request % len(prompts)
            prompt[i], answer[i], done[i] = prompts[at], answers[at], 0.0
            next_request += 1
    return total / count


@pytest.mark.parametrize("kind", ["fixed", "geometric", "two lengths"])
def test_decode_context_is_what_a_busy_server_sees(kind: str) -> None:
    rng = np.random.default_rng(11)
    count = 20_000
    prompts = rng.integers(50, 400, size=count).astype(np.float64)
    answers = {
        "fixed": np.full(count, 120.0),
        "geometric": rng.geometric(1 / 100, size=count).astype(np.float64),
        "two lengths": rng.choice([20.0, 400.0], size=count, p=[0.9, 0.1]),
    }[kind]
    mix = LengthMix(
        float(prompts.mean()),
        float(answers.mean()),
        float((prompts**2).mean()),
        float((answers**2).mean()),
    )
    seen = steady_context(prompts, answers, sequences=64, steps=6000)
    assert mix.decode_context == pytest.approx(seen, rel=0.02)
    if kind == "two lengths":
        # The plain mean would be far off: long answers stay longer.
        assert seen > 1.3 * (mix.input_mean + mix.output_mean / 2)


# Names.


def test_built_in_names() -> None:
    traces = {"azure-code", "azure-conv", "burstgpt", "multimodal", "reasoning"}
    assert set(BUILT_IN) == {*traces, "long-context"}
    for name, mix in BUILT_IN.items():
        assert length_mix(name) is mix
    assert BUILT_IN["azure-code"].output_mean < 50 < BUILT_IN["azure-conv"].output_mean
    assert BUILT_IN["reasoning"].output_mean > BUILT_IN["reasoning"].input_mean
    assert BUILT_IN["long-context"].input_mean > 10_000


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_lengths_by_name(prompt: int, answer: int) -> None:
    assert length_mix(f"{prompt}x{answer}") == LengthMix.fixed(float(prompt), float(answer))


@pytest.mark.parametrize(
    "name",
    ["", "x", "1024", "1024x", "x256", "1024x256x3", "-1x5", "1.5x2", "1024 x 256", "1024X256",
     "azure", "²x5", "٣x5", "1" * 20 + "x" + "1" * 20],
)  # fmt: skip
def test_unknown_names(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        length_mix(name)
    assert "1024x256" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_slip_of_the_pen_is_forgiven() -> None:
    with pytest.raises(UnknownNameError, match="did you mean azure-conv"):
        length_mix("azure-convo")


@pytest.mark.parametrize(("name", "field"), [("0x5", "input_mean"), ("5x0", "output_mean")])
def test_no_tokens(name: str, field: str) -> None:
    with pytest.raises(InputError, match="0 tokens") as caught:
        length_mix(name)
    assert caught.value.field == field


# What cannot be.


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((0.0, 1, 1, 1), "input_mean"),
        ((0.5, 1, 1, 1), "input_mean"),
        ((math.nan, 1, 1, 1), "input_mean"),
        ((math.inf, 1, 1, 1), "input_mean"),
        ((1e10, 1, 1e20, 1), "input_mean"),
        ((1, 0.0, 1, 1), "output_mean"),
        ((1, -5.0, 1, 25), "output_mean"),
        ((10, 1, 99, 1), "input_mean_square"),
        ((10, 1, math.nan, 1), "input_mean_square"),
        ((10, 1, math.inf, 1), "input_mean_square"),
        ((10, 10, 100, 99.9), "output_mean_square"),
        ((10, 1, 100, 1, -1.0), "input_tail"),
        ((10, 1, 100, 1, math.nan), "input_tail"),
        ((10, 1, 100, 1, math.inf), "input_tail"),
    ],
)
def test_impossible_moments(values: tuple[float, ...], field: str) -> None:
    with pytest.raises(InputError) as caught:
        LengthMix(*values)  # type: ignore[arg-type]  # none of them reaches the shared prefix
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_rounding_of_the_moments_is_forgiven() -> None:
    mean = 0.1 + 1000 / 3
    LengthMix(mean, 1, mean * mean * (1 - 1e-12), 1)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((100, 101, 10, 10), "input_median"),
        ((100, 0, 10, 10), "input_median"),
        ((100, -1, 10, 10), "input_median"),
        ((100, math.nan, 10, 10), "input_median"),
        ((100, 100, 10, 11), "output_median"),
    ],
)
def test_impossible_medians(values: tuple[float, float, float, float], field: str) -> None:
    with pytest.raises(InputError) as caught:
        LengthMix.lognormal(*values)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "build",
    [
        lambda: LengthMix.fixed(1e200, 1.0),
        lambda: LengthMix.lognormal(1e100, 1e99, 1.0, 1.0),
        lambda: LengthMix.lognormal(10.0, 1e-200, 1.0, 1.0),
    ],
)
def test_absurd_lengths_are_refused_in_words(build: object) -> None:
    assert callable(build)
    with pytest.raises(InputError):
        build()
