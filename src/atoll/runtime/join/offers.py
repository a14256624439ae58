"""Offer of a running server: its models, how long a context they take, which engine it is.

vLLM, SGLang, llama.cpp, TGI and Atoll's instances all answer /v1/models; each says the rest elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from atoll.engines.table import ENGINES, UNKNOWN, list_launched, recognise
from atoll.fabric.registry.records import NodeService
from atoll.runtime.http.http_client import FetchError, HttpResponse, request
from atoll.runtime.join.engine_command import precision_of

DEFAULT_HEALTH = "/health"
# What a server says of itself goes into the fabric, so it is bounded here.
_MAX_BYTES = 4 * 2**20
_MAX_SERVICES = 64
_LONGEST_NAME = 256
_MAX_CONTEXT = 2**40
_MAX_CONFIG_BYTES = 2**20
Kind = Literal["llm", "embedding", "generic"]


class UnhealthyError(Exception):
    """A server that does not do its work, and how that shows."""


@dataclass(frozen=True, slots=True)
class ServerOffer:
    """Services, engine and version of a server now."""

    services: tuple[NodeService, ...]
    engine: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class KnownServer:
    """Where a server is and what is known of it beforehand.

    `precision` is what the user says, `hint` what the command line does. `aliases` are further names of a
    model, by model. `generic` names a service that is no language model: nothing is asked but its health.
    `apart`: it runs one phase alone.
    """

    url: str
    health: str = DEFAULT_HEALTH
    api_key: str | None = field(default=None, repr=False)
    engine: str = ""
    precision: str | None = None
    hint: str = "unknown"
    context: int | None = None
    kind: Kind | None = None
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    generic: str | None = None
    apart: bool = False
    timeout_s: float = 5.0
    token_s: float = 60.0


class Inspector:
    """Looks at one server. What does not change while it runs is asked once."""

    def __init__(self, server: KnownServer) -> None:
        self.server = server
        self._facts: dict[str, dict[str, Any]] | None = None
        self._kind: Kind | None = None
        self.known: ServerOffer | None = None
        """Its last offer, also while it is not well."""

    def reset(self) -> None:
        """Forget everything: another process will answer."""
        self._facts = self._kind = None

    async def look(self, *, prove: bool) -> ServerOffer:
        """Return what is served; with `prove`, after it gave a real token. UnhealthyError if it does not."""
        try:
            await self._health()
            if self.server.generic is not None:
                return ServerOffer((NodeService(model=self.server.generic, kind="generic"),))
            models = await self._get("/v1/models")
            if models.status != 200:
                raise UnhealthyError(f"/v1/models answered with status {models.status}")
            listed = read_models(models.body)
            engine = self._engine(models, listed)
            if self._facts is None:
                self._facts = await self._details(engine)
            if prove or self._kind is None:
                self._kind = await self._prove(str(listed[0]["id"]))
            self.known = offer_of(self.server, engine, listed, self._facts, self._kind)
            return self.known
        except FetchError as error:
            raise UnhealthyError(str(error)) from error

    async def _health(self) -> None:
        answer = await self._get(self.server.health)
        # Not every server has it; one that the user named has to be there.
        missing = answer.status == 404 and self.server.health == DEFAULT_HEALTH
        if answer.status >= 400 and not missing:
            raise UnhealthyError(f"{self.server.health} answered with status {answer.status}")

    def _engine(self, models: HttpResponse, listed: list[dict[str, Any]]) -> str:
        owner = str(listed[0].get("owned_by", "")).lower()
        header = models.headers.get("server", "")
        for engine in list_launched():
            if owner == engine.name or (engine.server_header and engine.server_header in header):
                return engine.name
        return self.server.engine

    async def _details(self, engine: str) -> dict[str, dict[str, Any]]:
        details: dict[str, dict[str, Any]] = {}
        known = recognise(engine or UNKNOWN)
        for path in known.detail_paths if known else ():
            try:
                answer = await self._get(path)
                content = json.loads(answer.body) if answer.status == 200 else None
            except (FetchError, ValueError):
                continue
            if isinstance(content, dict):
                details[path.removeprefix("/get_").lstrip("/")] = content
        return details

    async def _prove(self, model: str) -> Kind:
        """Ask for a token, or for an embedding of those that make none; returns what it makes."""
        known = recognise(self.server.engine) if self.server.apart else None
        alone = {} if known is None else dict(known.apart_proof)
        completion: dict[str, object] = {"model": model, "prompt": "Hi", "max_tokens": 1, **alone}
        tries: tuple[tuple[Kind, str, dict[str, object]], ...] = (
            ("llm", "/v1/completions", completion),
            ("embedding", "/v1/embeddings", {"model": model, "input": "Hi"}),
            (
                "llm",
                "/v1/chat/completions",
                {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
            ),
        )
        refusal = ""
        for kind, path, body in tries:
            answer = await request(
                self.server.url + path,
                body=body,
                timeout_s=self.server.token_s,
                api_key=self.server.api_key,
                max_bytes=_MAX_BYTES,
            )
            if answer.status == 200:
                return kind
            # 501: this is not offered, which is no fault of the server.
            if answer.status >= 500 and answer.status != 501:
                text = answer.body[:200].decode("utf-8", "replace")
                raise UnhealthyError(f"{path} answered with status {answer.status}: {text}")
            refusal = refusal or f"{path} answered with status {answer.status}"
        raise UnhealthyError(f"no token: {refusal}")

    async def _get(self, path: str) -> HttpResponse:
        return await request(
            self.server.url + path,
            timeout_s=self.server.timeout_s,
            api_key=self.server.api_key,
            max_bytes=_MAX_BYTES,
        )


def read_models(body: bytes) -> list[dict[str, Any]]:
    """Read the answer of /v1/models: at least one model, each with a name; UnhealthyError otherwise."""
    try:
        listed = json.loads(body)["data"]
        entries = [entry for entry in listed if _is_name(entry["id"])]
    except (ValueError, KeyError, TypeError) as error:
        raise UnhealthyError("/v1/models did not answer with a list of models") from error
    if not entries:
        raise UnhealthyError("/v1/models lists no model")
    return entries[:_MAX_SERVICES]


def _is_name(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _LONGEST_NAME and text.isprintable()


def offer_of(
    server: KnownServer,
    engine: str,
    listed: list[dict[str, Any]],
    facts: Mapping[str, Mapping[str, Any]],
    kind: Kind,
) -> ServerOffer:
    """Put together what a server said in several places."""
    info = facts.get("info", {})
    if not engine:
        router = str(info.get("router", ""))
        engine = next((e.name for e in ENGINES.values() if e.router and e.router in router), "")
    if facts.get("model_info", {}).get("is_generation") is False:
        kind = "embedding"
    services = tuple(
        NodeService(
            model=str(entry["id"]),
            aliases=tuple(server.aliases.get(str(entry["id"]), ())),
            precision=_precision(server, entry, facts),
            context=server.context or _context(entry, facts),
            kind=server.kind or kind,
        )
        for entry in listed
    )
    return ServerOffer(services, engine, _version(facts))


def _precision(
    server: KnownServer, entry: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]
) -> str:
    if server.precision is not None:
        return server.precision
    about = facts.get("server_info", {})
    props = facts.get("props", {})
    root = str(
        entry.get("root") or about.get("model_path") or facts.get("info", {}).get("model_id") or ""
    )
    # From what states it outright over names that suggest it to the plain data type.
    for text in (
        *(about.get("quantization"), facts.get("info", {}).get("quantize")),
        None if server.hint == "unknown" else server.hint,
        *(props.get("model_path"), entry.get("id"), root),
        *(facts.get("info", {}).get("model_dtype"), about.get("dtype")),
    ):
        precision = precision_of(text) if isinstance(text, str) else None
        if precision is not None:
            return precision
    return config_precision(root or str(entry["id"])) or "unknown"


def config_precision(source: str) -> str | None:
    """Return the precision of weights on this machine by their config.json: a folder, or HF's cache."""
    for path in _configs(source):
        try:
            if path.stat().st_size > _MAX_CONFIG_BYTES:
                continue
            config = json.loads(path.read_text(encoding="utf-8"))
            quantised = config.get("quantization_config") or {}
            method, bits = str(quantised.get("quant_method", "")), quantised.get("bits")
            dtype = config.get("dtype") or config.get("torch_dtype")
        except (OSError, ValueError, AttributeError):
            continue
        if bits in (2, 3, 4, 5, 6, 8):
            return f"int{bits}"
        precision = precision_of(method) if method else precision_of(str(dtype))
        if precision is not None:
            return precision
    return None


def _configs(source: str) -> list[Path]:
    if not source or source.startswith("-"):
        return []
    if os.path.isabs(source):
        return [Path(source) / "config.json"]
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = cache / f"models--{source.replace('/', '--')}" / "snapshots"
    # The name comes from outside: it must not lead out of the cache.
    if ".." in source or not folder.is_dir():
        return []
    return sorted(folder.glob("*/config.json"))


def _context(entry: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> int | None:
    settings = facts.get("props", {}).get("default_generation_settings", {})
    info = facts.get("info", {})
    meta = entry.get("meta") or {}
    for tokens in (
        entry.get("max_model_len"),
        settings.get("n_ctx") if isinstance(settings, dict) else None,
        facts.get("server_info", {}).get("context_length"),
        *(info.get("max_total_tokens"), info.get("max_input_tokens")),
        meta.get("n_ctx_train") if isinstance(meta, dict) else None,
    ):
        if isinstance(tokens, int) and 0 < tokens <= _MAX_CONTEXT:
            return tokens
    return None


def _version(facts: Mapping[str, Mapping[str, Any]]) -> str:
    for name, key in (
        *(("version", "version"), ("server_info", "version"), ("info", "version")),
        ("props", "build_info"),
    ):
        version = facts.get(name, {}).get(key)
        # llama.cpp built outside of its repository says "b0-unknown".
        if isinstance(version, str) and version.isprintable() and "unknown" not in version:
            return version[:64]
    return ""
