"""Vectors in messages over HTTP: read exactly, refused by name, served by nodes of uneven layers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("tokenizers", reason="needs the extra 'engine'")

from atoll.components.base import BadInputError
from atoll.runtime.http.http_client import request
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.instance_config import InstanceConfig, InstancePart, engine_name
from atoll.runtime.instance.vectors import read_vectors, write_vectors
from atoll.runtime.openai import ApiError
from tests.engine.tokens import write_tokenizer
from tests.runtime.local.test_placing import instance

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(rows=st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_what_is_written_is_read_bit_for_bit(rows: list[list[float]]) -> None:
    sent = np.array(rows, np.float32)
    field = json.loads(json.dumps(write_vectors(sent)))
    assert read_vectors(field, 3, 5, "p").tobytes() == sent.tobytes()


def test_half_precision_is_read_too() -> None:
    sent = np.array([[0.5, -2.0], [1e-3, 65504]], np.float16)
    data = base64.b64encode(sent.tobytes()).decode()
    found = read_vectors({"shape": [2, 2], "dtype": "float16", "data": data}, 2, 9, "p")
    assert found.dtype == np.float32
    assert np.array_equal(found, sent)


GOOD = write_vectors(np.ones((2, 3), np.float32))
NAN = write_vectors(np.full((2, 3), np.nan, np.float32))


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (None, "p"),
        ([1.0], "p"),
        (GOOD | {"dtype": "int8"}, "p.dtype"),
        (GOOD | {"dtype": ["float32"]}, "p.dtype"),
        (GOOD | {"shape": [6]}, "p.shape"),
        (GOOD | {"shape": [2.0, 3]}, "p.shape"),
        (GOOD | {"shape": [True, 3]}, "p.shape"),
        (GOOD | {"shape": [3, 2]}, "p.shape"),
        (GOOD | {"shape": [0, 3]}, "p.shape"),
        (GOOD | {"shape": [10**9, 3]}, "p.shape"),
        (GOOD | {"shape": [1, 3]}, "p.data"),
        (GOOD | {"data": GOOD["data"][:-4]}, "p.data"),
        (GOOD | {"data": "!" * len(GOOD["data"])}, "p.data"),
        (GOOD | {"data": "=" * len(GOOD["data"])}, "p.data"),
        (GOOD | {"data": "é" * len(GOOD["data"])}, "p.data"),
        (GOOD | {"data": None}, "p.data"),
        (NAN, "p.data"),
    ],
)
def test_nonsense_is_refused_and_named(field: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_vectors(field, 3, 9, "p")
    assert (caught.value.status, caught.value.param) == (400, param)


def body(*parts: Any, **more: Any) -> bytes:
    messages = [{"role": "user", "content": list(parts)}]
    return json.dumps({"model": "m", "messages": messages} | more).encode()


def part(rows: Any) -> dict[str, Any]:
    return {"type": "embeds", "embeds": write_vectors(rows)}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from atoll.engine.text import TextCodec

    folder = tmp_path_factory.mktemp("codec")
    config = {"max_position_embeddings": 64, "num_hidden_layers": 4, "vocab_size": 264}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 3}))
    write_tokenizer(folder)
    return TextCodec(folder)


def test_vectors_stand_where_their_part_stands(codec: Any) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    text = {"type": "text", "text": "the"}
    sent = body(text, part(rows[:2]), text, part(rows[2:]), n=2, atoll={})
    parsed = requests.read("/v1/chat/completions", sent, codec, 64)
    first, second = parsed.choices
    assert first.embeds is not None
    assert second.embeds is first.embeds
    word = codec.encode("the", special=False)
    assert len(word) == 1
    start = codec.encode("<|user|>", special=False)
    end = codec.encode("<|end|><|assistant|>", special=False)
    assert list(first.prompt) == [*start, *word, 0, 0, *word, 0, 0, *end]
    assert first.embeds.positions.tolist() == [2, 3, 5, 6]
    assert np.array_equal(first.embeds.rows, rows)


def test_a_resumed_answer_keeps_the_vectors_of_its_prompt(codec: Any) -> None:
    sent = body(part(np.ones((2, 3))), atoll={"resume": {"token_ids": [5], "text": "x"}})
    (choice,) = requests.read("/v1/chat/completions", sent, codec, 64).choices
    assert choice.generated == (5,)
    assert choice.embeds is not None


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([part(np.ones((2, 4)))], "messages[0].content[0].embeds.shape"),
        ([{"type": "text", "text": "a"}, part(np.full((1, 3), np.inf))],
         "messages[0].content[1].embeds.data"),
        ([part(np.ones((40, 3))), part(np.ones((40, 3)))], "messages"),
        ([part(np.ones((64, 3)))], "messages"),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "messages.content"),
        ([{"type": "embeds"}], "messages[0].content[0].embeds"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_answered_with_400(
    codec: Any, parts: list[Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        requests.read("/v1/chat/completions", body(*parts), codec, 64)
    assert (caught.value.status, caught.value.param) == (400, param)


@contextlib.contextmanager
def node_threads(folder: Any, cuts: list[tuple[int, int]]) -> Iterator[dict[str, str]]:
    """Run nodes of uneven layers in threads; yields their inboxes."""
    from atoll.engine.node import NodeConfig, NodeProcess

    nodes = [
        NodeProcess(
            NodeConfig(
                name=engine_name("a", f"n{number}"),
                model=str(folder),
                start=start,
                end=end,
                kv_blocks=64,
                block_size=4,
                chunk=5,
            )
        )
        for number, (start, end) in enumerate(cuts)
    ]
    threads = [threading.Thread(target=node.run) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        yield {f"n{number}": node.ready.endpoint for number, node in enumerate(nodes)}
    finally:
        for node in nodes:
            node.stop(at_once=True)
        for thread in threads:
            thread.join()


@pytest.mark.engine
def test_an_instance_over_uneven_nodes_answers_to_vectors(tmp_path: Any) -> None:
    pytest.importorskip("torch", reason="needs the extra 'engine'")
    from atoll.engine.text import TextCodec
    from atoll.runtime.executor.openai_chat import OpenAiChat
    from atoll.runtime.instance.instance_server import InstanceServer
    from tests.engine.chatting import TinyChat

    model = TinyChat(tmp_path)
    codec = TextCodec(tmp_path)
    cuts = [(0, 1), (1, 4)]
    inner = codec.encode("or the word, and then the other word", special=False)
    prompt = [
        *codec.encode("<|user|>the ", special=False),
        *inner,
        *codec.encode(".<|end|><|assistant|>", special=False),
    ]

    async def talk(url: str) -> None:
        rows = model.own_rows(inner)
        texts = [{"type": "text", "text": text} for text in ("the ", ".")]
        asked = {"model": "m", "temperature": 0, "max_tokens": 10, "ignore_eos": True}
        for sent in (part(rows), part(-rows), part(rows)):
            content = [texts[0], sent, texts[1]]
            question = asked | {"messages": [{"role": "user", "content": content}]}
            answer = await request(f"{url}/chat/completions", body=question, timeout_s=60)
            assert answer.status == 200, answer.body
            data = json.loads(answer.body)
            tokens = data["choices"][0]["token_ids"]
            assert (tokens == model.answer(prompt, 10)) == (sent == part(rows))
            assert data["usage"]["prompt_tokens"] == len(prompt)
        wrong = asked | {"messages": [{"role": "user", "content": [part(rows[:, 1:])]}]}
        refused = await request(f"{url}/chat/completions", body=wrong, timeout_s=60)
        assert refused.status == 400
        assert json.loads(refused.body)["error"]["param"] == "messages[0].content[0].embeds.shape"
        # The same through the component that an executor would run.
        component: Any = OpenAiChat(url, "m", embeds="atoll")
        content = [texts[0], {"type": "embeds", "embeds": rows}, texts[1]]
        inputs = {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": 10,
        }
        *pieces, done = [piece async for piece in component.stream(inputs)]
        tokens = [token for piece in pieces for token in piece["token_ids"]]
        assert tokens == model.answer(prompt, 10)[: len(tokens)]
        narrow = [{"type": "embeds", "embeds": rows[:, 1:]}]
        failing = component.stream(inputs | {"messages": [{"role": "user", "content": narrow}]})
        with pytest.raises(BadInputError, match="32 wide") as caught:
            _ = [piece async for piece in failing]
        assert caught.value.param == "messages[0].content[0].embeds.shape"
        half = pieces[: len(pieces) // 2]
        known = {
            "text": "".join(piece["text"] for piece in half),
            "token_ids": [token for piece in half for token in piece["token_ids"]],
        }
        *rest, again = [p async for p in component.stream(inputs | {"resume": known})]
        assert again == done
        assert [t for p in rest for t in p["token_ids"]] == tokens[len(known["token_ids"]) :]

    async def go(inboxes: dict[str, str]) -> None:
        placed = instance(cuts, "a")
        config = InstanceConfig(
            name="a",
            model=str(tmp_path),
            models=("m",),
            parts=(InstancePart(instance=placed, inboxes=inboxes),),
            port=0,
        )
        server = InstanceServer(config, codec)
        host, port = await server.start()
        try:
            await asyncio.wait_for(talk(f"http://{host}:{port}/v1"), 120.0)
        finally:
            await server.close(0)

    with node_threads(tmp_path, cuts) as inboxes:
        asyncio.run(go(inboxes))
