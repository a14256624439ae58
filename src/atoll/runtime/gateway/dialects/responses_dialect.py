"""OpenAI's `/v1/responses` as a dialect: a request brings all it is about, or what it goes on from."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.runtime.gateway.dialects.chat_answer import (
    CUT,
    AnswerBlock,
    AnswerEnding,
    ChatAnswer,
    ChatHead,
)
from atoll.runtime.gateway.dialects.chat_stream import StreamTranslator
from atoll.runtime.gateway.dialects.dialect import Dialect, Translation
from atoll.runtime.gateway.dialects.kept_responses import OwnedResponses
from atoll.runtime.gateway.dialects.responses_request import (
    ResponsesRequest,
    chat_body,
    list_items,
    read_responses,
)

Item = dict[str, Any]
"""An item of the output."""
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIX = {"reasoning": "rs", "text": "msg", "refusal": "msg", "call": "fc"}

_EVENTS = {
    "text": "output_text",
    "refusal": "refusal",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
"""Names of events of a block."""
_DONE = {"text": "text", "refusal": "refusal", "reasoning": "text", "call": "arguments"}
"""The field with all of a block, in the event at its end."""


class TranslatedResponses(Translation):
    """One request to `/v1/responses`, and the response objects that answer it."""

    def __init__(
        self, request: ResponsesRequest, seed: str, responses: OwnedResponses | None
    ) -> None:
        super().__init__(chat_body(request), request.model, seed)
        self._responses = responses
        if request.store is False or (responses and len(self.body) > responses.max_bytes):
            self._responses = None
        self._asked = [] if self._responses is None else list_items(request)
        # The rest of the request comes back with the answer; this may be large.
        request.input = ""
        self._request = request

    def stream(self) -> ResponsesStream:
        """Return the translator of the stream of the answer."""
        return ResponsesStream(self)

    def item_id(self, block: AnswerBlock, number: int) -> str:
        """Return the id of the item number `number` of the output."""
        return f"{_PREFIX[block.kind]}_{self.seed}{number:02x}"

    def item(self, block: AnswerBlock, number: int, status: str) -> Item:
        """Return an item as far as it has come; `status`: in_progress, completed or incomplete."""
        item_id, begun = self.item_id(block, number), status != "in_progress"
        if block.kind == "call":
            return {
                "id": item_id,
                "type": "function_call",
                "status": status,
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text if begun else "",
            }
        content = [content_part(block, block.text)] if begun else []
        if block.kind == "reasoning":
            return {
                "id": item_id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": content,
            }
        return {
            "id": item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def whole(self, answer: ChatAnswer) -> dict[str, Any]:
        """Return the response of an answer that is all there."""
        last = len(answer.blocks) - 1
        cut = answer.ending.reason in CUT
        items = [
            self.item(block, number, "incomplete" if cut and number == last else "completed")
            for number, block in enumerate(answer.blocks)
        ]
        return self.ended(answer.head, items, answer.ending)

    def ended(self, head: ChatHead, items: list[Item], ending: AnswerEnding) -> dict[str, Any]:
        """Return the response at its end."""
        reason = _INCOMPLETE.get(ending.reason)
        tokens = ending.tokens
        if self._responses is not None:
            # Before the client knows its id.
            self._responses.keep(f"resp_{self.seed}", [*self._asked, *items])
        return self.response(
            head,
            "completed" if reason is None else "incomplete",
            items,
            completed_at=head.created_s if reason is None else None,
            incomplete_details=None if reason is None else {"reason": reason},
            usage={
                "input_tokens": tokens.prompt,
                "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
                "output_tokens": tokens.completion,
                "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
                "total_tokens": tokens.prompt + tokens.completion,
            },
        )

    def response(
        self, head: ChatHead, status: str, items: list[Item], **more: Any
    ) -> dict[str, Any]:
        """Return the response object, with what the request asked for."""
        request = self._request
        text = request.text
        reasoning = request.reasoning
        return {
            "id": f"resp_{self.seed}",
            "object": "response",
            "created_at": head.created_s,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": head.model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": self._responses is not None,
            "temperature": request.temperature,
            "text": {"format": _format(request)}
            | ({} if text is None or text.verbosity is None else {"verbosity": text.verbosity}),
            "tool_choice": _choice(request),
            "tools": [_tool(tool) for tool in request.tools or ()],
            "top_logprobs": 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        } | more


def content_part(block: AnswerBlock, text: str) -> dict[str, Any]:
    """Return the piece of an item that has the text of a block."""
    if block.kind == "refusal":
        return {"type": "refusal", "refusal": text}
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format(request: ResponsesRequest) -> dict[str, Any]:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.type != "json_schema":
        return {"type": "text" if wanted is None else wanted.type}
    return {
        "type": "json_schema",
        "name": wanted.name or "answer",
        "description": wanted.description,
        "schema": wanted.schema,
        "strict": bool(wanted.strict),
    }


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type == "function":
        return {"type": "function", "name": choice.name}
    return {"type": choice.type, "mode": choice.mode, "tools": choice.tools}


def _tool(tool: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(tool, name) for name in tool.__struct_fields__}


class ResponsesStream(StreamTranslator):
    """Stream of `/v1/responses`: numbered events, each item added, filled and done."""

    def __init__(self, responses: TranslatedResponses) -> None:
        super().__init__(responses.asked, responses.seed)
        self._responses = responses
        self._number = 0
        self._items: list[Item] = []
        self._place: dict[str, Any] = {}
        """Where text of the open block belongs."""
        self._head = ChatHead(responses.asked, 0)

    def write_head(self, head: ChatHead) -> None:
        """Write that the response was created."""
        self._head = head
        for kind in ("created", "in_progress"):
            response = self._responses.response(head, "in_progress", [])
            self._write(f"response.{kind}", response=response)

    def write_open(self, block: AnswerBlock) -> None:
        """Write that an item was added."""
        number = len(self._items)
        self._place = {"item_id": self._responses.item_id(block, number), "output_index": number}
        if block.kind != "call":
            self._place["content_index"] = 0
        item = self._responses.item(block, len(self._items), "in_progress")
        self._write("response.output_item.added", output_index=len(self._items), item=item)
        if block.kind != "call":
            self._write("response.content_part.added", **self._place, part=content_part(block, ""))

    def write_text(self, block: AnswerBlock, text: str) -> None:
        """Write the text that an item has more."""
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        kind = f"response.{_EVENTS[block.kind]}.delta"
        self._write(kind, **self._place, delta=text, **more)

    def write_close(self, block: AnswerBlock, *, whole: bool) -> None:
        """Write that an item is done."""
        place, text = self._place, block.text
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if block.kind == "call":
            more["name"] = block.name
        more[_DONE[block.kind]] = text
        self._write(f"response.{_EVENTS[block.kind]}.done", **place, **more)
        if block.kind != "call":
            self._write("response.content_part.done", **place, part=content_part(block, text))
        status = "completed" if whole else "incomplete"
        item = self._responses.item(block, len(self._items), status)
        self._write("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def write_ending(self, ending: AnswerEnding) -> None:
        """Write that the response is complete, or as long as it may be."""
        response = self._responses.ended(self._head, self._items, ending)
        self._write(f"response.{response['status']}", response=response)

    def write_failure(self, message: str, code: str) -> None:
        """Write that the response failed."""
        self._write("error", code=code, message=message, param=None)
        error = {"code": "server_error", "message": message}
        response = self._responses.response(self._head, "failed", self._items, error=error)
        self._write("response.failed", response=response)

    def _write(self, kind: str, **fields: Any) -> None:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._write_event(kind, data)


class ResponsesDialect(Dialect):
    """OpenAI's API of responses: errors and keys are those of chat."""

    path = "/v1/responses"
    request = ResponsesRequest

    def translate(
        self, body: bytes, seed: str, responses: OwnedResponses | None = None
    ) -> Translation:
        """Read a request, with what it goes on from."""
        return TranslatedResponses(read_responses(body, responses), seed, responses)
