"""What the projector is trained and marked on (`tools/projector`): pictures, questions, prompts, answers."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")
pytest.importorskip("transformers", reason="needs the extra 'engine'")

import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.components.projector import Projector, ProjectorShape
from tests.seeds import examples
from tools.projector import evaluate
from tools.projector.bundle import unpack
from tools.projector.evaluate import Mark, examine, mark_rows, write, write_marks
from tools.projector.pictures import HELD_OUT, SIDE, Scene, draw_noise, draw_scene, render
from tools.projector.questions import ASKERS, Asker, ask, is_right
from tools.projector.samples import EXAMS, Batch, Prompt, assemble, training_batch

seeds = st.integers(0, 10**6)
bounded = examples(40)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_picture_does_not_depend_on_its_batch() -> None:
    scenes = [draw_scene(Random(seed)) for seed in range(6)]
    assert any(scene.grain for scene in scenes)
    assert any(len(scene.things) > 1 for scene in scenes)
    together = render(scenes, side=64)
    for scene, picture in zip(scenes, together, strict=True):
        assert torch.equal(render([scene], side=64)[0], picture)
    assert torch.equal(render(scenes[::-1], side=64), together.flip(0))
    assert render(scenes[:1]).shape == (1, 3, SIDE, SIDE)


def test_noise_is_normal_and_each_pictures_own() -> None:
    noise = draw_noise(torch.tensor([0, 1, 2**31 - 1]), 3 * 64 * 64)
    assert torch.isfinite(noise).all()
    assert noise.mean(dim=1).abs().max() < 0.03
    assert (noise.std(dim=1) - 1).abs().max() < 0.03
    assert (torch.corrcoef(noise) - torch.eye(3)).abs().max() < 0.03
    # Neighbours know nothing of each other either.
    assert (noise[:, 1:] * noise[:, :-1]).mean(dim=1).abs().max() < 0.03


@bounded
@given(seeds, st.booleans(), st.booleans())
def test_every_question_is_answered_by_its_own_answer(seed: int, new: bool, held: bool) -> None:
    rng = Random(seed)
    scene = draw_scene(rng, held_out=held)
    assert bool(HELD_OUT.intersection(scene.pairs())) == held
    for kind, (asker, _) in ASKERS.items():
        question = asker(scene, Asker(rng, new=new, held_out=held))
        if question is not None:
            assert question.kind == kind
            assert is_right(question, question.answer)
            assert not is_right(question, "I cannot see the picture.")
    assert ask(scene, Asker(rng)).kind in ASKERS


def test_an_answer_that_also_names_something_else_is_wrong() -> None:
    scene = draw_scene(Random(3))
    question = ASKERS["shape"][0](scene, Asker(Random(1)))
    assert question is not None
    other = "star" if question.key != "star" else "cross"
    assert is_right(question, f"I think it is a {question.key}.")
    assert not is_right(question, f"A {question.key} or a {other}.")


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_blocks_are_unpacked_as_gguf_does(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    weights = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    if kind == "F32":
        raw, wanted = weights.view(torch.uint8).flatten(), weights
    else:
        number = getattr(gguf.GGMLQuantizationType, kind)
        packed = gguf.quants.quantize(weights.numpy(), number)
        raw = torch.from_numpy(packed.copy()).flatten()
        wanted = torch.from_numpy(gguf.quants.dequantize(packed, number))
    assert torch.equal(unpack(kind, [4, 64], raw), wanted)


WIDTH, WORDS, END = 32, 40, 1


class TinyCodec:
    """Words as numbers; a prompt is its words, and a word that begins the answer."""

    eos = (END,)

    def number(self, word: str) -> int:
        return 3 + sum(map(ord, word)) % (WORDS - 3)

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class TinyMaker:
    """Makes prompts as PromptMaker does, without a tokenizer's files."""

    def __init__(self) -> None:
        self.codec: Any = TinyCodec()

    def make(self, question: Any, layout: str = "", system: str | None = None) -> Prompt:
        words = [self.codec.number(word) for word in question.text.split()]
        answer = [self.codec.number(word) for word in question.answer.split()]
        return Prompt((2,), (*words, 2), (*answer, END))

    def make_any(self, question: Any, rng: Random) -> Prompt:
        return self.make(question)


def look(scenes: list[Scene], *, exact: bool = False) -> torch.Tensor:
    """Return what an encoder might see: what it is does not matter here."""
    source = torch.Generator().manual_seed(scenes[0].seed)
    return torch.rand(len(scenes), 49, 1280, generator=source)


@pytest.fixture(scope="module")
def projector() -> Projector:
    torch.manual_seed(6)
    shape = ProjectorShape(outputs=WIDTH, hidden=32, slots=4)
    return Projector(shape).eval().requires_grad_(False)


def test_an_exam_counts_the_answers_that_are_right(projector: Projector) -> None:
    maker: Any = TinyMaker()

    def read(batch: Batch, embeds: torch.Tensor) -> torch.Tensor:
        """Know every answer, where there is something to be seen; else say the end."""
        logits = torch.zeros(len(batch.rows), WORDS)
        sighted = embeds.abs().sum(dim=(1, 2)) > 0
        for place, (row, target) in enumerate(
            zip(batch.rows.tolist(), batch.targets.tolist(), strict=True)
        ):
            logits[place, target if sighted[row] else 0] = 1
        return logits

    knowing: Any = SimpleNamespace(look=look, read=read)
    marks = examine(knowing, projector, maker, seed=1, batches=2, pictures=2, exams=EXAMS[:2])
    sights = {(mark.exam, mark.sight) for mark in marks}
    assert sights == {
        ("seen pairs", "picture"),
        ("seen pairs", "zeroed"),
        ("seen pairs", "another picture"),
        ("held-out pairs", "picture"),
    }
    for mark in marks:
        assert mark.exact == (0 if mark.sight == "zeroed" else mark.questions)
        assert mark.named is None
    for sight in sights:
        counted = [mark.questions for mark in marks if (mark.exam, mark.sight) == sight]
        assert sum(counted) == 2 * 2 * len(ASKERS)


def test_training_never_shows_a_held_out_pair() -> None:
    maker: Any = TinyMaker()
    batch = training_batch(maker, 1, 0, 16, 4, 4)
    assert not any(HELD_OUT.intersection(scene.pairs()) for scene in batch.scenes)
    again = training_batch(maker, 1, 0, 16, 4, 4)
    assert torch.equal(batch.tokens, again.tokens)
    for number, question in enumerate(batch.questions):
        said = batch.targets[batch.rows == number].tolist()
        assert said == list(maker.make(question).answer)
        columns = batch.columns[batch.rows == number].tolist()
        assert batch.tokens[number, columns[1:]].tolist() == said[:-1]


def test_prompts_of_unlike_lengths_are_padded() -> None:
    prompts = [Prompt((2,), (5, 6), (7, END)), Prompt((2, 3), (4,), (8, 9, END))]
    batch = assemble([], [], prompts, 3)
    assert batch.tokens.shape == (2, 16)
    assert batch.tokens[0].tolist() == [2, 0, 0, 0, 5, 6, 7, *[0] * 9]
    assert batch.gap.tolist() == [1, 2]
    assert batch.columns.tolist() == [5, 6, 5, 6, 7]


def test_marks_are_written_with_what_they_depend_on(tmp_path: Path) -> None:
    marks = [Mark("seen pairs", "picture", "colour", 4, 3, None)]
    rows = mark_rows(marks, date="D", device="cpu", projector="mixer", seed=2, pictures=4)
    write_marks(tmp_path / "marks.csv", rows)
    head, line = (tmp_path / "marks.csv").read_text().splitlines()
    assert head.startswith("date,torch,transformers,device,projector,seed,pictures,exam,sight,")
    assert line.startswith(f"D,{torch.__version__},")
    assert line.endswith(",cpu,mixer,2,4,seen pairs,picture,colour,4,3,")


@pytest.mark.parametrize("bad", [["--pictures", "1"], ["--batches", "0"], ["--exams", "none"]])
def test_bad_options_are_named(
    bad: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate", *bad])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "at least" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_are_written_as_if_each_were_alone(projector: Projector) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from atoll.components.efficientnet import LiteNetwork
    from tools.projector.model import Reader

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5,
        tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    llm = LlamaForCausalLM(config).eval().requires_grad_(False)
    reader = Reader(LiteNetwork().eval().requires_grad_(False), llm, "cpu")
    maker: Any = TinyMaker()
    batch = EXAMS[0].batch(maker, 1, 0, 4, 4)
    embeds = projector(look(batch.scenes)).repeat_interleave(batch.per_scene, dim=0)
    written = write(reader, maker, batch, embeds, 8)
    ended = 0
    for number, question in enumerate(batch.questions):
        prompt = maker.make(question)
        parts = [torch.tensor(part) for part in (prompt.before, prompt.after)]
        before, after = (torch.nn.functional.embedding(part, reader.table) for part in parts)
        inputs = torch.cat([before, embeds[number], after])
        said: list[int] = []
        while len(said) < 8:
            token = int(llm(inputs_embeds=inputs[None]).logits[0, -1].argmax())
            if token == END:
                ended += 1
                break
            said.append(token)
            inputs = torch.cat([inputs, reader.table[token][None]])
        assert written[number] == maker.codec.decode(said)
    assert len(set(written)) > 1
    assert 0 < ended < len(written)
