"""What clients make of the streams of dialects, and what must hold for them."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]


def events_of(stream: bytes) -> list[Json]:
    """The events of a stream; each is called what it says it is."""
    parts = stream.decode().split("\n\n")
    assert parts.pop() == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def read_response(stream: bytes) -> Json:
    """The response at the end of a stream, checked against all events before it."""
    events = events_of(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, running, *rest, last = events
    assert (created["type"], running["type"]) == ("response.created", "response.in_progress")
    items: list[Json] = []
    done: list[Json] = []
    for event in rest:
        kind = event["type"].removeprefix("response.")
        if kind == "error":
            assert last["type"] == "response.failed"
            continue
        assert event["output_index"] == len(done)
        if kind == "output_item.added":
            assert len(items) == len(done)
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            continue
        item = items[-1]
        assert event.get("item_id", item["id"]) == item["id"]
        text = "arguments" if item["type"] == "function_call" else "text"
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind.endswith(".delta"):
            place = item if item["type"] == "function_call" else item["content"][0]
            place["refusal" if kind == "refusal.delta" else text] += event["delta"]
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        elif kind == "output_item.done":
            assert event["item"] | {"status": "in_progress"} == item
            done.append(event["item"])
        else:
            place = item if item["type"] == "function_call" else item["content"][0]
            said = "refusal" if kind == "refusal.done" else text
            assert event[said] == place[said]
    assert last["response"]["output"] == done
    assert len(done) == len(items)
    assert last["type"] == f"response.{last['response']['status']}"
    response: Json = last["response"]
    for key in ("id", "model", "created_at"):
        assert response[key] == created["response"][key]
    return response


def read_message(stream: bytes) -> Json:
    """The message that a stream adds up to."""
    first, *rest = events_of(stream)
    assert first["type"] == "message_start"
    message: Json = first["message"]
    assert message["content"] == []
    open_input: str | None = None
    is_open = False
    stopped = False
    for event in rest:
        kind = event["type"]
        assert not stopped
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, open_input = True, ""
        elif kind == "content_block_delta":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                assert open_input is not None
                open_input += delta["partial_json"]
            else:
                said = delta["type"].removesuffix("_delta")
                block[said] += delta[said]
        elif kind == "content_block_stop":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            if message["content"][-1]["type"] == "tool_use" and open_input:
                message["content"][-1]["input"] = json.loads(open_input)
            is_open = False
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
        elif kind == "error":
            message["error"] = event["error"]
        else:
            assert kind == "message_stop"
            assert not is_open
            stopped = True
    assert stopped or "error" in message
    return message
