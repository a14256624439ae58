"""Answers of `/v1/responses`, whole: the response object and the items of its output."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.runtime.gateway.dialects.chat import CUT, AnswerBlock, AnswerEnding, AnswerHead
from atoll.runtime.gateway.dialects.responses.request import ResponsesRequest

Item = dict[str, Any]
"""An item of the output."""
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIX = {"reasoning": "rs", "text": "msg", "refusal": "msg", "call": "fc"}


class ResponseWriter:
    """Makes the response objects of one request; all ids are made of `seed`."""

    def __init__(self, request: ResponsesRequest, seed: str) -> None:
        self._request = request
        self._seed = seed

    def item_id(self, block: AnswerBlock, number: int) -> str:
        """Return the id of the item number `number` of the output."""
        return f"{_PREFIX[block.kind]}_{self._seed}{number:02x}"

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

    def whole(
        self, head: AnswerHead, blocks: list[AnswerBlock], ending: AnswerEnding
    ) -> dict[str, Any]:
        """Return the response of an answer that is all there."""
        last = len(blocks) - 1
        items = [
            self.item(
                block,
                number,
                "incomplete" if number == last and ending.reason in CUT else "completed",
            )
            for number, block in enumerate(blocks)
        ]
        return self.ended(head, items, ending)

    def ended(self, head: AnswerHead, items: list[Item], ending: AnswerEnding) -> dict[str, Any]:
        """Return the response at its end."""
        reason = _INCOMPLETE.get(ending.reason)
        tokens = ending.tokens
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
        self, head: AnswerHead, status: str, items: list[Item], **more: Any
    ) -> dict[str, Any]:
        """Return the response object, with what the request asked for."""
        request = self._request
        text = request.text
        reasoning = request.reasoning
        return {
            "id": f"resp_{self._seed}",
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
            "previous_response_id": None,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": False,
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
