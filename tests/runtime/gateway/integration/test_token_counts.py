"""Engines that put several tokens into an event: streams that move are as long as was asked for."""

from __future__ import annotations

import asyncio
import itertools
from itertools import pairwise
from typing import Any

import pytest

from tests.runtime.gateway.engine import WORDS, Fault, ScriptedEngine, tokens_of
from tests.runtime.gateway.harness import CHAT, COMPLETIONS, Bench, Json, Reply, chat, running
from tests.seeds import slow_except

COUNTING = ("vllm", "sglang", "llamacpp")
PAIRS = (
    *(("vllm", "vllm"), ("sglang", "llamacpp"), ("llamacpp", "vllm")),
    *(("vllm", "atoll"), ("atoll", "sglang")),
)
TOKENS = 40


def asked(path: str, **more: Any) -> Json:
    body = chat(stream=True, max_tokens=TOKENS, ignore_eos=True, **more)
    return body if path == CHAT else body | {"prompt": "Once upon"}


def ask(path: str, body: Json, *kinds: str, deaths: int = 7) -> tuple[Reply, Bench]:
    """Ask over engines of these kinds, of which all but the last die after so many tokens."""

    async def go() -> tuple[Reply, Bench]:
        engines = [
            ScriptedEngine(kind=kind, batch=3, faults=[Fault("die", deaths)]) for kind in kinds
        ]
        engines[-1].faults.clear()
        async with running(engines) as bench:
            reply = await bench.post(path, body)
            await bench.settled()
            return reply, bench

    return asyncio.run(go())


def whole(path: str, body: Json, index: int) -> str:
    """The text of an answer that nothing disturbs."""
    answer = ScriptedEngine().words(path, body, index)
    return "".join([WORDS[word] for word, _ in answer if word is not None])


def texts(chunks: list[Json]) -> dict[int, str]:
    said: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
        said[choice["index"]] = said.get(choice["index"], "") + piece
    return said


def check_text(reply: Reply, bench: Bench, path: str, body: Json) -> None:
    n = body.get("n", 1)
    assert texts(reply.chunks) == {i: whole(path, body, i) for i in range(n)}
    assert bench.records[0].backends == tuple(f"e{i}" for i in range(len(bench.engines)))
    assert bench.records[0].completion_tokens == n * TOKENS
    assert not bench.records[0].estimated


@pytest.mark.parametrize(
    ("kind", "path", "n"),
    slow_except(
        [*((kind, CHAT, 1) for kind in COUNTING), *((kind, COMPLETIONS, 2) for kind in COUNTING)],
        itertools.product(COUNTING, (CHAT, COMPLETIONS), (1, 2)),
    ),
)
def test_no_token_is_asked_for_twice_and_nobody_sees_the_counts(
    kind: str, path: str, n: int
) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        body = asked(path, n=n, **options)
        reply, bench = ask(path, body, kind, kind)
        check_text(reply, bench, path, body)
        choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
        if path == CHAT:
            assert [c["index"] for c in choices if "role" in c["delta"]] == [*range(n)]
        counted = [c for c in reply.chunks if c["choices"] and c.get("usage")]
        timed = [c for c in reply.chunks if "timings" in c]
        assert not counted
        # llama.cpp says at the end how long it took, whoever asks.
        assert all(c["choices"][0]["finish_reason"] for c in timed)
        assert len(timed) == (n if kind == "llamacpp" else 0)
        assert len(reply.chunks[-1]["choices"]) == (0 if options else 1)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_left_is_asked_for_after_every_death(path: str) -> None:
    reply, bench = ask(path, body := asked(path), "vllm", "llamacpp", "sglang", "vllm", deaths=8)
    check_text(reply, bench, path, body)
    asked_for = [engine.seen[0].body["max_tokens"] for engine in bench.engines]
    # Two events of three tokens came from each.
    assert asked_for == [TOKENS, TOKENS - 6, TOKENS - 12, TOKENS - 18]


@pytest.mark.parametrize(
    ("kinds", "path", "n"),
    slow_except(
        [(PAIRS[0], COMPLETIONS, 2), *((kinds, CHAT, 1) for kinds in PAIRS)],
        itertools.product(PAIRS, (CHAT, COMPLETIONS), (1, 2)),
    ),
)
def test_who_asked_for_the_counts_has_those_of_the_whole_answer(
    kinds: tuple[str, ...], path: str, n: int
) -> None:
    body = asked(path, n=n, stream_options={"include_usage": True, "continuous_usage_stats": True})
    reply, bench = ask(path, body, *kinds)
    check_text(reply, bench, path, body)
    prompts = set()
    for number, chunk in enumerate(reply.chunks[:-1], 1):
        if chunk["choices"][0]["finish_reason"]:
            continue
        (index,) = (choice["index"] for choice in chunk["choices"])
        usage = chunk["usage"]
        assert usage["completion_tokens"] == tokens_of(texts(reply.chunks[:number])[index])
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        prompts.add(usage["prompt_tokens"])
        assert "timings" not in chunk
    last = reply.chunks[-1]
    assert not last["choices"]
    assert last["usage"]["completion_tokens"] == n * TOKENS
    assert prompts == {last["usage"]["prompt_tokens"]}


def test_timings_are_for_who_asked_for_them() -> None:
    reply, bench = ask(CHAT, body := asked(CHAT, timings_per_token=True), "llamacpp", "llamacpp")
    check_text(reply, bench, CHAT, body)
    assert all("timings" in c and "usage" not in c for c in reply.chunks)
    assert {len(engine.seen[0].raw.split(b"timings_per_token")) for engine in bench.engines} == {2}


@pytest.mark.parametrize("kind", ["openai", "atoll"])
def test_others_are_not_asked_for_what_they_may_not_know(kind: str) -> None:
    async def go() -> list[Json]:
        # The first fails before it answers: what it was asked is not what the second is.
        engines = [
            ScriptedEngine(kind="vllm", faults=[Fault("500")]),
            ScriptedEngine(kind=kind),
        ]
        async with running(engines) as bench:
            await bench.post(CHAT, asked(CHAT))
            return [engine.seen[0].body for engine in bench.engines]

    first, second = asyncio.run(go())
    assert first["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert second["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    "options",
    [
        {"include_usage": False},
        {"include_usage": True, "continuous_usage_stats": False},
        {"continuous_usage_stats": None},
        {},
        None,
    ],
)
def test_the_question_is_put_beside_what_the_client_asks(options: Json | None) -> None:
    body = asked(CHAT, stream_options=options, metadata={"stream_options": {"a": 1}})
    reply, bench = ask(CHAT, body, "vllm", "vllm")
    check_text(reply, bench, CHAT, body)
    assert not any(c["choices"] and c.get("usage") for c in reply.chunks)
    wanted = bool(options and options.get("include_usage"))
    assert bool(reply.chunks[-1].get("usage")) == wanted
    for engine in bench.engines:
        sent = engine.seen[0].body
        assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert sent["metadata"] == body["metadata"]


async def test_who_would_count_reasoning_again_and_again_names_tokens_instead() -> None:
    """vLLM with a reasoning parser reads an answer anew for each event with a usage."""
    engines = [ScriptedEngine(batch=3, reasons=True) for _ in range(2)]
    async with running(engines) as bench:
        for number in range(4):
            for engine in engines:
                # The first requests go one to each; from then on both are known.
                engine.faults[:] = [Fault("die", 7)] if number > 1 else []
            reply = await bench.post(CHAT, asked(CHAT))
            await bench.settled()
            told = [seen.body for engine in engines for seen in engine.seen]
            for engine in engines:
                engine.seen.clear()
                engine.faults.clear()
            known = number > 1
            assert texts(reply.chunks) == {0: whole(CHAT, asked(CHAT), 0)}
            # Both die once.
            assert len(told) == (3 if known else 1)
            assert [body.get("return_token_ids") for body in told] == [known or None] * len(told)
            for body in told:
                assert ("continuous_usage_stats" in body["stream_options"]) != known
            for chunk in reply.chunks:
                assert not {"usage", "prompt_token_ids"} & {*chunk}
                assert all("token_ids" not in choice for choice in chunk["choices"])
        # Who asks for either has it.
        reply = await bench.post(CHAT, asked(CHAT, return_token_ids=True))
        named = [c.get("token_ids", []) for chunk in reply.chunks for c in chunk["choices"]]
        assert sum(map(len, named)) == TOKENS
        assert reply.chunks[0]["prompt_token_ids"] == [7, 8, 9]
        options = {"include_usage": True, "continuous_usage_stats": True}
        reply = await bench.post(CHAT, asked(CHAT, stream_options=options))
        assert all("completion_tokens" in chunk["usage"] for chunk in reply.chunks)
        # Completions have no reasoning.
        reply = await bench.post(COMPLETIONS, asked(COMPLETIONS))
        last = [seen.body for engine in engines for seen in engine.seen if "prompt" in seen.body]
        assert "return_token_ids" not in last[0]


def test_tokens_are_written_down_as_the_engine_counts_them() -> None:
    """Of a stream that ends in nothing, the client has what its engine said."""
    reply, bench = ask(CHAT, asked(CHAT, temperature=1.0), "vllm", "openai")
    assert '"stream_interrupted"' in reply.events[-1]
    assert (bench.records[0].completion_tokens, bench.records[0].estimated) == (6, True)


def test_counts_of_an_answer_never_fall() -> None:
    reply, _ = ask(
        CHAT, asked(CHAT, stream_options={"continuous_usage_stats": True}), "vllm", "vllm", "vllm"
    )
    counts = [c["usage"]["completion_tokens"] for c in reply.chunks]
    assert all(a <= b for a, b in pairwise(counts))
    assert counts[-1] == TOKENS
