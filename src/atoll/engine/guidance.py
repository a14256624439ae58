"""Answers that must match a JSON schema or a regular expression, by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from atoll.core.errors import MissingDependencyError
from atoll.engine.errors import EngineError
from atoll.engine.messages import OutputFormat


class Matcher:
    """Follows one answer and says which tokens may come next."""

    def __init__(self, tokenizer: Any, guide: OutputFormat, vocabulary: int) -> None:
        from llguidance import LLMatcher
        from llguidance import numpy as masks

        self._masks = masks
        self._matcher = LLMatcher(tokenizer, _grammar(guide), log_level=0)
        self._mask = masks.allocate_token_bitmask(1, vocabulary)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the guide cannot be followed: {self._matcher.get_error()}")

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
        schema = guide.text if guide.kind == "json_schema" else '{"type": "object"}'
        return str(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        raise EngineError(f"the guide is not a valid {guide.kind}: {error}") from error


class MatcherFactory:
    """Makes matchers for one model; the tokenizer is read when the first is asked for."""

    def __init__(self, folder: str | Path, vocabulary: int, eos: Sequence[int] = ()) -> None:
        self._folder = Path(folder)
        self._vocabulary = vocabulary
        self._eos = tuple(eos)

    def matcher(self, guide: OutputFormat) -> Matcher:
        """Return a fresh matcher; a guide that cannot work is an EngineError."""
        tokenizer = _tokenizer(self._folder / "tokenizer.json", self._vocabulary, self._eos)
        return Matcher(tokenizer, guide, self._vocabulary)


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
