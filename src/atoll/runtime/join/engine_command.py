"""Reading an engine's command line: which engine, where it listens, which model, how precise.

Nothing is guessed that a running server says better; what is read here serves until it does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.core.errors import UsageError
from atoll.engines.table import ENGINES, recognise

PORT = "{port}"
"""Stands in a command for a free port that is chosen when it starts."""
_PRECISIONS: Mapping[str, str] = {
    "float32": "fp32",
    "fp32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "fp8": "fp8",
    "int8": "int8",
    "w8a8": "int8",
    "w8a16": "int8",
    "int4": "int4",
    "w4a16": "int4",
    "awq": "int4",
    "gptq": "int4",
    "nf4": "int4",
    "bnb": "int4",
    "bitsandbytes": "int4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "fp4": "fp4",
}
_GGUF = re.compile(r"(?:^|[^a-z0-9])i?q([2-8])(?:_[0-9a-z]+)*(?:$|[^a-z0-9])")
_UNQUANTISED = frozenset({"fp32", "bf16", "fp16"})


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """A command and what it says of itself: `engine` is "" and `port` None where it does not say."""

    arguments: tuple[str, ...]
    engine: str
    host: str
    port: int | None
    model: str | None
    precision: str
    api_key: str | None = None

    @property
    def url(self) -> str:
        """Where the engine will answer, as seen from this machine."""
        known = recognise(self.engine)
        port = self.port or (known.default_port if known else None)
        if port is None:
            raise UsageError(
                "the command does not say on which port it will listen",
                field="--port",
                hint="give --port N, --url http://127.0.0.1:N, or write {port} in the command",
            )
        host = "127.0.0.1" if self.host in ("", "0.0.0.0", "::", "localhost") else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}"


def read_command(arguments: Sequence[str], *, port: int | None = None) -> EngineCommand:
    """Read a command; `port` stands in for {port} and wins over what the command says."""
    if not arguments:
        raise UsageError("there is no command after --", field="COMMAND")
    offered = any(PORT in word for word in arguments)
    if offered and port is None:
        raise UsageError("{port} in the command needs a port", field="--port")
    words = tuple(word.replace(PORT, str(port)) for word in arguments)
    engine = _engine(words)
    model = _model(words)
    port_text = _option(words, "--port", "-p") if engine else _option(words, "--port")
    return EngineCommand(
        arguments=words,
        engine=engine,
        host=_option(words, "--host", "--hostname") or "",
        port=port if port is not None else _number(port_text),
        model=model,
        precision=_precision(words, model),
        api_key=_option(words, "--api-key"),
    )


def takes_port(arguments: Sequence[str]) -> bool:
    """Whether a command leaves its port to whoever starts it."""
    return any(PORT in word for word in arguments)


def precision_of(text: str) -> str | None:
    """Return the precision a name or a dtype speaks of, None if it speaks of none.

    The smallest wins: "Meta-Llama-3.1-8B-Instruct-FP8" is fp8, "qwen2.5-7b-q4_k_m.gguf" int4.
    """
    lower = text.lower().removeprefix("torch.")
    if lower in _PRECISIONS:
        return _PRECISIONS[lower]
    match = _GGUF.search(lower)
    if match is not None:
        return f"int{match[1]}"
    words = re.split(r"[^a-z0-9]+", lower)
    named = [_PRECISIONS[word] for word in words if word in _PRECISIONS]
    quantised = [name for name in named if name not in _UNQUANTISED]
    return next(iter(quantised or named), None)


def _engine(words: tuple[str, ...]) -> str:
    # Wrappers come first (srun, apptainer exec image.sif, env A=b, python -m); a model may be called
    # anything, so an option's value does not count.
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        value = before.startswith("-") and before not in ("-m", "--") and "=" not in before
        if value and words[index + 1 : index + 2] != ("serve",):
            continue
        for engine in ENGINES.values():
            if engine.program and engine.program.fullmatch(os.path.basename(word)):
                return engine.name
    return ""


def _option(words: Sequence[str], *names: str) -> str | None:
    for index, word in enumerate(words):
        for name in names:
            if word == name and index + 1 < len(words):
                return words[index + 1]
            if name.startswith("--") and word.startswith(f"{name}="):
                return word[len(name) + 1 :]
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and 0 < int(text) < 65536 else None


def _model(words: Sequence[str]) -> str | None:
    # Elsewhere `-m` names a Python module.
    short = ("-m",) if any(os.path.basename(word) == "llama-server" for word in words) else ()
    named = _option(words, "--model", "--model-path", "--model-id", *short)
    if named is not None:
        return named
    for index, word in enumerate(words[:-1]):
        # `vllm serve MODEL`
        if word == "serve" and not words[index + 1].startswith("-"):
            return words[index + 1]
    return None


def _precision(words: Sequence[str], model: str | None) -> str:
    quantised = _option(words, "--quantization", "--quantize", "-q")
    for text in (quantised, model, _option(words, "--dtype")):
        precision = precision_of(text) if text else None
        if precision is not None:
            return precision
    return "unknown"
