"""Texts as vectors: near ones are near, batches change nothing, and transformers agrees."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.components.base import BadInputError, Setup
from atoll.components.component_weights import MINILM
from atoll.components.minilm import MAX_TOKENS, MiniLm
from atoll.core.errors import AtollError
from tests.components.asking import ask

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEXTS = (
    "A man is playing the guitar.",
    "Somebody makes music on a guitar, and he seems to enjoy it a great deal.",
    "The stock market fell by three percent.",
)


@pytest.fixture(scope="module")
def minilm() -> MiniLm:
    pytest.importorskip("torch", reason="needs the extra 'engine'")
    try:
        return MiniLm.load(Setup())
    except AtollError as error:
        pytest.skip(f"the model cannot be fetched: {error}")


def embed(minilm: MiniLm, *texts: str) -> NDArray[np.float32]:
    outputs = ask(minilm, *[{"text": text} for text in texts])
    return np.stack([output["embedding"] for output in outputs])


def test_near_texts_are_near(minilm: MiniLm) -> None:
    vectors = embed(minilm, *TEXTS)
    assert vectors.shape == (3, 384)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    near, far, farther = vectors[0] @ vectors[1], vectors[0] @ vectors[2], vectors[1] @ vectors[2]
    assert near > 0.5
    assert max(far, farther) < 0.2


def test_a_batch_changes_nothing(minilm: MiniLm) -> None:
    together = embed(minilm, *TEXTS, "x " * 500)
    for text, vector in zip(TEXTS, together, strict=False):
        assert abs(embed(minilm, text)[0] - vector).max() < 1e-5


def test_long_texts_are_cut_off_and_counted(minilm: MiniLm) -> None:
    (short,) = ask(minilm, {"text": "one two three"})
    assert short["tokens"] == 5
    (long,) = ask(minilm, {"text": "word " * 1000})
    assert long["tokens"] == MAX_TOKENS
    (longer,) = ask(minilm, {"text": "word " * 100_000})
    assert np.array_equal(longer["embedding"], long["embedding"])


def test_what_is_no_text(minilm: MiniLm) -> None:
    outputs = ask(minilm, {"text": ""}, {"text": "fine"}, {"text": 5}, {}, {"text": "\ud800"})
    assert [isinstance(output, BadInputError) for output in outputs] == [
        *(True, False, True, True, True),
    ]
    assert {output.param for output in outputs if isinstance(output, BadInputError)} == {"text"}
    assert abs(outputs[1]["embedding"] - embed(minilm, "fine")[0]).max() < 1e-6
    assert isinstance(ask(minilm, {})[0], BadInputError)
    assert ask(minilm, minilm.example())[0]["tokens"] == 4


def test_transformers_agrees(minilm: MiniLm) -> None:
    import torch
    from transformers import AutoTokenizer, BertModel

    folder = MINILM.file("config.json").parent
    model = BertModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, "Ünïcödé, 東京 — and a very\tlong wordwordwordword"):
        encoded = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            mean = model(**encoded).last_hidden_state.mean(1)
        wanted = torch.nn.functional.normalize(mean, dim=-1)[0].numpy()
        assert abs(embed(minilm, text)[0] - wanted).max() < 1e-5
