"""Prompts and answers on instances of their own that cut the model differently, with real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.limits import EngineLaunch
from tests.runtime.local.test_placing import instance, plan
from tests.runtime.serving.test_instance import get, post
from tests.served_fleet import Running, serving

pytestmark = pytest.mark.engine
Json = dict[str, Any]
APART = "apart"
GENERATED = 24
STAND_IN = "tiny instead of large"
PROMPTS = [f"{number}: {'The quick brown fox. ' * (3 * number)}" for number in range(1, 5)]


@pytest.fixture(scope="module")
def apart(tiny_folder: Path, forks: str) -> Iterator[Running]:
    """The model with prompts on one instance and answers on another, which cut it differently."""
    made = plan(
        instance([(0, 1), (1, 4)], "prefill-0", "prefill", APART),
        instance([(0, 3), (3, 4)], "decode-0", "decode", APART),
    )
    launch = EngineLaunch(max_num_seqs=2, max_num_batched_tokens=64, promised_ttft_s=0.5)
    told = made.model_copy(update={"engines": {APART: launch}})
    with serving(told, [APART], tiny_folder, forks, STAND_IN) as found:
        yield found


def answer(url: str, model: str, prompt: str, **more: object) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": GENERATED, "ignore_eos": True}
    status, found = post(url, body | {"temperature": 0} | more)
    assert status == 200, found
    tokens: list[int] = json.loads(found)["choices"][0]["token_ids"]
    return tokens


def processed(apart: Running) -> dict[str, int]:
    """Return how many tokens each node of the split service has worked on, once it is at rest."""
    before: dict[str, int] = {}
    while True:
        nodes: list[Json] = json.loads(get(f"{apart.instance_url}/atoll/v1/status")[1])["nodes"]
        now = {n["name"]: n["stats"]["tokens"] for n in nodes if n["stats"]}
        if now == before and len(now) == len(nodes):
            return now
        before = now
        time.sleep(0.6)


@pytest.mark.parametrize("more", [{}, {"temperature": 0.9, "seed": 3}])
def test_split_phases_give_the_tokens_of_the_whole_model(
    apart: Running, running: Running, more: Json
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        split = list(pool.map(lambda p: answer(apart.fleet.url, APART, p, **more), PROMPTS))
    assert split == [answer(running.fleet.url, "tiny", p, **more) for p in PROMPTS]
    assert all(len(tokens) == GENERATED for tokens in split)
    assert len({tuple(tokens) for tokens in split}) == len(PROMPTS)


def test_kv_moves_instead_of_being_computed_again(apart: Running) -> None:
    prompts = [f"{letter * 200}" for letter in "abcd"]
    before = processed(apart)
    for prompt in prompts:
        answer(apart.fleet.url, APART, prompt)
    after = processed(apart)
    done = {name: after[name] - before[name] for name in after}
    asked = sum(map(len, prompts))
    for node in ("prefill-0/n0", "prefill-0/n1"):
        assert done[node] >= asked
    for node in ("decode-0/n0", "decode-0/n1"):
        # Health checks may add a token or two; computing one prompt again would add 200.
        assert 0 < done[node] <= len(prompts) * GENERATED


def test_every_line_of_every_log_says_that_weights_stand_in(apart: Running) -> None:
    logs = sorted(apart.fleet.home.folder.glob("*.log"))
    named = {log.name.removesuffix(".log") for log in logs}
    assert {"prefill-0.n0", "decode-0.n1", APART} <= named
    for log in logs:
        lines = log.read_text(encoding="utf-8").splitlines()
        assert lines, log
        assert all(line.startswith(f"[stand-in, {STAND_IN}] ") for line in lines), lines


def test_nodes_are_told_the_promise_and_the_limits_of_the_plan(apart: Running) -> None:
    for process in ("prefill-0.n0", "decode-0.n1"):
        path = apart.fleet.home.folder / f"{process}.json"
        told = json.loads(path.read_text(encoding="utf-8"))
        assert (told["promised_ttft_s"], told["max_sequences"]) == (0.5, 2)
        assert told["token_budget"] == 64
