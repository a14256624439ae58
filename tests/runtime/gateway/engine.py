"""An engine for tests: greedy, deterministic, and as unreliable as it is told to be.

The next token depends on all text before it and on nothing else, so that an answer continued from its text
is the answer that would have come anyway. Faults are taken from a list, one a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

WORDS = [
    " alpha",
    " beta",
    " \u00e9t\u00e9",
    " \u6c34",
    "\n\n",
    ' "error"',
    ' finish_reason":"',
    " [DONE]",
    " \U0001f30a",
    "!",
]
_TOKEN = re.compile("|".join(map(re.escape, WORDS)) + "|.", re.DOTALL)
READERS: WeakKeyDictionary[asyncio.StreamWriter, asyncio.StreamReader] = WeakKeyDictionary()
BAD_ANSWERS = {
    "events": ("text/event-stream", b'data: {"choices":[]}\n\ndata: [DONE]\n\n'),
    "no_json": ("application/json", b"<html>"),
    "half_json": ("application/json", b'{"choices":['),
    "deep_json": ("application/json", b'{"x":' + b"[" * 100_000),
    "gzip": ("application/json", b"\x1f\x8b\x08\x00"),
}
"""What is no answer, though its status says so."""
Json = dict[str, Any]


def tokens_of(text: str) -> int:
    return len(_TOKEN.findall(text))


def next_word(text: str) -> int | None:
    """The id of the word after a text; None: it ends."""
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
    return None if drawn % 50 == 0 else drawn % len(WORDS)


def template(messages: list[Json]) -> str:
    return "".join(f"<{m['role']}>{m.get('content')}" for m in messages) + "<assistant>"


@dataclass
class Fault:
    """What goes wrong with a request: `what`, after so many tokens."""

    what: str
    after: int = 0


@dataclass
class Seen:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: Json
    raw: bytes = b""


@dataclass
class ScriptedEngine:
    kind: str = "vllm"
    model: str = "m"
    faults: list[Fault] = field(default_factory=list)
    step_s: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    batch: int = 1
    """Tokens a chunk."""
    reasons: bool = False
    """Whether it tells reasoning from the rest where it counts in chats, as vLLM with such a parser."""
    name: str = "engine"
    busy: bool = False
    """Too busy to say how it is."""
    listed: Json = field(default_factory=dict)
    """What it says more of its model."""
    url: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    """What its backend says of it."""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, port: int = 0) -> str:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.url

    async def stop(self) -> None:
        """Die: the port closes and so do all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        READERS[writer] = reader
        try:
            last = False
            while not last:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
                last = headers.get("connection") == "close"
                raw = await reader.readexactly(int(headers.get("content-length", "0")))
                path = first.split()[1]
                if path == "/v1/models":
                    listed = {"id": self.model, "object": "model", "owned_by": self.kind}
                    listed |= self.listed
                    _write(writer, 200, {"object": "list", "data": [listed]})
                    continue
                if path == "/health":
                    while self.busy and not reader.at_eof():
                        await asyncio.sleep(0.01)
                    _write(writer, 200, {"status": "ok"})
                    continue
                if path == "/tokenizer_info" and self.kind == "vllm":
                    _write(writer, 200, {"tokenizer_class": "Scripted", "chat_template": "t"})
                    continue
                if first.startswith("GET"):
                    _write(writer, 404, {"error": {"message": "nothing here"}})
                    continue
                is_form = headers.get("content-type", "").startswith("multipart/")
                body = {} if is_form else json.loads(raw)
                self.seen.append(Seen(path, headers, body, raw))
                fault = self.faults.pop(0) if self.faults else Fault("none")
                self.running += 1
                try:
                    await self._answer(writer, path, body, fault)
                finally:
                    self.running -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, path: str, body: Json, fault: Fault
    ) -> None:
        what = fault.what
        if what.isdigit():
            extra = "retry-after: 7\r\n" if what in ("429", "503") else ""
            _write(writer, int(what), {"error": {"message": "scripted", "type": "x"}}, extra)
            return
        if what == "bad_request":
            _write(writer, 400, {"object": "error", "message": "scripted refusal"})
            return
        if what == "bad_grammar":
            _write(writer, 500, {"error": {"message": "failed to parse grammar", "code": 500}})
            return
        if what == "die_before_head":
            await _die(writer)
        if what == "stall_before":
            await _stall(writer)
        if what == "garbage":
            writer.write(b"this is not HTTP at all\r\n\r\n")
            return
        if path.startswith(("/v1/audio/", "/v1/images/")):
            _write(writer, 404, {"error": {"message": "nothing here", "type": "x"}})
        elif path in ("/tokenize", "/detokenize"):
            _write(writer, 200, self._convert(path, body))
        elif path == "/v1/embeddings":
            _write(writer, 200, {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3}})
        elif body.get("stream"):
            await self._stream(writer, path, body, fault)
        else:
            await self._whole(writer, path, body, fault)

    def _convert(self, path: str, body: Json) -> Json:
        """Tokens are the codes of characters; every kind of engine has its own names for things."""
        if path == "/detokenize":
            text = "".join(map(chr, body["tokens"]))
            return {{"llamacpp": "content", "sglang": "text"}.get(self.kind, "prompt"): text}
        if self.kind == "llamacpp":
            text = body["content"]
            if body["with_pieces"]:
                return {"tokens": [{"id": ord(c), "piece": c} for c in text]}
            return {"tokens": list(map(ord, text))}
        text = body["prompt"] if "prompt" in body else template(body["messages"])
        tokens = list(map(ord, text))
        return {"count": len(tokens), "max_model_len": 99, "tokens": tokens, "token_strs": None}

    def _prompt(self, path: str, body: Json) -> tuple[str, str]:
        """The text to go on from, and the part of it that was said before."""
        if path == "/v1/completions":
            prompt = str(body["prompt"])
        elif body.get("continue_final_message"):
            assert body["add_generation_prompt"] is False
            prompt = template(body["messages"][:-1]) + body["messages"][-1]["content"]
        elif self.kind == "llamacpp" and body["messages"][-1]["role"] == "assistant":
            prompt = template(body["messages"][:-1]) + body["messages"][-1]["content"]
        else:
            prompt = template(body["messages"])
        state = body.get("atoll", {}).get("resume")
        return prompt, state["text"] if state else ""

    async def _generate(
        self, path: str, body: Json, index: int = 0
    ) -> AsyncIterator[tuple[int | None, str]]:
        """The words of one of the answers as they are written."""
        for word, why in self.words(path, body, index):
            if word is not None:
                await asyncio.sleep(self.step_s)
            yield word, why

    def words(self, path: str, body: Json, index: int = 0) -> Iterator[tuple[int | None, str]]:
        """Word ids of one of the answers, and at the end None with the reason."""
        prompt, said = self._prompt(path, body)
        text = prompt + said + "#" * index
        usual = 16 if path == "/v1/completions" else 1000
        most = body.get("max_completion_tokens") or body.get("max_tokens") or usual
        left = most - (tokens_of(said) if said else 0)
        while True:
            if left <= 0:
                yield None, "length"
                return
            word = next_word(text)
            if word is None and body.get("ignore_eos"):
                word, text = 0, ""
            if word is None:
                yield None, "stop"
                return
            text += WORDS[word]
            left -= 1
            yield word, ""

    def _usage(self, path: str, body: Json, made: int) -> Json:
        prompt, said = self._prompt(path, body)
        before = tokens_of(said) if said else 0
        counts = {"prompt_tokens": tokens_of(prompt), "completion_tokens": before + made}
        return counts | {"total_tokens": sum(counts.values())}

    async def _whole(
        self, writer: asyncio.StreamWriter, path: str, body: Json, fault: Fault
    ) -> None:
        words, reason = [], ""
        async for word, why in self._generate(path, body):
            if word is None:
                reason = why
            else:
                words.append(word)
        text = "".join(WORDS[w] for w in words)
        choice: Json = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= (
            {"text": text}
            if path == "/v1/completions"
            else {"message": {"role": "assistant", "content": text}}
        )
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [_logprob(w) for w in words]}
        data = {
            "id": f"{self.name}-1",
            "object": "chat.completion",
            "created": 1,
            "model": self.model,
            "choices": [choice],
            "usage": self._usage(path, body, len(words)),
        }
        if fault.what == "die_in_body":
            raw = json.dumps(data).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                % len(raw)
            )
            writer.write(raw[: len(raw) // 2])
            await _die(writer)
        if fault.what in BAD_ANSWERS:
            kind, raw = BAD_ANSWERS[fault.what]
            head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            return
        _write(writer, 200, data)

    async def _stream(
        self, writer: asyncio.StreamWriter, path: str, body: Json, fault: Fault
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        if fault.what == "die_after_head":
            await _die(writer)
        chunks = _Chunks(self, writer, path, body)
        answers = {index: self._generate(path, body, index) for index in range(body.get("n") or 1)}
        if path == "/v1/chat/completions":
            for index in answers:
                await chunks.send(chunks.piece([], index, role=True))
        reasons: dict[int, str] = {}
        pending: dict[int, list[int]] = {index: [] for index in answers}
        if fault.what == "diverge":
            pending[0].append(0)
        while len(reasons) < len(answers):
            for index in answers.keys() - reasons.keys():
                word, why = await anext(answers[index])
                if word is None:
                    reasons[index] = why
                    await chunks.flush(pending[index], index, 1)
                    continue
                if index == 0 and fault.after == chunks.made[0] + len(pending[0]):
                    event = chunks.event([chunks.choice(None, [word])])
                    await _misbehave(writer, fault.what, event, chunks)
                    if fault.what == "end_early":
                        return
                pending[index].append(word)
                await chunks.flush(pending[index], index, self.batch)
        if fault.what == "stall_at_end":
            await _stall(writer)
        for index, reason in reasons.items():
            await chunks.send(chunks.piece([], index, reason))
        made = sum(chunks.made.values())
        await self._end(writer, chunks, fault.what, self._usage(path, body, made))

    async def _end(
        self, writer: asyncio.StreamWriter, chunks: _Chunks, what: str, usage: Json
    ) -> None:
        if what == "die_before_usage":
            await _die(writer)
        if chunks.body.get("stream_options", {}).get("include_usage"):
            await chunks.send(chunks.event([], usage=usage))
        if what == "die_before_done":
            await _die(writer)
        if what != "no_done":
            await chunks.send(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


class _Chunks:
    """Writes the chunks of one stream."""

    def __init__(
        self, engine: ScriptedEngine, writer: asyncio.StreamWriter, path: str, body: Json
    ) -> None:
        self.engine = engine
        self.writer = writer
        self.body = body
        self.path = path
        self.chat = path != "/v1/completions"
        self.made: Counter[int] = Counter()
        """Tokens of each answer so far."""

    def piece(
        self, words: list[int], index: int, reason: str | None = None, *, role: bool = False
    ) -> bytes:
        """One more event of an answer; it says how many tokens there are by then, if that was asked."""
        self.made[index] = made = self.made[index] + len(words)
        usage = self.engine._usage(self.path, self.body, made)
        more: Json = {}
        if self.engine.kind in ("vllm", "sglang", "atoll"):
            if (self.body.get("stream_options") or {}).get("continuous_usage_stats"):
                details = {"reasoning_tokens": 0} if self.engine.reasons and self.chat else None
                more["usage"] = usage | {"completion_tokens_details": details}
        elif self.engine.kind == "llamacpp" and (reason or self.body.get("timings_per_token")):
            prompt = usage["prompt_tokens"]
            more["timings"] = {"cache_n": 1, "prompt_n": prompt - 1, "predicted_n": made}
        if role and self.body.get("return_token_ids"):
            more["prompt_token_ids"] = [7, 8, 9]
        choice = self.choice(reason, words, role=role) | {"index": index}
        return self.event([choice], **more)

    async def flush(self, words: list[int], index: int, least: int) -> None:
        """Send words that wait, if there are so many."""
        if len(words) >= least:
            await self.send(self.piece(words, index))
            words.clear()

    def event(self, choices: list[Json], **more: Any) -> bytes:
        engine = self.engine
        data = {
            "id": f"{engine.name}-{len(engine.seen)}",
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": len(engine.seen),
            "model": engine.model,
            "choices": choices,
        }
        return f"data: {json.dumps(data | more)}\n\n".encode()

    def choice(self, reason: str | None, words: list[int], role: bool = False) -> Json:
        text = "".join(WORDS[w] for w in words)
        found: Json = {"index": 0, "finish_reason": reason}
        if not self.chat:
            found["text"] = text
        elif role:
            found["delta"] = {"role": "assistant", "content": ""}
        else:
            found["delta"] = {"content": text} if words else {}
        if words and (self.engine.kind == "atoll" or self.body.get("return_token_ids")):
            found["token_ids"] = words
        if self.body.get("logprobs") and words:
            found["logprobs"] = {"content": [_logprob(w) for w in words]}
        return found

    async def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        try:
            await self.writer.drain()
        except ConnectionError:
            self.engine.cancelled += 1
            raise
        if _left(self.writer):
            self.engine.cancelled += 1
            raise ConnectionError("the client left")


async def _misbehave(
    writer: asyncio.StreamWriter, what: str, event: bytes, chunks: _Chunks
) -> None:
    send = chunks.send
    if what == "die":
        await _die(writer)
    elif what == "die_in_event":
        await send(event[: len(event) // 2])
        await _die(writer)
    elif what == "split":
        await send(event[:20])
        await asyncio.sleep(0.01)
        await _die(writer)
    elif what == "stall":
        await _stall(writer)
    elif what == "stall_in_event":
        await send(event[: len(event) // 2])
        await _stall(writer)
    elif what == "error_event":
        await send(b'data: {"error": {"message": "CUDA error", "code": 500}}\n\n')
        await _die(writer)
    elif what == "client_error_event":
        error = {"message": "bad schema", "type": "BadRequestError", "code": 400}
        await send(f"data: {json.dumps({'error': error})}\n\n".encode())
        await _die(writer)
    elif what == "mistake_event":
        error = {"message": "no such tool", "type": "invalid_request_error", "param": "tools"}
        await send(f"data: {json.dumps({'error': error})}\n\n".encode())
        await _stall(writer)
    elif what == "bad_json":
        await send(b'data: {"choices": [\n\ndata: "error"\n\n')
    elif what == "end_early":
        writer.write(b"0\r\n\r\n")


def _left(writer: asyncio.StreamWriter) -> bool:
    return writer.transport.is_closing() or READERS[writer].at_eof()


async def _stall(writer: asyncio.StreamWriter) -> None:
    while not _left(writer):
        await asyncio.sleep(0.01)
    raise ConnectionError("the client left")


async def _die(writer: asyncio.StreamWriter) -> None:
    await writer.drain()
    # What was written should arrive before the end does.
    await asyncio.sleep(0.005)
    writer.transport.abort()
    raise ConnectionError("scripted death")


def _logprob(word: int) -> Json:
    return {"token": WORDS[word], "logprob": -0.5, "bytes": None, "top_logprobs": []}


def _write(writer: asyncio.StreamWriter, status: int, data: Json, extra: str = "") -> None:
    body = json.dumps(data).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


@dataclass(frozen=True)
class Undisturbed:
    """What a client receives when nothing goes wrong."""

    text: str
    usage: Json
    reason: str


def expected(path: str, body: Json) -> Undisturbed:
    engine = ScriptedEngine()
    made = list(engine.words(path, body))
    text = "".join(WORDS[w] for w, _ in made if w is not None)
    return Undisturbed(text, engine._usage(path, body, len(made) - 1), made[-1][1])


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--step-ms", type=float, default=5.0)
    options = parser.parse_args()
    engine = ScriptedEngine(kind=options.kind, step_s=options.step_ms / 1e3)
    print(await engine.start(), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
