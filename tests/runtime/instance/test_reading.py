"""Long prompts: refused before they are tokenised, or tokenised where no stream waits for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("tokenizers", reason="needs the extra 'engine'")

from atoll.engine.engine_messages import NodeStats
from atoll.engine.text import TextCodec
from atoll.runtime import openai
from atoll.runtime.http.handlers import Response
from atoll.runtime.http.http_client import HttpResponse, request
from atoll.runtime.http.http_server import Request
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.instance_config import InstanceConfig, InstancePart
from atoll.runtime.instance.instance_server import InstanceServer
from atoll.runtime.openai import ApiError
from tests.runtime.local.test_placing import instance

LONGEST = 1000
TOKEN_CHARS = 100
LONG_TEXT = "long " * 10_000


class Tokenizer:
    """A letter a token; notes what it was given and where, and waits at `gate` over long texts."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.texts: list[str] = []
        self.threads: list[threading.Thread] = []

    def get_vocab(self) -> dict[str, int]:
        return {"x" * TOKEN_CHARS: 0}

    def encode(self, text: str, **more: Any) -> Any:
        self.texts.append(text)
        self.threads.append(threading.current_thread())
        if text == LONG_TEXT:
            self.begun.set()
            assert self.gate.wait(30)
        return type("Encoding", (list,), {"ids": property(list)})(range(1, 6))

    def encode_batch_fast(self, texts: Sequence[str], **more: Any) -> list[Any]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int], **more: Any) -> str:
        return "x" * len(tokens)


class Codec(TextCodec):
    """The codec without a folder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = cast("Any", tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._config = {"max_position_embeddings": LONGEST, "vocab_size": 300}
        self._settings = {}
        self._template = cast("Any", Template())
        self.eos = (0,)


class Template:
    """A chat template that joins what was said."""

    def render(self, messages: list[dict[str, str]], **more: Any) -> str:
        return "".join(message["content"] for message in messages)


def completion(prompt: object, **more: object) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt} | more).encode()


def chat(*texts: str) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages}).encode()


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    found = Tokenizer()
    yield found
    found.gate.set()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", completion("x" * 200_000), "prompt"),
        ("/v1/completions", completion(["x" * 200_000]), "prompt"),
        ("/v1/completions", completion([1] * 200_000), "prompt"),
        ("/v1/completions", completion([[1] * 200_000]), "prompt"),
        ("/v1/chat/completions", chat("x" * 200_000), "messages"),
        ("/v1/chat/completions", chat(*["x" * 100] * 1001), "messages"),
    ],
)
def test_what_cannot_fit_never_reaches_the_tokenizer(
    tokenizer: Tokenizer, path: str, body: bytes, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        requests.read(path, body, Codec(tokenizer), LONGEST)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == "context_length_exceeded"
    assert tokenizer.texts == []


@pytest.mark.parametrize("resume", [{"text": "x" * 200_000}, {"token_ids": [1] * 200_000}])
def test_nor_does_an_answer_that_cannot_have_been_given(
    tokenizer: Tokenizer, resume: dict[str, object]
) -> None:
    body = completion("short", atoll={"resume": resume})
    with pytest.raises(ApiError) as caught:
        requests.read("/v1/completions", body, Codec(tokenizer), LONGEST)
    assert caught.value.param == "atoll.resume"
    assert tokenizer.texts == ["short"]


def test_many_prompts_are_refused_at_once(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="at most 16"):
        requests.read("/v1/completions", completion(["x"] * 17), Codec(tokenizer), LONGEST)
    with pytest.raises(ApiError, match="mixed"):
        requests.read("/v1/completions", completion([1, "x"]), Codec(tokenizer), LONGEST)
    with pytest.raises(ApiError, match="mixed"):
        requests.read("/v1/completions", completion(["x", 1]), Codec(tokenizer), LONGEST)


@pytest.mark.parametrize("part", [b"[1]", b"[]"])
def test_a_large_body_of_nothing_but_brackets_is_not_decoded(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast("Any", openai._DECODERS), "/v1/completions", None)
    body = b'{"model":"m","prompt":[%b1]}' % ((part + b",") * 600_000)
    with pytest.raises(ApiError, match="too many parts"):
        openai.read_request("/v1/completions", body)


@pytest.mark.parametrize("part", [b"1", b'"a"'])
def test_nor_is_a_list_far_longer_than_the_model_takes(
    tokenizer: Tokenizer, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "_DECODERS", {})
    body = b'{"model":"m","prompt":[%b%b]}' % ((part + b",") * 600_000, part)
    with pytest.raises(ApiError, match="more than") as caught:
        requests.read("/v1/completions", body, Codec(tokenizer), LONGEST)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "more",
    [
        {"guided_regex": "x" * 100_000},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"description": "x" * 100_000}},
            }
        },
    ],
)
def test_a_guide_that_takes_a_node_long_to_read_is_refused(
    tokenizer: Tokenizer, more: dict[str, object]
) -> None:
    with pytest.raises(ApiError, match="a guide has at most") as caught:
        requests.read("/v1/completions", completion("a", **more), Codec(tokenizer), LONGEST)
    assert caught.value.param in more


def test_a_bias_for_a_number_without_end_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match=r"logit_bias: .* of length <= 32"):
        requests.read(
            "/v1/completions",
            completion("a", logit_bias={"9" * 5000: 1}),
            Codec(tokenizer),
            LONGEST,
        )


def make_server(tokenizer: Tokenizer) -> InstanceServer:
    placed = instance([(0, 4)], "a")
    inboxes = {node.id: f"ipc:///nowhere/{node.id}" for node in placed.nodes}
    config = InstanceConfig(
        name="a",
        model="m",
        models=("m",),
        parts=(InstancePart(instance=placed, inboxes=inboxes),),
        port=0,
    )
    return InstanceServer(config, Codec(tokenizer))


def test_a_long_prompt_is_tokenised_outside_of_the_event_loop(tokenizer: Tokenizer) -> None:
    async def go() -> None:
        server = make_server(tokenizer)
        host, port = await server.start()
        url = f"http://{host}:{port}"

        async def ask(model: str, prompt: str) -> HttpResponse:
            body = {"model": model, "prompt": prompt}
            return await request(f"{url}/v1/completions", body=body, timeout_s=30)

        try:
            long = asyncio.create_task(ask("other", LONG_TEXT))
            await asyncio.to_thread(tokenizer.begun.wait, 30)
            # While the tokenizer is at it, others are served, those with prompts included.
            for number in range(20):
                assert (await ask("other", f"short {number}")).status == 404
                assert (await request(f"{url}/v1/models")).status == 200
            assert not long.done()
            tokenizer.gate.set()
            assert (await long).status == 404
        finally:
            tokenizer.gate.set()
            await server.close(0)

    asyncio.run(go())
    where = dict(zip(tokenizer.texts, tokenizer.threads, strict=True))
    assert where.pop(LONG_TEXT) is not threading.main_thread()
    assert set(where.values()) == {threading.main_thread()}


def test_a_client_that_leaves_does_not_keep_a_thread_waiting(tokenizer: Tokenizer) -> None:
    async def go() -> None:
        server = make_server(tokenizer)
        asked = Request(b"POST", b"/v1/completions", {})
        asked.body = completion(LONG_TEXT)
        try:
            first = [asyncio.ensure_future(server.handle(asked)) for _ in range(2)]
            await asyncio.to_thread(tokenizer.begun.wait, 30)
            waiting = [asyncio.ensure_future(server.handle(asked)) for _ in range(10)]
            await asyncio.sleep(0)
            for task in (*waiting, *first):
                task.cancel()
            await asyncio.gather(*waiting, *first, return_exceptions=True)
            tokenizer.gate.set()
            page = await server.handle(Request(b"GET", b"/v1/models", {}))
            assert isinstance(page, Response)
        finally:
            tokenizer.gate.set()
            await server.close(0)

    asyncio.run(go())
    assert tokenizer.texts.count(LONG_TEXT) <= 2


async def test_prompts_are_held_to_the_room_that_nodes_have(tokenizer: Tokenizer) -> None:
    """A node would refuse it, and a gateway would hold that against the node."""

    server = make_server(tokenizer)
    try:
        assert server.max_length == LONGEST
        stats = NodeStats(
            name="a/n0",
            endpoint="ipc:///nowhere/n0",
            incarnation=1,
            start=0,
            end=4,
            block_size=4,
            blocks=10,
        )
        server.scheduler._core._stats["a/n0"] = stats
        assert server.max_length == 40
        asked = Request(b"POST", b"/v1/completions", {})
        asked.body = completion([1] * 40)
        with pytest.raises(ApiError) as caught:
            await server.handle(asked)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    finally:
        await server.close(0)
