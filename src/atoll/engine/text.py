"""Text in and out: tokenizer, chat template, text that grows token by token, stop strings."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import InputError, MissingDependencyError
from atoll.core.request_parameters import SamplingParams
from atoll.engine.engine_errors import EngineError, TextTooLongError

_UNFINISHED = "\ufffd"
# A character needs at most this many byte tokens; beyond it a replacement sign is really meant.
_LONGEST_UNFINISHED = 8
_LONG_TEXT = 2**13
"""Characters above which other threads go on while a text is tokenised."""
_SLICE = 2**16
"""Characters that are tokenised at a time to see whether a text is too long."""
_CHARS_PER_TOKEN = 8
"""Of text as people and programs write it, with a margin; more is possible but unusual."""

TEMPLATE_FIELDS = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
)
"""What a chat template is always told."""


class TextCodec:
    """The tokenizer and chat template of a model folder. Loads no torch."""

    template_source = ""
    """The chat template for conversations with tools, as it is written."""
    _tool_template: Any = None

    def __init__(self, folder: str | Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError("tokenizers", "engine", needed_for="text") from error

        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise InputError("there is no tokenizer.json", path=folder, hint="name a model folder")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._settings = _read_json(self.folder / "tokenizer_config.json")
        self._config = _read_json(self.folder / "config.json")
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        self.eos = self._ends()
        self._template = self._chat_template()

    @property
    def max_length(self) -> int:
        """How many positions the model was made for."""
        return int(self._text_config().get("max_position_embeddings", 2048))

    @property
    def width(self) -> int:
        """How many numbers stand for a position."""
        return int(self._text_config()["hidden_size"])

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return int(self._text_config()["num_hidden_layers"])

    @property
    def vocabulary(self) -> int:
        """How many tokens the model's head knows."""
        return int(self._text_config()["vocab_size"])

    def max_chars(self, tokens: int) -> int:
        """Return how many characters so many tokens can stand for: each for its own, at most."""
        return tokens * self._longest_token

    def encode(
        self, text: str, *, special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the tokens of `text`; with `special`, as the tokenizer begins a text.

        A text of far more than `max_tokens` raises TextTooLongError before much work was done for it;
        one of a few more is returned whole. While a long text is tokenised, other threads go on.
        """
        if max_tokens is not None:
            self._refuse_too_long(text, max_tokens)
        tokens: list[int] = self._encoding(text, special=special).ids
        return tokens

    def _refuse_too_long(self, text: str, max_tokens: int) -> None:
        max_chars = self.max_chars(max_tokens)
        if len(text) > max_chars:
            raise TextTooLongError(
                f"the text has {len(text)} characters, and {max_tokens} tokens hold {max_chars}"
            )
        # Not much longer than what is taken: to tokenise it once is all that it costs.
        if len(text) <= max(_SLICE, _CHARS_PER_TOKEN * max_tokens):
            return
        # A cut may split a word into more tokens than it has, but it cannot double those of a slice.
        tokens = 0
        for start in range(0, len(text), _SLICE):
            tokens += len(self._encoding(text[start : start + _SLICE], special=False))
            if tokens > 2 * max_tokens:
                raise TextTooLongError(f"the text has more than {max_tokens} tokens")

    def _encoding(self, text: str, *, special: bool) -> Any:
        if len(text) <= _LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=special)
        # `encode` keeps every other thread waiting until it is done; a batch, even of one, does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def token_text(self, token: int) -> str:
        """Return the text of one token on its own (for log probabilities)."""
        return self.decode([token], skip_special=False)

    def token_of(self, text: str) -> int | None:
        """Return the token that is written so in the vocabulary, if there is one."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token

    def token_name(self, token: int) -> str:
        """Return how a token is written in the vocabulary; nothing for one that is not there."""
        name: str | None = self._tokenizer.id_to_token(token)
        return name or ""

    def mark_token(self, text: str) -> int | None:
        """Return the token that stands for a mark such as `<tool_call>` and is no text to guides, if any."""
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            if added.content == text and (added.special or (text[0] + text[-1]) == "<>"):
                return int(token)
        return None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generate: bool = True,
        max_tokens: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation in the model's own format; `max_tokens` as in `encode`."""
        # No message is without tokens, so this many need not be rendered to be refused.
        if max_tokens is not None and len(messages) > max_tokens:
            raise TextTooLongError(f"{len(messages)} messages have more than {max_tokens} tokens")
        text = self.render_chat(messages, tools=tools, generate=generate, more=more)
        return self.encode(text, special=False, max_tokens=max_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generate: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as one text, in the model's own format; the template is told `more`."""
        if self._template is None:
            raise EngineError("this model has no chat template", hint="use /v1/completions")
        import jinja2

        template = self._tool_template if tools else self._template
        try:
            text: str = template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=generate,
                bos_token=self._special_token("bos_token"),
                eos_token=self._special_token("eos_token"),
                **(more or {}),
            )
        except jinja2.TemplateError as error:
            raise EngineError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is a program, and messages are its input
            what = f"{type(error).__name__}: {error}"
            raise EngineError(f"the chat template refuses these messages: {what}") from error
        return text

    def describe(self) -> dict[str, Any]:
        """Return the settings of the tokenizer and its chat template, as vLLM's /tokenizer_info has them."""
        shown = {"tokenizer_class": None} | self._settings
        return shown | {"chat_template": self.template_source or None}

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """Start a text that grows token by token."""
        return TextStream(self, stop)

    def _text_config(self) -> Mapping[str, Any]:
        return self._config.get("text_config") or self._config

    def _special_token(self, name: str) -> str:
        value = self._settings.get(name)
        return str(value.get("content", "")) if isinstance(value, Mapping) else str(value or "")

    def _ends(self) -> tuple[int, ...]:
        generation = _read_json(self.folder / "generation_config.json")
        token_ids: list[int] = []
        # Models name their ends in up to three places; whichever are named, count.
        for source in (generation, self._text_config()):
            value = source.get("eos_token_id")
            values = value if isinstance(value, list) else [] if value is None else [value]
            token_ids += [int(token) for token in values]
        named = self._special_token("eos_token")
        if named and (token := self._tokenizer.token_to_id(named)) is not None:
            token_ids.append(int(token))
        return tuple(dict.fromkeys(token_ids))

    def _chat_template(self) -> Any:
        path = self.folder / "chat_template.jinja"
        source = path.read_text() if path.is_file() else self._settings.get("chat_template")
        with_tools = None
        # Several templates by name: the one for tools is used where there are any.
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
            with_tools = named.get("tool_use")
        if not source:
            return None
        try:
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingDependencyError("jinja2", "engine", needed_for="chat") from error

        # Templates come with the weights, from strangers: they run in a sandbox.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        # Not Jinja's own filter, which escapes for HTML: models read plain JSON.
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, **{"ensure_ascii": False, **options}
        )
        environment.globals["raise_exception"] = _refuse
        template = environment.from_string(source)
        self.template_source = with_tools or source
        self._tool_template = environment.from_string(with_tools) if with_tools else template
        return template


@dataclass(frozen=True, slots=True)
class TextStep:
    """New text, and the stop string that has ended it, if one has."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the text is over."""
        return self.stop is not None


class TextStream:
    """Turns tokens into text as they come.

    Bytes of an unfinished character are held back, and so is text that may be the beginning of a
    stop string; a stop string itself is never shown. All pieces together equal the decoded whole.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self._codec = codec
        self._stop = tuple(text for text in stop if text)
        self._tokens: list[int] = []
        self._start = 0
        self._read = 0
        self._held = ""

    def push(self, token: int) -> TextStep:
        """Take a token and return what it adds."""
        self._tokens.append(token)
        # Only the latest tokens are decoded again: what one adds may depend on the one before it.
        before = self._codec.decode(self._tokens[self._start : self._read])
        after = self._codec.decode(self._tokens[self._start :])
        unfinished = after.endswith(_UNFINISHED)
        if unfinished and len(self._tokens) - self._read < _LONGEST_UNFINISHED:
            return TextStep("")
        self._start, self._read = self._read, len(self._tokens)
        return self._show(after[len(before) :])

    def finish(self) -> str:
        """Return what was held back."""
        before = self._codec.decode(self._tokens[self._start : self._read])
        after = self._codec.decode(self._tokens[self._start :])
        rest, self._held = self._held + after[len(before) :], ""
        for text in self._stop:
            at = rest.find(text)
            if at >= 0:
                rest = rest[:at]
        return rest

    def _show(self, new: str) -> TextStep:
        text = self._held + new
        hits = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if hits:
            at, stop = min(hits)
            self._held = ""
            return TextStep(text[:at], stop)
        keep = _longest_beginning(text, self._stop)
        self._held = text[len(text) - keep :]
        return TextStep(text[: len(text) - keep])


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of `stops`."""
    longest = 0
    for stop in stops:
        # A whole stop string would have been found before, and what is no longer than `longest` changes
        # nothing.
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def stop_token(token: int | None, named: Container[int]) -> int | None:
    """Return the token that ended an answer if the client had named it, as vLLM does: not the model's own."""
    return token if token in named else None


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"not valid JSON: {error}", path=path) from error
    if not isinstance(content, dict):
        raise InputError("not a JSON object", path=path)
    return content


class AnswerText:
    """Turns the tokens of an answer into text; stop strings end it.

    `generated` are tokens that came elsewhere and `shown` is their text as far as the client has it.
    """

    def __init__(
        self,
        codec: TextCodec,
        sampling: SamplingParams,
        stop: Sequence[str] = (),
        generated: Sequence[int] = (),
        shown: str = "",
    ) -> None:
        self.tokens = len(generated)
        """How many there are so far."""
        self.finish: str | None = None
        """Why the answer is over, if it is."""
        self.stop_reason: str | int | None = None
        """The stop string, or the token the client named, that ended it."""
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else codec.eos)}
        self._stream = codec.stream(stop)
        steps = [self._stream.push(token) for token in generated]
        text = "".join(step.text for step in steps)
        self.owed = text[len(shown) :]
        """Text of the tokens generated elsewhere that the client has not seen yet."""
        # It may have ended elsewhere before the client heard of it.
        stops = [step.stop for step in steps if step.stop is not None]
        if stops or (generated and generated[-1] in self._ends):
            self.finish = "stop"
            self.stop_reason = stops[0] if stops else stop_token(generated[-1], self._stop_ids)
        elif self.tokens >= sampling.max_tokens:
            self.owed += self._stream.finish()
            self.finish = "length"

    def add(self, token: int | None, finish: str | None) -> str:
        """Take the next token, or the end without one; returns the text there is to show."""
        text, stop = "", None
        if token is not None:
            self.tokens += 1
            step = self._stream.push(token)
            text, stop = step.text, step.stop
        self.finish = finish if stop is None else "stop"
        if finish is not None and stop is None:
            text += self._stream.finish()
        if self.finish == "stop":
            self.stop_reason = stop_token(token, self._stop_ids) if stop is None else stop
        text, self.owed = self.owed + text, ""
        return text
