"""How models write calls: one class for each way, found by what the chat template says.

A format makes the grammar (`atoll.engine.guidance`) that an answer has to follow. All share one shape: a
text, then calls, then nothing. Where a call is required there is no text. Around arguments the grammar leaves
the model no choice, so an answer is read by looking for a few marks (`parser`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from atoll.engine.text import TextCodec
from atoll.runtime.instance.tools.functions import CallableFunction, ToolUse
from atoll.runtime.instance.tools.parser import CallParser, CallSyntax

Json = dict[str, Any]


class CallFormat:
    """A way of writing calls. What subclasses say of themselves is enough for most."""

    syntax: ClassVar[CallSyntax]
    arguments_key: ClassVar[str] = "arguments"
    own_template: ClassVar[bool] = True
    """Whether the model's chat template describes tools and calls itself."""
    tail: ClassVar[str] = "}"
    """Text after the arguments of the last call."""
    begins_apart: ClassVar[bool] = True
    """Whether calls cannot be taken for an answer that is JSON itself."""

    more_marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, codec: TextCodec) -> None:
        self._marks = {
            text: token
            for text in (self.syntax.mark, self.syntax.closer, *self.more_marks)
            if text and (token := codec.mark_token(text)) is not None
        }

    @property
    def marks(self) -> dict[int, str]:
        """The marks that are tokens of their own."""
        return {token: text for text, token in self._marks.items()}

    def parser(self) -> CallParser:
        """Return what reads one answer."""
        return CallParser(self.syntax, tokens=self.syntax.mark in self._marks)

    def make_id(self, digest: str) -> str:
        """Return the id of a call from hexadecimal digits that are its own."""
        return f"call_{digest[:24]}"

    def call_id(self, prompt: Sequence[int], choice: int, index: int) -> str:
        """Return the id of a call: the same wherever the answer is given, another in every answer."""
        told = hashlib.blake2b(digest_size=16)
        told.update(b"".join(token.to_bytes(8, "little", signed=True) for token in prompt))
        told.update(f":{choice}:{index}".encode())
        return self.make_id(told.hexdigest())

    def grammar(self, use: ToolUse, content: str | None = None) -> str:
        """Return what an answer has to look like; `content` is a JSON schema for what is no call."""
        rules = [f"function: {' | '.join(f'f{i}' for i in range(len(use.callable)))}"]
        rules += [f"f{i}: {self._call(function)}" for i, function in enumerate(use.callable)]
        rules += [f"calls: {self._calls(parallel=use.parallel)}"]
        if use.required:
            rules.append(f"start: {self._begin(None)}")
        elif content is not None:
            rules += [f"start: content | {self._begin(None)}", f"content: %json {content}"]
        else:
            rules += self._after_text()
        return "\n".join(sorted(rules, key=lambda rule: not rule.startswith("start:"))) + "\n"

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls, given by name and arguments, as the model writes them."""
        raise NotImplementedError

    def write_open(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as the model writes them, up to the arguments of the last, which may be a part."""
        return self.write(calls).removesuffix(self.tail)

    def _after_text(self) -> list[str]:
        """Return the rules of an answer that may begin with any text."""
        if self.syntax.mark in self._marks:
            return [f"start: text ({self._begin(None)})?", "text: TEXT", "TEXT: /(.|\\n)*/"]
        return [
            f"start: text | {self._begin('head')}",
            "text: TEXT",
            f"head[lazy]: TEXT {quote(self.syntax.mark)}",
            "TEXT: /(.|\\n)*/",
        ]

    def _begin(self, _head: str | None) -> str:
        """Return all calls, from their first mark on; `_head` is the rule for that mark."""
        return f"{_head or self._piece(self.syntax.mark)} calls"

    def _calls(self, *, parallel: bool) -> str:
        """Return one call or several, after the first mark."""
        raise NotImplementedError

    def _call(self, function: CallableFunction) -> str:
        """Return one call of a function."""
        before = f'{{"name": "{function.name}", "{self.arguments_key}": '
        return f"{quote(before)} {arguments(function)} {quote('}')}"

    def _piece(self, text: str) -> str:
        token = self._marks.get(text)
        return quote(text) if token is None else f"<[{token}]>"

    def _object(self, name: str, written: str) -> str:
        return f'{{"name": "{name}", "{self.arguments_key}": {written}'


class HermesFormat(CallFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and Qwen."""

    syntax = CallSyntax(mark="<tool_call>")
    tail = "}\n</tool_call>"
    more_marks = ("</tool_call>",)

    def _calls(self, *, parallel: bool) -> str:
        body = f"/\\n?/ function /\\n?/ {self._piece('</tool_call>')}"
        more = f" (/\\n?/ {self._piece(self.syntax.mark)} {body})*" if parallel else ""
        return body + more

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as the model writes them."""
        return "\n".join(
            f"<tool_call>\n{self._object(name, written)}}}\n</tool_call>" for name, written in calls
        )


class GenericFormat(HermesFormat):
    """As Hermes, for models whose template knows no calls, or some that we do not know.

    The tools are described in the system message, and calls and their results are told as texts.
    """

    own_template = False

    def describe(self, use: ToolUse) -> str:
        """Return what the model is told of the tools."""
        offered = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in use.offered)
        several = (
            "To call several functions, write one such block after the other."
            if use.parallel
            else "Call one function at a time."
        )
        need = "You must call a function." if use.required else "Call them where they help."
        return (
            f"You can call functions. {need} These are the functions, one a line, with the JSON schema of "
            f"their arguments:\n<tools>\n{offered}\n</tools>\n"
            "To call a function, write a JSON object with its name and its arguments:\n"
            '<tool_call>\n{"name": "the name", "arguments": {"argument": "value"}}\n</tool_call>\n'
            f"{several} The results come back in <tool_response></tool_response>."
        )


class LlamaFormat(CallFormat):
    """`{"name": ..., "parameters": {...}}` as the whole answer, of Llama 3."""

    syntax = CallSyntax(mark="<|python_tag|>", first="{")
    arguments_key = "parameters"
    begins_apart = False

    def __init__(self, codec: TextCodec) -> None:
        super().__init__(codec)
        # Its own template often refuses messages with more than one.
        self._single = "single tool-calls" in codec.template_source

    def parser(self) -> CallParser:
        """Return what reads one answer; its mark is a token or nothing."""
        return CallParser(self.syntax, tokens=True)

    def _calls(self, *, parallel: bool) -> str:
        return 'function ("; " function)*' if parallel and not self._single else "function"

    def _after_text(self) -> list[str]:
        return [f"start: TEXT? | {self._begin(None)}", "TEXT: /[^{](.|\\n)*/"]

    def _begin(self, _head: str | None) -> str:
        token = self._marks.get(self.syntax.mark)
        return "calls" if token is None else f"<[{token}]>? calls"

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as the model writes them."""
        return "; ".join(f"{self._object(name, written)}}}" for name, written in calls)


class MistralFormat(CallFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, of Mistral up to 2024."""

    syntax = CallSyntax(mark="[TOOL_CALLS]")
    tail = "}]"

    def make_id(self, digest: str) -> str:
        """Return an id of nine letters and digits: the templates insist."""
        return digest[:9]

    def _calls(self, *, parallel: bool) -> str:
        more = ' (", " function)*' if parallel else ""
        return f'/ ?/ "[" function{more} "]"'

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as the model writes them."""
        listed = ", ".join(f"{self._object(name, written)}}}" for name, written in calls)
        return f"[TOOL_CALLS][{listed}]"


class MistralArgsFormat(MistralFormat):
    """`[TOOL_CALLS]name[ARGS]{...}`, of Mistral since 2025."""

    syntax = CallSyntax(mark="[TOOL_CALLS]", opener="[TOOL_CALLS]", closer="[ARGS]")
    tail = ""

    def _calls(self, *, parallel: bool) -> str:
        more = f" ({self._piece(self.syntax.mark)} function)*" if parallel else ""
        return f"function{more}"

    def _call(self, function: CallableFunction) -> str:
        return f"{quote(function.name)} {self._piece(self.syntax.closer)} {arguments(function)}"

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as the model writes them."""
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{written}" for name, written in calls)


_KNOWN: tuple[tuple[Callable[[str], bool], type[CallFormat]], ...] = (
    (lambda text: "[TOOL_CALLS]" in text and "[ARGS]" in text, MistralArgsFormat),
    (lambda text: "[TOOL_CALLS]" in text, MistralFormat),
    # Some write calls as XML between the same marks.
    (lambda text: "<tool_call>" in text and "<function=" not in text, HermesFormat),
    (lambda text: "<|python_tag|>" in text or '"parameters": dictionary' in text, LlamaFormat),
)


def find_format(codec: TextCodec) -> CallFormat:
    """Return how the model of a folder writes calls."""
    source = codec.template_source
    if "tools" in source:
        for fits, kind in _KNOWN:
            if fits(source):
                return kind(codec)
    return GenericFormat(codec)


def arguments(function: CallableFunction) -> str:
    """Return the part of a grammar that stands for the arguments of a function."""
    # As JSON is written in what models were trained on; no room for blanks without end.
    options: Json = {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
        "coerce_one_of": True,
    }
    if not function.strict:
        options["lenient"] = True
    return f"%json {json.dumps(function.schema | {'x-guidance': options})}"


def quote(text: str) -> str:
    """Return a text as a string of a grammar."""
    return json.dumps(text)
