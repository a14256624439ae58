"""An engine for tests that runs one phase alone, and is strict about KV cache.

It speaks vLLM's protocol: a prefill engine keeps the KV cache of a prompt under numbers of blocks until a
decode engine fetches it at its side channel, or its time is up; a decode engine fetches just what it is
told, and what it gets must be the KV cache of its own prompt. With `kind` "sglang" both are asked at once and
meet under a number. What is wrong in a request is an error, and what is left behind is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field

from tests.runtime.gateway.engine import (
    WORDS,
    Fault,
    Json,
    ScriptedEngine,
    _die,
    _left,
    _stall,
    _write,
    next_word,
    tokens_of,
)

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TOLD = {"do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_block_ids"}
TOLD |= {"remote_request_id", "remote_host", "remote_port", "tp_size"}


class ProtocolError(Exception):
    """A request that no gateway should send."""


@dataclass
class KvEngine(ScriptedEngine):
    phase: str = "prefill"
    handover: str = "nixl"
    kept_s: float = 60.0
    slow_s: float = 0.0
    """How long a prompt takes."""
    kept: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    """KV cache by request: its blocks, and the prompt it is of."""
    let_go: int = 0
    fetched: int = 0
    recomputed: int = 0
    """Prompts whose KV cache was not there any more."""
    own: int = 0
    """Prompts that it computed without being told of any KV cache."""
    wrong: list[str] = field(default_factory=list)
    rooms: dict[int, asyncio.Event] = field(default_factory=dict)
    side_host: str = "127.0.0.1"
    wanted_side_port: int = 0
    _side: asyncio.Server | None = None
    _number: int = 0

    async def start(self, port: int = 0) -> str:
        self._side = await asyncio.start_server(
            self._serve_side, self.side_host, self.wanted_side_port
        )
        name = "bootstrap" if self.kind == "sglang" else self.handover
        self.metadata = {"handover": f"{name}/{self.phase}"}
        if self.kind == "sglang" and self.phase == "prefill":
            self.metadata["bootstrap"] = f"127.0.0.1 {self.side_port}"
        return await super().start(port)

    async def stop(self) -> None:
        if self._side is not None:
            self._side.close()
        await super().stop()

    @property
    def side_port(self) -> int:
        assert self._side is not None
        port: int = self._side.sockets[0].getsockname()[1]
        return port

    # The side channel

    async def _serve_side(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        answer: Json = {}
        if "room" in asked:
            event = self.rooms.setdefault(asked["room"], asyncio.Event())
            event.set()
            answer = {"met": True}
        else:
            found = self.kept.get(asked["request"])
            if found is not None and found[0] == asked["blocks"] and asked["engine"] == self.name:
                del self.kept[asked["request"]]
                answer = {"prompt": found[1]}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def _ask_side(self, host: str, port: int, asked: Json) -> Json:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(json.dumps(asked).encode() + b"\n")
            found: Json = json.loads(await reader.readline())
            return found
        finally:
            writer.close()

    def _expire(self, request: str) -> None:
        if self.kept.pop(request, None) is not None:
            self.let_go += 1

    # Requests

    async def _answer(
        self, writer: asyncio.StreamWriter, path: str, body: Json, fault: Fault
    ) -> None:
        if path not in ("/v1/chat/completions", "/v1/completions"):
            await super()._answer(writer, path, body, fault)
            return
        try:
            if self.kind == "sglang":
                await self._meet(writer, path, body, fault)
            elif self.phase == "prefill":
                await self._prefill(writer, path, body, fault)
            else:
                await self._take(path, body)
                await super()._answer(writer, path, body, fault)
        except ProtocolError as error:
            self.wrong.append(str(error))
            _write(writer, 500, {"error": {"message": str(error)}})

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise ProtocolError(f"{self.name}: {what}")

    async def _prefill(
        self, writer: asyncio.StreamWriter, path: str, body: Json, fault: Fault
    ) -> None:
        if "kv_transfer_params" not in body and body.get("prompt") == "Hi":
            # Whether it gives a token at all is asked without a partner.
            await super()._answer(writer, path, body, fault)
            return
        self._check(body.get("kv_transfer_params") == ASKED, "KV cache is not asked to be kept")
        self._check(
            body.get("max_tokens") == 1 and body.get("stream") is False, "more than a token"
        )
        self._check(body.get("max_completion_tokens", 1) == 1, "more than a token")
        for name in ("stream_options", "min_tokens", "logprobs", "top_logprobs"):
            self._check(name not in body, f"{name} beside one token")
        if fault.what.isdigit() or fault.what in ("die_before_head", "stall_before"):
            await super()._answer(writer, path, body, fault)
            return
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
            if _left(writer):
                self.cancelled += 1
                raise ConnectionError("the client left")
        prompt, said = self._prompt(path, body)
        self._number += 1
        request = f"{self.name}-{self._number}"
        digest = hashlib.sha256(request.encode()).digest()
        blocks = [digest[n] for n in range(1 + tokens_of(prompt + said) // 16)]
        if fault.what == "no_params":
            _write(writer, 200, self._one_token(path, body))
            return
        self.kept[request] = (blocks, prompt + said)
        asyncio.get_running_loop().call_later(self.kept_s, self._expire, request)
        told = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": blocks,
            "remote_engine_id": self.name,
            "remote_request_id": request,
            "remote_host": self.side_host,
            "remote_port": self.side_port,
            "tp_size": 1,
        }
        if fault.what == "wrong_blocks":
            told["remote_block_ids"] = [*blocks, 7]
        _write(writer, 200, self._one_token(path, body) | {"kv_transfer_params": told})

    def _one_token(self, path: str, body: Json) -> Json:
        prompt, said = self._prompt(path, body)
        word = next_word(prompt + said)
        text = "" if word is None else WORDS[word]
        choice: Json = {"index": 0, "finish_reason": "length", "message": {"content": text}}
        return {"id": "x", "choices": [choice], "usage": self._usage(path, body, 1)}

    async def _take(self, path: str, body: Json) -> None:
        """Fetch the KV cache of a prompt, or compute it."""
        told = body.get("kv_transfer_params")
        if told is None:
            self.own += 1
            return
        self._check(set(told) == TOLD, f"told {sorted(told)}")
        self._check(told["do_remote_prefill"] and not told["do_remote_decode"], "both or none")
        asked = {
            "request": told["remote_request_id"],
            "blocks": told["remote_block_ids"],
            "engine": told["remote_engine_id"],
        }
        try:
            found = await self._ask_side(told["remote_host"], told["remote_port"], asked)
        except OSError:
            found = {}
        if "prompt" not in found:
            # As vLLM does where KV cache that fails to load is computed again.
            self.recomputed += 1
            return
        prompt, said = self._prompt(path, body)
        self._check(found["prompt"] == prompt + said, "KV cache of another prompt")
        self.fetched += 1

    async def _meet(
        self, writer: asyncio.StreamWriter, path: str, body: Json, fault: Fault
    ) -> None:
        room, host, port = (body.get(f"bootstrap_{name}") for name in ("room", "host", "port"))
        self._check(isinstance(room, int) and isinstance(port, int), "no room to meet in")
        if fault.what == "die_before_head":
            await _die(writer)
        if fault.what == "stall_before":
            await _stall(writer)
        if self.phase == "decode":
            await self._ask_side(str(host), int(port or 0), {"room": room})
            self.fetched += 1
            await super()._answer(writer, path, body, fault)
            return
        self._check(port == self.side_port, "another one's room")
        if fault.what.isdigit():
            await super()._answer(writer, path, body, fault)
            return
        await self.rooms.setdefault(int(room or 0), asyncio.Event()).wait()
        _write(writer, 200, self._one_token(path, body))


def _serve_as_vllm(words: list[str]) -> tuple[KvEngine, int]:
    """Read a command of `vllm serve` as far as this engine follows it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--kv-transfer-config", type=json.loads)
    options, _ = parser.parse_known_args(words)
    way, role = (options.kv_transfer_config[f"kv_{name}"] for name in ("connector", "role"))
    engine = KvEngine(
        phase={"kv_producer": "prefill", "kv_consumer": "decode"}[role],
        handover={"NixlConnector": "nixl", "NixlPushConnector": "nixl-push"}[way],
        model=options.served_model_name,
        name=f"engine-{options.port}",
        side_host=os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"],
        wanted_side_port=int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        kept_s=float(options.kv_transfer_config["kv_connector_extra_config"]["kv_lease_duration"]),
    )
    return engine, options.port


async def _main() -> None:
    port = 0
    if sys.argv[1:2] == ["serve"]:
        engine, port = _serve_as_vllm(sys.argv[1:])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--phase", default="prefill")
        parser.add_argument("--name", default="engine")
        parser.add_argument("--step-ms", type=float, default=5.0)
        options = parser.parse_args()
        engine = KvEngine(phase=options.phase, name=options.name, step_s=options.step_ms / 1e3)
    url = await engine.start(port)
    print(json.dumps({"url": url, "metadata": engine.metadata}), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
