"""A codec without a folder: a character a token, and such marks as a test wants."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from atoll.engine.text import TextCodec

VOCABULARY = 300


class CharTokenizer:
    """Its tokens are the codes of characters; marks come after them."""

    def __init__(self, marks: Sequence[str] = (), begin: str | None = None) -> None:
        self._marks = {mark: 200 + i for i, mark in enumerate(marks)}
        self._begin = begin

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(128)} | self._marks

    def token_to_id(self, name: str) -> int | None:
        return self.get_vocab().get(name)

    def id_to_token(self, token: int) -> str | None:
        return {number: name for name, number in self.get_vocab().items()}.get(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        names = "|".join(map(re.escape, self._marks))
        parts = re.findall(f"{names}|." if names else ".", text, re.DOTALL)
        ids = [self._marks.get(part, ord(part[0]) % 128) for part in parts]
        if self._begin is not None and add_special_tokens:
            ids = [self._marks[self._begin], *ids]
        return type("Encoding", (list,), {"ids": property(list)})(ids)

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Any]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, tokens: Sequence[int], **more: Any) -> str:
        return "".join(self.id_to_token(token) or "?" for token in tokens)


class ChatTemplate:
    """Messages in marks, tools first."""

    def render(self, messages: list[dict[str, Any]], **more: Any) -> str:
        tools = "".join(tool["function"]["name"] for tool in more["tools"] or ())
        said = "".join(f"<{m['role']}>{m['content'].strip()}|" for m in messages)
        return tools + said + ("<assistant>" if more["add_generation_prompt"] else "")


class PlainCodec(TextCodec):
    """The codec without a folder."""

    def __init__(
        self, marks: Sequence[str] = (), begin: str | None = None, longest: int = 100
    ) -> None:
        self._tokenizer = cast("Any", CharTokenizer(marks, begin))
        self._longest_token = 4
        self._config = {
            "max_position_embeddings": longest,
            "vocab_size": VOCABULARY,
            "hidden_size": 4,
        }
        self._settings = {}
        self._template = cast("Any", ChatTemplate())
        self._tool_template = self._template
        self.folder = Path("nowhere")
        self.eos = (0,)
