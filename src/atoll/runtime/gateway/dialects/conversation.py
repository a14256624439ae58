"""A conversation in the making: turns of any dialect, as messages of chat."""

from __future__ import annotations

from typing import Any

Part = dict[str, Any]
"""A piece of a message, as chat has them."""


def text_part(text: str) -> Part:
    """Return a piece of text."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> Part:
    """Return a picture."""
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


class ChatMessages:
    """Messages of a chat request.

    Chat puts the calls of a turn into the message before them, and has results as messages of text: calls
    and text of the assistant that follow each other become one message, and pictures in results follow in
    a message of the user after the last result.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._pictures: list[Part] = []
        self._merges = False
        """Whether the last message is a turn of the assistant that goes on."""

    def system(self, text: str) -> None:
        """Add instructions; those before anything else was said become one message."""
        last = self._last()
        if len(self._messages) == 1 and last is not None and last["role"] == "system":
            last["content"] += f"\n\n{text}"
        else:
            self._add({"role": "system", "content": text})

    def user(self, parts: list[Part]) -> None:
        """Add what the user says, after pictures in results; text alone is not cut into pieces."""
        pictures, self._pictures = self._pictures, []
        parts = pictures + parts
        if len(parts) == 1 and parts[0]["type"] == "text":
            self._add({"role": "user", "content": parts[0]["text"]})
        elif parts:
            self._add({"role": "user", "content": parts})

    def assistant(self, text: str) -> None:
        """Add what the assistant said."""
        last = self._last()
        if self._merges and last is not None and not last.get("tool_calls"):
            last["content"] = (last["content"] or "") + text
        else:
            self._add({"role": "assistant", "content": text})
            self._merges = True

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a tool; `arguments` are JSON."""
        if not self._merges:
            self._add({"role": "assistant", "content": None})
            self._merges = True
        called = {"name": name, "arguments": arguments}
        calls = self._messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": called})

    def result(self, call_id: str, parts: list[Part]) -> None:
        """Add what a call gave."""
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        pictures = [part for part in parts if part["type"] != "text"]
        kept, self._pictures = self._pictures, []
        if pictures and not text:
            text = "The result is the picture in the next message."
        self._add({"role": "tool", "tool_call_id": call_id, "content": text})
        self._pictures = kept + pictures

    def end_turn(self) -> None:
        """The next words of the assistant are a turn of their own."""
        self._merges = False

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the assistant's answer was begun by the client."""
        last = self._last()
        return (
            last is not None
            and last["role"] == "assistant"
            and not last.get("tool_calls")
            and not self._pictures
        )

    def read(self) -> list[dict[str, Any]]:
        """Return the messages."""
        self._show_pictures()
        return self._messages

    def _last(self) -> dict[str, Any] | None:
        return self._messages[-1] if self._messages else None

    def _add(self, message: dict[str, Any]) -> None:
        self._show_pictures()
        self._messages.append(message)
        self._merges = False

    def _show_pictures(self) -> None:
        pictures, self._pictures = self._pictures, []
        if pictures:
            self._messages.append({"role": "user", "content": pictures})


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """Return a tool as chat has it."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def named_choice(name: str) -> dict[str, Any]:
    """Return the choice of one tool as chat has it."""
    return {"type": "function", "function": {"name": name}}
