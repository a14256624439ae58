"""Embeddings: what is asked, how vectors are pooled and written."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("tokenizers", reason="needs the extra 'engine'")

from atoll.engine.engine_errors import EngineError
from atoll.runtime.instance import pooling
from atoll.runtime.instance.pooling import (
    AT_A_TIME,
    ParsedEmbedding,
    Vector,
    embed,
    find_pooling,
    read_embedding,
)
from atoll.runtime.openai import ApiError
from tests.runtime.instance.codecs import PlainCodec

CODEC = PlainCodec(["<s>"], begin="<s>", longest=10)
_ST = "sentence_transformers.models"


def read(given: object, **more: object) -> ParsedEmbedding:
    body = json.dumps({"model": "m", "input": given} | more).encode()
    return read_embedding(body, CODEC, CODEC.max_length)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("ab", ((200, 97, 98),)),
        (["ab", "c"], ((200, 97, 98), (200, 99))),
        ([97, 98], ((97, 98),)),
        ([[97], [98, 99]], ((97,), (98, 99))),
        (["a", [98]], ((200, 97), (98,))),
        ([7] * 10, ((7,) * 10,)),
    ],
)
def test_inputs(given: object, inputs: object) -> None:
    assert read(given).inputs == inputs


@pytest.mark.parametrize(
    ("given", "more", "param"),
    [
        ("", {}, "input"),
        ([], {}, "input"),
        ([""], {}, "input"),
        ([[]], {}, "input"),
        ([1, "a"], {}, "input"),
        ([300], {}, "input"),
        ([[300]], {}, "input"),
        ("x" * 10, {}, "input"),
        ("x" * 10**6, {}, "input"),
        ([7] * 11, {}, "input"),
        (["a"] * 2049, {}, "input"),
        ("a", {"dimensions": 5}, "dimensions"),
        ("a", {"dimensions": 0}, "dimensions"),
        ("a", {"encoding_format": "hex"}, "encoding_format"),
        ("a", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
def test_nonsense(given: object, more: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(given, **more)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_all_inputs_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MAX_TOKENS", 20)
    assert read([[7] * 10] * 2).tokens == 20
    with pytest.raises(ApiError, match="at most 20 tokens"):
        read([[7] * 10, [7] * 10, [7]])


def answer(parsed: ParsedEmbedding, vectors: dict[tuple[int, ...], Vector]) -> Any:
    async def pool(tokens: tuple[int, ...]) -> Vector:
        await asyncio.sleep(0)
        return vectors[tokens]

    return json.loads(asyncio.run(embed(parsed, pool)))


def test_answers_are_those_of_openai() -> None:
    one, two = np.array([0.6, 0.8, 0, 0], np.float32), np.array([0, 0, 1, 0], np.float32)
    found = answer(read([[1], [2, 3]]), {(1,): one, (2, 3): two})
    assert found["object"] == "list"
    assert found["model"] == "m"
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [(e["object"], e["index"]) for e in found["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    assert found["data"][0]["embedding"] == pytest.approx([0.6, 0.8, 0, 0])
    found = answer(read([1], encoding_format="base64", dimensions=2), {(1,): two})
    raw = base64.b64decode(found["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == [0.0, 0.0]


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4), st.integers(1, 4), st.booleans()
)
def test_a_shorter_vector_is_of_length_one_again(
    numbers: list[float], dimensions: int, as_base64: bool
) -> None:
    vector = np.array(numbers, np.float32)
    form = "base64" if as_base64 else "float"
    parsed = read([1], encoding_format=form, dimensions=dimensions)
    shown = answer(parsed, {(1,): vector})["data"][0]["embedding"]
    if as_base64:
        shown = np.frombuffer(base64.b64decode(shown), "<f4").tolist()
    assert len(shown) == dimensions
    cut = vector[:dimensions].astype(np.float64)
    if dimensions < 4 and np.linalg.norm(cut) > 1e-6:
        assert np.linalg.norm(shown) == pytest.approx(1.0, abs=1e-5)
        assert np.dot(shown, cut) == pytest.approx(np.linalg.norm(cut), rel=1e-4)


def test_inputs_go_to_the_nodes_a_few_at_a_time() -> None:
    running = most = 0

    async def pool(tokens: tuple[int, ...]) -> Vector:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return np.ones(4, np.float32)

    asyncio.run(embed(read([[7]] * 100), pool))
    assert most == AT_A_TIME


def test_one_that_fails_ends_them_all() -> None:
    ended: list[str] = []

    async def pool(tokens: tuple[int, ...]) -> Vector:
        if tokens == (2,):
            raise ApiError(400, "no")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise AssertionError

    with pytest.raises(ApiError, match="no"):
        asyncio.run(embed(read([[1], [2], [3]]), pool))
    assert ended == ["cancelled", "cancelled"]


def write(folder: Path, modules: object, config: object) -> Path:
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps(config))
    return folder


_LISTED = [
    {"type": f"{_ST}.Transformer", "path": ""},
    {"type": f"{_ST}.Pooling", "path": "1_Pooling"},
    {"type": f"{_ST}.Normalize", "path": "2_Normalize"},
]


@pytest.mark.parametrize(
    ("modules", "config", "expected"),
    [
        (None, None, "last"),
        (_LISTED, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        (_LISTED, {"pooling_mode_mean_tokens": True}, "mean"),
        (None, {"pooling_mode_mean_tokens": True}, "mean"),
        (_LISTED, {"pooling_mode_cls_token": True}, "first"),
        (_LISTED, {"pooling_mode": "lasttoken"}, "last"),
        (_LISTED, None, "last"),
    ],
)
def test_a_folder_says_how_it_is_pooled(
    tmp_path: Path, modules: object, config: object, expected: str
) -> None:
    assert find_pooling(write(tmp_path, modules, config)) == expected


@pytest.mark.parametrize(
    ("modules", "config", "why"),
    [
        ([*_LISTED, {"type": f"{_ST}.Dense", "path": "2_Dense"}], None, "Dense"),
        (_LISTED, {"pooling_mode_max_tokens": True}, "max_tokens"),
        (_LISTED, {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "mean"),
        (_LISTED, {"pooling_mode": "weightedmean"}, "weightedmean"),
        ([{"type": f"{_ST}.Pooling", "path": "../.."}], None, "outside"),
    ],
)
def test_a_folder_that_wants_something_else_is_not_served_otherwise(
    tmp_path: Path, modules: object, config: object, why: str
) -> None:
    with pytest.raises(EngineError, match=why):
        find_pooling(write(tmp_path, modules, config))
