"""Speculative decoding in fleet files: what is read, what is refused by name, and which layouts are left."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from atoll.core.errors import InputError
from atoll.core.ids import parse_role
from atoll.engines.limits import EngineLimits, Speculation
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.problem import Problem
from atoll.solve.assembly import NewInstance
from atoll.solve.templates.library import engine_searches
from tests.plan.builders import WEST, edit, layout, plan_of, problem, rules, service

GUESS = {
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "acceptance": ["70%", 0.5, 0.3],
    "model": "hf://org/head",
}


def fleet(guess: dict[str, Any], engines: list[str] | None = None, **sections: Any) -> str:
    chat = {
        "model": "llama-3.1-8b",
        "ttft": "1s",
        "tpot": "50ms",
        "rate": "2/s",
        "lengths": "512x128",
        "engine": {"speculative": guess},
    }
    settings = {"engines": engines} if engines else {}
    pool = {"owned": {"lab": {"H100:1": 2}}}
    own = {"services": {"chat": chat}, "settings": settings, "pool": pool, **sections}
    return yaml.safe_dump({name: value for name, value in own.items() if value is not None})


def guess_of(problem: Problem) -> Speculation:
    found = problem.services[0].engine_limits.speculative
    assert found is not None
    return found


def test_shares_are_read_by_position_or_as_one_chance() -> None:
    assert guess_of(parse_fleet(fleet(GUESS))).tokens_per_step == pytest.approx(2.5)
    one = guess_of(parse_fleet(fleet({**GUESS, "acceptance": 0.8})))
    # Right with 0.8 if those before were: 1 + 0.8 + 0.8^2 + 0.8^3.
    assert one.acceptance == pytest.approx((0.8, 0.64, 0.512))
    assert one.tokens_per_step == pytest.approx(2.952)


def test_a_small_model_is_one_of_the_catalog_and_started_by_its_weights() -> None:
    small_one = {**GUESS, "method": "draft_model", "model": "llama-3.2-1b"}
    problem = parse_fleet(fleet(small_one))
    draft = problem.engine_of(problem.services[0]).draft
    assert draft is not None
    assert draft.layers == 16
    launch = problem.launches()["chat"].speculative
    assert launch is not None
    assert launch.model == "hf://meta-llama/Llama-3.2-1B-Instruct"
    with pytest.raises(InputError, match=r"unknown model 'llama-3\.2-1x'"):
        parse_fleet(fleet({**small_one, "model": "llama-3.2-1x"}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (fleet(GUESS, ["atoll"]), "the stage engine does not decode speculatively with eagle3"),
        (fleet(GUESS, ["llamacpp", "atoll"]), "llama.cpp does not decode .*; the stage engine"),
        (fleet({**GUESS, "acceptance": [0.5, 0.7, 0.3]}), "shares rise from one position"),
        (fleet({**GUESS, "acceptance": [0.5]}), "1 shares for 3 guessed tokens"),
        (fleet({**GUESS, "method": "medusa"}), "medusa"),
        (fleet({**GUESS, "num_speculative_tokens": 17}), "num_speculative_tokens"),
        (
            fleet(
                GUESS,
                pool=None,
                cluster={
                    "nodes": {"lab": {"H100:1": 2}},
                    "links": [{"between": ["*", "*"], "bandwidth": "10Gbit/s", "latency": "100us"}],
                },
            ),
            "machines of a fixed cluster are planned without speculative decoding",
        ),
    ],
)
def test_what_cannot_be_is_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        parse_fleet(text)
    assert "speculative" in str(error.value)
    assert "\n" not in str(error.value)


def test_only_single_nodes_of_engines_that_guess_are_searched() -> None:
    problem = parse_fleet(fleet(GUESS))
    found = engine_searches(problem, problem.catalog(), parse_role("chat/llm/both"))
    assert {(search.engine, search.max_nodes) for search in found} == {("vllm", 1), ("sglang", 1)}


def test_the_validator_refuses_engines_that_do_not_guess() -> None:
    asked = problem(services=(service("mini", model="llama-3.2-1b", phases="together"),))
    made = plan_of(asked, NewInstance("mini/llm/both", WEST, layout((0, 16, ("L4:1",)))))
    guess = Speculation.model_validate({**GUESS, "acceptance": (0.7, 0.5, 0.3)})
    told = asked.with_engine_limits(EngineLimits(speculative=guess))
    name = made.instances[0].id
    assert "engine" in rules(edit(made, name, engine="atoll"), told)
    assert "engine" not in rules(edit(made, name, engine="vllm"), asked)
