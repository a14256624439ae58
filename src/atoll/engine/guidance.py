"""Answers that must match a JSON schema, a regular expression or a grammar, by llguidance."""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from atoll.core.errors import MissingDependencyError
from atoll.core.request_parameters import OutputFormat
from atoll.engine.engine_errors import EngineError
from atoll.engine.guide_trial import GuideTrial, is_harmless

_MAX_ERROR_CHARS = 300
_SCHEMA = re.compile(r"%json (\{.*?\})(?: \"\}\")?$", re.MULTILINE)
"""A schema in a grammar of ours: it ends its line, or nothing but a bracket follows."""


class Matcher:
    """Follows one answer and says which tokens may come next."""

    def __init__(self, compiled: Any, vocabulary: int) -> None:
        from llguidance import numpy as masks

        self._masks = masks
        self._matcher = compiled
        self._mask = masks.allocate_token_bitmask(1, vocabulary)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(
                f"the guide cannot be followed: {_one_line(self._matcher.get_error())}"
            )

    def feed(self, tokens: Sequence[int]) -> None:
        """Take tokens of the answer."""
        for token in tokens:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(int(token))
                self._check()

    @property
    def done(self) -> bool:
        """Whether nothing more may follow."""
        return bool(self._matcher.is_stopped())

    def compute_allowed(self, vocabulary: int) -> Any:
        """Return a boolean NumPy array over the vocabulary: what may come next."""
        import numpy as np

        self._masks.fill_next_token_bitmask(self._matcher, self._mask, 0)
        self._check()
        bits = np.unpackbits(self._mask[0].view(np.uint8), bitorder="little")
        return bits[:vocabulary].astype(bool)


def _grammar(guide: OutputFormat) -> str:
    from llguidance import LLMatcher

    try:
        if guide.kind == "regex":
            return str(LLMatcher.grammar_from_regex(guide.text))
        if guide.kind == "lark":
            return str(LLMatcher.grammar_from_lark(guide.text))
        if guide.kind == "grammar":
            return str(LLMatcher.grammar_from_lark(_to_lark(guide.text)))
        schema = guide.text if guide.kind == "json_schema" else '{"type": "object"}'
        return str(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        raise EngineError(f"the guide is not a valid {guide.kind}: {error}") from error


def _to_lark(text: str) -> str:
    """Return a grammar in llguidance's syntax, if it is in llama.cpp's."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    # It reads what strangers write, and fails in many ways.
    except Exception as error:
        raise EngineError(f"the guide is not a valid grammar: {_one_line(str(error))}") from error


class MatcherFactory:
    """Makes matchers for one model; the tokenizer is read when the first is asked for."""

    def __init__(self, folder: str | Path, vocabulary: int, eos: Sequence[int] = ()) -> None:
        self.folder = Path(folder)
        self.vocabulary = vocabulary
        self.eos = tuple(eos)

    def matcher(self, guide: OutputFormat) -> Matcher:
        """Return a fresh matcher; a guide that cannot work is an EngineError."""
        path = self.folder / "tokenizer.json"
        compiled = _compile(path, self.vocabulary, self.eos, guide)
        # A copy: the compiled one is shared by all requests with this guide and stays at its beginning.
        return Matcher(compiled.deep_copy(), self.vocabulary)


def check_guide(
    matchers: MatcherFactory, guide: OutputFormat, generated: Sequence[int] = ()
) -> None:
    """Raise EngineError if no answer of the model can follow a guide, or none that begins like `generated`.

    Takes as long as compiling it, seconds for the worst, and lets other threads run meanwhile; what was
    compiled lately is not compiled again. What may never end is tried elsewhere first (`guide_trial`).
    """
    if guide.kind != "json_object" and not _is_harmless(guide):
        error = _try_elsewhere(matchers.folder, matchers.vocabulary, matchers.eos, guide)
        if error is not None:
            raise EngineError(error)
    matcher = compile_guide(matchers, guide)
    matcher.feed(generated)
    if not matcher.done and not matcher.compute_allowed(matchers.vocabulary).any():
        raise EngineError("the guide cannot be followed: nothing may come next")


def compile_guide(matchers: MatcherFactory, guide: OutputFormat) -> Matcher:
    """Return a matcher that can say what may come first; EngineError if there is nothing."""
    matcher = matchers.matcher(guide)
    if not matcher.done and not matcher.compute_allowed(matchers.vocabulary).any():
        raise EngineError("the guide cannot be followed: nothing may come first")
    return matcher


def _is_harmless(guide: OutputFormat) -> bool:
    """Return whether a guide compiles in about the time it takes to read it."""
    if guide.kind in ("regex", "grammar"):
        return False
    texts = _SCHEMA.findall(guide.text) if guide.kind == "lark" else [guide.text]
    # A schema that the pattern did not find has not been looked at.
    if guide.kind == "lark" and len(texts) != guide.text.count("%json"):
        return False
    try:
        return all(is_harmless(json.loads(text)) for text in texts)
    except (ValueError, RecursionError):
        return False


@lru_cache(maxsize=256)
def _try_elsewhere(
    folder: Path, vocabulary: int, eos: tuple[int, ...], guide: OutputFormat
) -> str | None:
    """Return what is wrong with a guide, for every request that brings it again."""
    return _trial(folder, vocabulary, eos).check(guide)


@lru_cache(maxsize=4)
def _trial(folder: Path, vocabulary: int, eos: tuple[int, ...]) -> GuideTrial:
    trial = GuideTrial(folder, vocabulary, eos)
    # It has a process of its own, which must not outlive this one.
    atexit.register(trial.close)
    return trial


@lru_cache(maxsize=64)
def _compile(path: Path, vocabulary: int, eos: tuple[int, ...], guide: OutputFormat) -> Any:
    """Return llguidance's matcher at its beginning, to be copied; many requests bring the same guide."""
    tokenizer = _tokenizer(path, vocabulary, eos)
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _grammar(guide), log_level=0)
    if matcher.is_error():
        raise EngineError(f"the guide cannot be followed: {_one_line(matcher.get_error())}")
    return matcher


def _one_line(text: str) -> str:
    """Return what an error says without the lines of the grammar it quotes."""
    return " ".join(text.split())[:_MAX_ERROR_CHARS]


@lru_cache(maxsize=4)
def _tokenizer(path: Path, vocabulary: int, eos: tuple[int, ...]) -> Any:
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise MissingDependencyError("llguidance", "engine", needed_for="guides") from error
    if not path.is_file():
        raise EngineError(f"guided answers need {path.name} beside the weights")
    try:
        return LLTokenizer(str(path), n_vocab=vocabulary, eos_token=list(eos) or None)
    except ValueError as error:
        # One request must not end the node.
        raise EngineError(f"answers of this model cannot be guided: {error}") from error
