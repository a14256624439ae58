"""Speculative decoding as engines are told of it: what a step makes, who can, and commands read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.core.errors import InputError
from atoll.engines.engine import Engine, EngineLayout, ServedModel, ServerHost
from atoll.engines.limits import EngineLaunch, EngineLimits, GuessMethod, Speculation
from atoll.engines.llamacpp import ENGINE as LLAMACPP
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.sglang import GUESSING_SEQUENCES
from atoll.engines.stage import ENGINE as STAGE
from atoll.engines.table import find_engine, profile_engine
from atoll.engines.vllm import ENGINE as VLLM

WAYS: tuple[tuple[GuessMethod, str | None], ...] = (
    ("ngram", None),
    ("mtp", None),
    ("eagle", "hf://org/head"),
    ("eagle3", "hf://org/head@main"),
    ("draft_model", "org/small"),
)
HOST = ServerHost("8000", "python3")


def guess(method: GuessMethod = "mtp", model: str | None = None, **more: Any) -> Speculation:
    """Three tokens, of which 0.7, 0.5 and 0.3 are right."""
    told = {"num_speculative_tokens": 3, "acceptance": (0.7, 0.5, 0.3), **more}
    return Speculation(method=method, model=model, **told)


def test_a_step_makes_a_token_and_those_that_were_right() -> None:
    assert guess().tokens_per_step == pytest.approx(1.0 + 0.7 + 0.5 + 0.3)
    profile = profile_engine("vllm", limits=EngineLimits(speculative=guess()))
    assert profile.rows == 4
    assert profile.made == pytest.approx(2.5)
    # Steps have 2,048 tokens where prompts share them, four for each sequence.
    assert profile.max_sequences == 2048 // 4
    plain = profile_engine("vllm")
    assert (plain.rows, plain.made) == (1, 1.0)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"acceptance": (0.5, 0.7, 0.3)}, "shares rise from one position to the next"),
        ({"acceptance": (0.5,)}, "1 shares for 3 guessed tokens"),
        ({"method": "eagle3"}, "eagle3 says no model that guesses"),
        ({"model": "org/small"}, "mtp has no model of its own"),
    ],
)
def test_what_cannot_be_is_refused(told: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        guess(**told)


def test_guessing_on_the_host_keeps_steps_from_being_prepared() -> None:
    for name in ("vllm", "sglang"):
        ahead = profile_engine(name, limits=EngineLimits(speculative=guess()))
        after = profile_engine(name, limits=EngineLimits(speculative=guess("ngram")))
        assert ahead.schedules_ahead
        assert not after.schedules_ahead
        assert after.host == profile_engine(name, limits=EngineLimits(scheduling="sync")).host
        told = EngineLimits(speculative=guess("ngram"), scheduling="async")
        assert "guesses with ngram after a step" in (find_engine(name).refuses_launch(told) or "")


def test_sglang_runs_few_sequences_unless_told() -> None:
    own = profile_engine("sglang", limits=EngineLimits(speculative=guess()))
    told = profile_engine("sglang", limits=EngineLimits(speculative=guess(), max_num_seqs=200))
    assert (own.max_sequences, told.max_sequences) == (GUESSING_SEQUENCES, 200)


@pytest.mark.parametrize("engine", [STAGE, LLAMACPP], ids=lambda engine: engine.name)
def test_engines_that_cannot_are_named(engine: Engine) -> None:
    limits = EngineLimits(speculative=guess())
    said = f"{engine.title} does not decode speculatively with mtp"
    assert engine.refuses_launch(limits) == said
    assert engine.refuses_launch(EngineLimits()) is None
    with pytest.raises(InputError, match=said):
        engine.check_layout(EngineLayout("one", 1, 1, 1, (32,)), limits)
    # Where it is asked all the same nothing is counted that it does not do.
    assert profile_engine(engine.name, limits=limits) == profile_engine(engine.name)


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_pipelines_do_not_guess(engine: Engine) -> None:
    limits = EngineLimits(speculative=guess())
    engine.check_layout(EngineLayout("one", 1, 2, 1, (32,)), limits)
    with pytest.raises(InputError, match="decodes speculatively on one node, and one has 2"):
        engine.check_layout(EngineLayout("one", 2, 1, 1, (16, 16)), limits)


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
@pytest.mark.parametrize(("method", "model"), WAYS)
def test_a_command_is_read_back(engine: Engine, method: GuessMethod, model: str | None) -> None:
    launch = EngineLaunch(speculative=guess(method, model))
    layout = EngineLayout("one", 1, 1, 1, (32,))
    command = engine.command(layout, ServedModel("hf://org/model", ("chat",), launch), HOST)
    parsed = engine.parse(command).served.launch
    assert parsed is not None
    assert parsed == engine.settle(launch)
    assert parsed.speculative is not None
    # What is right of guesses is a fact of requests: no command says it.
    assert parsed.speculative.acceptance == ()
    assert (parsed.speculative.method, parsed.speculative.num_speculative_tokens) == (method, 3)
    assert engine.command(layout, ServedModel("hf://org/model", ("chat",), parsed), HOST) == command


def test_options_are_those_of_the_engines() -> None:
    launch = EngineLaunch(speculative=guess("eagle3", "hf://org/head@main"))
    layout = EngineLayout("one", 1, 1, 1, (32,))
    served = ServedModel("org/model", ("chat",), launch)
    words = VLLM.command(layout, served, HOST).arguments
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "eagle3",
        "model": "org/head",
        "revision": "main",
        "num_speculative_tokens": 3,
    }
    line = " ".join(SGLANG.command(layout, served, HOST).arguments)
    assert (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path org/head"
        " --speculative-draft-model-revision main --speculative-num-steps 3"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    ) in line
