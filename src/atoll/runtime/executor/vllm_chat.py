"""A language model by vLLM, as a component: pictures and sounds are vectors that others made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from atoll.components.base import BadInputError, Setup
from atoll.components.chat_inputs import ChatInputs, frame_vectors
from atoll.components.transformers_parts import FAMILIES, Family, open_setup
from atoll.core.errors import InputError, UsageError
from atoll.core.files import read_json_object
from atoll.core.request_parameters import OutputFormat
from atoll.engine.embeds import FramedVectors
from atoll.engine.engine_errors import EngineError, WeightsError
from atoll.engine.scheduler_core import GenerateRequest, TokenEvent
from atoll.engine.text import TextCodec
from atoll.engines.limits import EngineLaunch
from atoll.runtime.executor.smollm2 import EngineChat
from atoll.runtime.executor.vllm_server import (
    ServerOrder,
    VllmServer,
    check_loopback,
    visible_gpus,
)
from atoll.runtime.http.http_client import FetchError, StatusError, stream_lines

_LIMITS = {
    "max_batch": "max_num_seqs",
    "max_length": "max_model_len",
    "kv_bytes": "kv_bytes",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "quantization": "quantization",
}
"""Limits by the names of options, which are those of other components where these have them too."""
_OPTIONS = ("url", "program", "log", "tensor_parallel", "ready_s", *_LIMITS)
_READY_S = 590.0
"""Less than an executor has to become ready, so that what is wrong is said."""
_SILENT_S = 120.0
_FAULTS = frozenset({400, 413, 422})
"""Statuses by which a server says that the request itself is wrong."""
_TABLES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "transformer.wte.weight",
)
"""Names of a model's own table of vectors, one for each token."""
_SCALED = ("embedding_multiplier", "scale_emb", "embedding_scale", "mup_embedding_multiplier")
"""Settings by which vectors of the table are multiplied before they are read."""
_GUIDES = {"json_schema": "json", "regex": "regex", "lark": "grammar", "grammar": "grammar"}
_TOKEN = "token_id:"  # noqa: S105 - how a token is named beside its probability


def unreadable(config: Mapping[str, Any]) -> str | None:
    """Return why vLLM would read vectors of a model wrongly, by its config.json; None: it does not."""
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind)
    text = config.get("text_config", config)
    if family is not None and family.has_grid:
        return f"{kind} has positions with a height and a width (M-RoPE), which vLLM gives to no vectors"
    if family is not None and family.token_types is not None:
        return f"{kind} looks both ways within a picture, which vLLM does with no vectors"
    if kind.startswith("gemma") or any(text.get(name, 1.0) not in (None, 1.0) for name in _SCALED):
        return f"{kind} multiplies the vectors of its table, which is not done here"
    return None


class TokenTable:
    """A model's own vectors of its tokens, the only tensor of a checkpoint that is read."""

    def __init__(self, folder: Path) -> None:
        from atoll.engine.weights.reader import WeightReader

        reader = WeightReader(folder)
        name = next((each for each in _TABLES if each in reader), None)
        if name is None:
            raise WeightsError(
                "there is no table of token vectors",
                path=folder,
                hint=f"known are {', '.join(_TABLES)}",
            )
        self._table = reader.read(name)

    def rows(self, request: GenerateRequest) -> Any:
        """Return prompt and answer so far as vectors, those that were given among them."""
        import torch

        rows = self._table[torch.tensor([*request.prompt, *request.generated])]
        if request.embeds is not None:
            places = torch.from_numpy(request.embeds.positions.copy())
            rows[places] = torch.from_numpy(request.embeds.rows.copy()).to(rows.dtype)
        return rows


class VllmEngine:
    """A vLLM server as an engine of this process: tokens in, or vectors, and tokens out."""

    def __init__(
        self, folder: Path, server: VllmServer, *, ready_s: float = _READY_S, table: bool = True
    ) -> None:
        self.codec = TextCodec(folder)
        self.max_length = self.codec.max_length
        self._server, self._ready_s = server, ready_s
        self._table = TokenTable(folder) if table else None

    async def start(self) -> None:
        """Start the server, or wait for the one that is named."""
        await self._server.start(self._ready_s)
        self.max_length = min(self.max_length, self._server.max_length or self.max_length)

    async def close(self) -> None:
        """End a server of one's own."""
        await self._server.close()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Stream the answer; left early, the server drops it. EngineError if it cannot be given."""
        at = len(request.generated)
        if at >= request.sampling.max_tokens:
            yield TokenEvent(request.id or "", at, finish_reason="length")
            return
        body = self._body(request)
        if request.embeds is not None and self._table is not None:
            # Megabytes, and the server's to read: no stream waits meanwhile.
            body["prompt_embeds"] = await asyncio.to_thread(_save, self._table, request)
        else:
            body["prompt"] = [*request.prompt, *request.generated]
        lines = stream_lines(
            f"{self._server.url}/v1/completions",
            body=body,
            timeout_s=_SILENT_S,
            api_key=self._server.api_key,
        )
        ended = False
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    for event in _read_line(line, request, at):
                        at = event.index + (event.token is not None)
                        ended = event.finish_reason is not None
                        yield event
                    if ended:
                        return
        except StatusError as error:
            if error.status in _FAULTS:
                raise BadInputError(_message(error.body) or str(error), "messages") from error
            raise EngineError(str(error)) from error
        except FetchError as error:
            raise EngineError(str(error)) from error
        raise EngineError("vLLM's answer broke off")

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        """Return what the server is asked, but for the prompt."""
        sampling, before = request.sampling, len(request.generated)
        body: dict[str, Any] = {
            "model": self._server.model,
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "max_tokens": sampling.max_tokens - before,
            "min_tokens": max(0, sampling.min_tokens - before),
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [
                *sampling.stop_token_ids,
                *(() if sampling.ignore_eos else sorted(self.codec.eos)),
            ],
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if sampling.logprobs is not None:
            body["logprobs"] = sampling.logprobs
        if sampling.guide is not None:
            body["structured_outputs"] = _guide(sampling.guide, before)
        return body


class VllmChat(EngineChat):
    """Chats by a vLLM server that runs beside the executor and ends with it, or by one at a loopback `url`.

    Options: model (a Hugging Face folder, or hf://org/name), device ("cpu", "cuda:N"), dtype (float32 on
    CPUs, the checkpoint's on GPUs), tensor_parallel (GPUs from that one on), max_batch (requests in a step),
    max_length (positions of prompt and answer together), kv_bytes (room for KV caches),
    gpu_memory_utilization, quantization: as vLLM has them. program: another `vllm`. url: a server that runs
    with `--enable-prompt-embeds`, of the same model. log: where a server's own words go. ready_s: how long
    it may take to start.
    """

    name: ClassVar[str] = "vllm-chat"
    engine: VllmEngine

    def __init__(self, engine: VllmEngine, family: Family | None = None) -> None:
        super().__init__(engine)
        self._family = family

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Check the options and read the table of vectors; the server starts later."""
        opened = open_setup(setup, cls.name, _OPTIONS)
        config = read_json_object(opened.folder / "config.json")
        reason = unreadable(config)
        if reason is not None:
            raise UsageError(reason, field=cls.name, hint="use transformers-chat for this model")
        family = FAMILIES.get(str(config.get("model_type")))
        option = setup.option
        url = option("url")
        if url is not None:
            given = sorted(set(setup.options or {}) - {"model", "device", "url", "ready_s"})
            if given:
                raise UsageError(
                    f"{given[0]} is said to a server that runs already",
                    field=cls.name,
                    hint="leave it out, or url",
                )
            server = VllmServer(url=check_loopback(url), api_key=os.environ.get("VLLM_API_KEY"))
        else:
            on_cores = opened.device == "cpu"
            gpus = option("tensor_parallel", 1)
            if type(gpus) is not int or gpus < 1:
                raise UsageError(
                    f"tensor_parallel has to be 1 or more, not {gpus!r}", field=cls.name
                )
            try:
                launch = EngineLaunch.parse({own: option(name) for name, own in _LIMITS.items()})
            except InputError as error:
                names = {own: name for name, own in _LIMITS.items()}
                where = f"{cls.name}.{names.get(error.field or '', error.field)}"
                raise UsageError(error.message, field=where, hint=error.hint) from error
            log = option("log")
            server = VllmServer(
                ServerOrder(
                    opened.folder,
                    launch,
                    opened.dtype or ("float32" if on_cores else None),
                    str(option("program", "vllm")),
                    visible_gpus(opened.device, gpus, os.environ),
                    setup.threads,
                    language_only=family is not None,
                    log=None if log is None else Path(log),
                )
            )
        return cls(
            VllmEngine(opened.folder, server, ready_s=float(option("ready_s", _READY_S))), family
        )

    def messages(self, asked: ChatInputs) -> Sequence[dict[str, Any]]:
        """Return the messages with what stands around a picture in the model's prompts."""
        family = self._family
        if family is None:
            return asked.messages
        return frame_vectors(
            asked.messages, lambda rows, _: FramedVectors(rows, family.before, family.after)
        )


def _save(table: TokenTable, request: GenerateRequest) -> str:
    """Return a prompt of vectors as vLLM takes it: base64 of what `torch.save` writes."""
    import base64
    import io

    import torch

    written = io.BytesIO()
    torch.save(table.rows(request), written)
    return base64.b64encode(written.getbuffer()).decode()


def _guide(guide: OutputFormat, before: int) -> dict[str, Any]:
    if before:
        raise EngineError("vLLM begins forms anew, so an answer with one cannot be gone on with")
    if guide.kind == "json_object":
        return {"json_object": True}
    return {
        _GUIDES[guide.kind]: json.loads(guide.text) if guide.kind == "json_schema" else guide.text
    }


def _read_line(line: bytes, request: GenerateRequest, at: int) -> list[TokenEvent]:
    """Return the tokens of a line of the stream; `at` is how many the answer has had."""
    data = line.strip()
    if not data.startswith(b"data:") or (data := data[5:].strip()) == b"[DONE]":
        return []
    try:
        chunk = msgspec.json.decode(data)
        if chunk.get("error"):
            raise EngineError(f"vLLM gave up: {_message(data)}")
        choices = chunk.get("choices")
        if not choices:
            return []
        choice = choices[0]
        tokens = choice.get("token_ids") or []
        finish = choice.get("finish_reason")
        told = choice.get("logprobs") or {}
        chances = told.get("token_logprobs") or [None] * len(tokens)
        tops = told.get("top_logprobs") or [None] * len(tokens)
        events = [
            TokenEvent(
                request.id or "",
                at + number,
                token=int(token),
                logprob=chance,
                top=_top(top, request.sampling.logprobs),
                finish_reason=_finish(finish) if number == len(tokens) - 1 else None,
            )
            for number, (token, chance, top) in enumerate(zip(tokens, chances, tops, strict=True))
        ]
    except (msgspec.DecodeError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EngineError(f"a line of vLLM's answer cannot be read: {error}") from error
    if finish is not None and not events:
        events.append(TokenEvent(request.id or "", at, finish_reason=_finish(finish)))
    return events


def _finish(said: str | None) -> Any:
    if said not in (None, "stop", "length"):
        raise EngineError(f"vLLM ended an answer with {said!r}")
    return said


def _top(said: Mapping[str, float] | None, most: int | None) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens, as the engine's own sampler orders them."""
    pairs = [(int(name.removeprefix(_TOKEN)), chance) for name, chance in (said or {}).items()]
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[: most or 0])


def _message(body: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError, AttributeError, TypeError):
        found = msgspec.json.decode(body)["error"]
        return str(found["message"] if isinstance(found, dict) else found)[:1000]
    return ""
