"""Servers that answer as engines do: the shapes of vLLM, SGLang, llama.cpp, TGI and Atoll's instances.

As a program: `python -m tests.runtime.join.shapes --kind vllm --port N [--model M]`. A file given with
`--sick` makes /health fail while it is there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
CREATED = 1718000000


def listed(model: str, owner: str, **more: object) -> Json:
    entry = {"id": model, "object": "model", "created": CREATED, "owned_by": owner}
    return {"object": "list", "data": [entry | more]}


def vllm(model: str) -> dict[str, Json]:
    more: Json = {"root": model, "parent": None, "max_model_len": 8192, "permission": []}
    return {
        "/health": {},
        "/v1/models": listed(model, "vllm", **more),
        "/version": {"version": "0.10.1.1"},
    }


def sglang(model: str) -> dict[str, Json]:
    return {
        "/health": {},
        "/v1/models": listed(model, "sglang", root=model, parent=None, max_model_len=32768),
        "/get_server_info": {
            "model_path": model,
            "dtype": "bfloat16",
            "quantization": None,
            "version": "0.4.9.post2",
            "internal_states": [{"last_gen_throughput": 1.0}],
        },
        "/get_model_info": {"model_path": model, "is_generation": True},
    }


def llamacpp(model: str) -> dict[str, Json]:
    meta = {"vocab_type": 2, "n_vocab": 49152, "n_ctx_train": 8192, "n_params": 134515008}
    return {
        "/health": {"status": "ok"},
        "/v1/models": {"models": []} | listed(model, "llamacpp", meta=meta),
        "/props": {
            "default_generation_settings": {"id": 0, "n_ctx": 2048},
            "total_slots": 4,
            "model_path": "/models/smollm2-135m-instruct-q8_0.gguf",
            "build_info": "b5921-6c5bc064",
        },
    }


def tgi(model: str) -> dict[str, Json]:
    return {
        "/health": {},
        "/v1/models": listed(model, model),
        "/info": {
            "model_id": model,
            "model_dtype": "float16",
            "max_total_tokens": 4096,
            "router": "text-generation-router",
            "version": "3.0.1",
        },
    }


def atoll(model: str) -> dict[str, Json]:
    return {
        "/health": {},
        "/v1/models": listed(model, "atoll", max_model_len=2048),
    }


SHAPES = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp, "tgi": tgi, "atoll": atoll}
METRICS = {
    "vllm": """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 1200.0
vllm:num_requests_running_other{engine="0"} 9.0
""",
    "sglang": """sglang:num_running_reqs{model_name="m"} 3.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.25
sglang:generation_tokens_total{model_name="m"} 1200.0
""",
    "llamacpp": """llamacpp:requests_processing 3
llamacpp:requests_deferred 2
llamacpp:tokens_predicted_total 1200
""",
    "tgi": """tgi_batch_current_size 3
tgi_queue_size 2
""",
}


@dataclass
class Shaped:
    """A server with fixed answers; `status` overrides those of single paths, `seen` counts requests."""

    answers: dict[str, Json]
    status: dict[str, int] = field(default_factory=dict)
    metrics: str | None = None
    server: str = "uvicorn"
    seen: list[str] = field(default_factory=list)
    sick: Path | None = None
    tokens: int = 3
    pause_s: float = 0.0
    """Before each token of a stream."""
    url: str = ""
    _server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> str:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.url

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                path = first.split()[1]
                self.seen.append(f"{first.split()[0]} {path}")
                await self._answer(writer, path, body)
                if headers.get("connection") == "close":
                    break
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: bytes) -> None:
        status = self.status.get(path, 200)
        if path == "/health" and self.sick is not None and self.sick.exists():
            status = 500
        if status == 200 and path == "/metrics" and self.metrics is not None:
            self._write(writer, 200, self.metrics.encode(), "text/plain; version=0.0.4")
        elif status == 200 and path in ("/v1/completions", "/v1/chat/completions"):
            if json.loads(body).get("stream"):
                await self._stream(writer)
            else:
                self._write(writer, 200, b'{"choices": [{"text": "a"}], "usage": {}}')
        elif status != 200 or path not in self.answers:
            said = json.dumps({"error": {"message": "no"}}).encode()
            self._write(writer, status if status != 200 else 404, said)
        else:
            self._write(writer, 200, json.dumps(self.answers[path]).encode())
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        events = [
            json.dumps({"choices": [{"index": 0, "text": f" t{i}"}]}) for i in range(self.tokens)
        ]
        for event in [*events, "[DONE]"]:
            await asyncio.sleep(self.pause_s)
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    def _write(
        self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json"
    ) -> None:
        head = f"HTTP/1.1 {status} X\r\nserver: {self.server}\r\ncontent-type: {kind}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--model", default="org/m")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sick", type=Path)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=3)
    options, _ = parser.parse_known_args()
    server = Shaped(
        SHAPES[options.kind](options.model),
        sick=options.sick,
        pause_s=options.pause_ms / 1e3,
        tokens=options.tokens,
    )
    await server.start(options.port)
    print("pid", os.getpid(), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
