"""Guides mask what may not come next, and bad guides are errors of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")
pytest.importorskip("llguidance", reason="needs the extra 'engine'")

import torch

from atoll.core.request_parameters import OutputFormat, SamplingParams
from atoll.engine.engine_errors import EngineError
from atoll.engine.engine_messages import FINISH_CODES
from atoll.engine.guidance import MatcherFactory, check_guide
from atoll.engine.guide_trial import is_harmless
from atoll.engine.text import TextCodec
from atoll.engine.token_sampling import Sampler
from tests.engine.tokens import write_tokenizer

pytestmark = pytest.mark.engine
VOCABULARY = 264


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("guides")
    write_tokenizer(folder, VOCABULARY)
    return TextCodec(folder)


def guides(codec: TextCodec) -> MatcherFactory:
    return MatcherFactory(codec.folder, VOCABULARY, codec.eos)


def answer(codec: TextCodec, guide: OutputFormat, given: list[int]) -> tuple[str, str | None]:
    """Follow a guide with random logits after `given` tokens of the answer."""
    params = SamplingParams(max_tokens=60, guide=guide)
    chooser = Sampler(params, codec.eos, [1, *given], 1, guides(codec))
    generator = torch.Generator().manual_seed(3)
    while True:
        choice = chooser.choose(torch.randn(VOCABULARY, generator=generator))
        if choice.finish:
            return codec.decode(chooser.tokens[1:]), FINISH_CODES[choice.finish]


def test_a_regular_expression_is_followed(codec: TextCodec) -> None:
    import re

    text, finish = answer(codec, OutputFormat(kind="regex", text="[0-9]{3}-(the|or)"), [])
    assert re.fullmatch("[0-9]{3}-(the|or)", text)
    assert finish == "stop"


def test_a_resumed_answer_goes_on_where_it_was(codec: TextCodec) -> None:
    given = codec.encode("12")
    text, _ = answer(codec, OutputFormat(kind="regex", text="[0-9]{3}-or"), given)
    assert text[:2] == "12"
    assert text.endswith("-or")
    assert len(text) == 6


def test_a_schema_is_followed(codec: TextCodec) -> None:
    import json

    schema = '{"type":"object","properties":{"a":{"enum":[1,22]}},"required":["a"],'
    schema += '"additionalProperties":false}'
    text, _ = answer(codec, OutputFormat(kind="json_schema", text=schema), [])
    assert json.loads(text)["a"] in (1, 22)


@pytest.mark.parametrize(
    "guide",
    [
        OutputFormat(kind="regex", text="[0-9"),
        OutputFormat(kind="json_schema", text="{not json"),
        OutputFormat(kind="json_schema", text='{"type": "no such type"}'),
        OutputFormat(kind="json_schema", text="false"),
        OutputFormat(kind="json_schema", text='{"a":' * 500 + "1" + "}" * 500),
        OutputFormat(kind="lark", text="start: nobody\n\nknows this"),
    ],
)
def test_a_guide_that_is_none_is_refused_in_one_line(codec: TextCodec, guide: OutputFormat) -> None:
    with pytest.raises(EngineError, match="guide"):
        guides(codec).matcher(guide)
    with pytest.raises(EngineError, match="guide") as caught:
        check_guide(guides(codec), guide)
    assert "\n" not in str(caught.value)


def test_a_grammar_is_followed_and_checked(codec: TextCodec) -> None:
    guide = OutputFormat(kind="lark", text='start: "or" number\nnumber: %json {"enum": [7, 70]}')
    check_guide(guides(codec), guide)
    assert answer(codec, guide, [])[0] in ("or7", "or70")


def test_matchers_of_one_guide_do_not_share_their_state(codec: TextCodec) -> None:
    guide = OutputFormat(kind="regex", text="ab")
    first, second = guides(codec).matcher(guide), guides(codec).matcher(guide)
    first.feed(codec.encode("ab"))
    assert first.done
    assert not second.done


def test_without_a_tokenizer_guides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        MatcherFactory(tmp_path, 10).matcher(OutputFormat(kind="json_object"))


def test_a_tokenizer_that_cannot_guide_refuses_the_request(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(EngineError, match="cannot be guided"):
        MatcherFactory(tmp_path, 300).matcher(OutputFormat(kind="json_object"))


def combined(patterns: int) -> OutputFormat:
    """A short schema that takes hours: every pattern doubles what comes of the others."""
    every = [{"type": "string", "pattern": f".*a{i}.{{20}}b"} for i in range(patterns)]
    return OutputFormat(kind="json_schema", text=json.dumps({"allOf": every}))


@pytest.mark.slow
def test_a_guide_that_would_never_be_compiled_is_refused(codec: TextCodec) -> None:
    with pytest.raises(EngineError, match="too complex"):
        check_guide(guides(codec), combined(40))
    # The next one is not its victim, and what is wrong is still told.
    check_guide(guides(codec), OutputFormat(kind="regex", text="[ab]{3}"))
    with pytest.raises(EngineError, match="cannot be followed"):
        check_guide(guides(codec), OutputFormat(kind="regex", text="[ab"))


def test_plain_schemas_need_no_trial() -> None:
    plain = {
        "type": "object",
        "properties": {"pattern": {"type": "string"}, "allOf": {"anyOf": [{"const": {"not": 1}}]}},
    }
    assert is_harmless(plain)
    for key in ("pattern", "allOf", "$ref", "not", "patternProperties", "if"):
        assert not is_harmless({"properties": {"a": {"items": {key: "x"}}}})
