"""llama.cpp's server from the wheel `xllamacpp`: a GGUF file on any CPU, in one process.

`python -m atoll.engines.llamacpp --model FILE --port N --alias NAME` runs it.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from pathlib import Path
from typing import ClassVar

from atoll.core.errors import AtollError, InputError, MissingDependencyError
from atoll.engines.engine import (
    Engine,
    EngineLayout,
    ParsedCommand,
    ServedModel,
    ServerCommand,
    ServerHost,
    is_whole,
)
from atoll.engines.limits import EngineLaunch
from atoll.engines.options import (
    LaunchOptions,
    ValueOption,
    read_launch,
    refuse_rest,
    settle_launch,
    split_options,
    write_launch,
)

_MODULE = "atoll.engines.llamacpp"
_CONTEXT_TOKENS = 2048
"""Prompt and answer of one request, unless a plan says how many tokens."""
_OPTIONS: LaunchOptions = {"max_model_len": ValueOption("--context")}
_SLOTS = 4
"""Requests that run at a time."""


class LlamaCpp(Engine):
    """llama.cpp for one GGUF file."""

    name = "llamacpp"
    title = "llama.cpp"
    aliases = ("llama.cpp", "llama-server", "xllamacpp")
    preference = 10
    launches = True
    weights = "gguf"
    on_cores = True
    max_nodes = 1
    ready_s = 300.0
    stop_s = 5.0
    max_inflight = _SLOTS
    settings: ClassVar = {"threads": is_whole}
    program = re.compile(r"llama-server|llama_cpp(\..*)?|atoll\.engines\.llamacpp")
    default_port = 8080
    server_header = "llama.cpp"
    detail_paths = ("/props",)
    metrics: ClassVar = {
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "tokens": ("llamacpp:tokens_predicted_total",),
    }
    continues_messages = True
    completion_tokens = None
    tokenizes_messages = False

    def takes(self, source: str, *, stand_in: bool) -> bool:
        """Return whether the weights are a GGUF file."""
        del stand_in
        return source.endswith(".gguf")

    def check_source(self, source: str) -> None:
        """Refuse everything but a GGUF file."""
        if not source.lower().endswith(".gguf"):
            raise InputError(
                f"llama.cpp needs a GGUF file, not {source}",
                field="model",
                hint="name a .gguf file, or use the engine 'atoll'",
            )

    def command(self, layout: EngineLayout, served: ServedModel, host: ServerHost) -> ServerCommand:
        """Return the command that runs this module as the server."""
        del layout
        arguments = [
            *(host.python, "-m", _MODULE, "--model", served.source),
            *("--alias", served.names[0], "--port", host.port),
        ]
        if served.launch is not None:
            arguments += write_launch(_OPTIONS, served.launch)
        if host.threads is not None:
            arguments += ["--threads", str(host.threads)]
        return ServerCommand(tuple(arguments), {})

    def parse(self, command: ServerCommand) -> ParsedCommand:
        """Return what a command serves."""
        options = split_options(command.arguments[3:])
        (source,), names, (port,) = (
            options.pop(f"--{name}") for name in ("model", "alias", "port")
        )
        launch = read_launch(_OPTIONS, options)
        refuse_rest(options.keys() - {"--threads"})
        return ParsedCommand(1, 1, (), ServedModel(source, names, launch), port)

    def settle(self, launch: EngineLaunch) -> EngineLaunch:
        """Return a launch as a server runs it."""
        return settle_launch(_OPTIONS, launch)

    def list_unkept(self, launch: EngineLaunch, dtype: str) -> tuple[str, ...]:
        """Return all limits but the longest request: it is told none."""
        del dtype
        told = launch.model_copy(update={"max_model_len": None})
        return tuple(f"{name} {value}" for name, value in told.options().items())


ENGINE = LlamaCpp()


def main(arguments: list[str] | None = None) -> int:
    """Serve a GGUF file until told to stop."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", required=True, help="the name requests ask for")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=_CONTEXT_TOKENS, help="tokens of a request")
    options = parser.parse_args(arguments)
    try:
        try:
            import xllamacpp
        except ImportError as error:
            raise MissingDependencyError("xllamacpp", "llamacpp", needed_for="llama.cpp") from error
        settings = xllamacpp.CommonParams()
        settings.model.path = str(options.model)
        settings.model_alias = {options.alias}
        settings.hostnames = ["127.0.0.1"]
        settings.port = options.port
        settings.n_parallel = _SLOTS
        settings.n_ctx = options.context * _SLOTS
        settings.cpuparams.n_threads = options.threads
        settings.cpuparams_batch.n_threads = options.threads
        settings.endpoint_metrics = True
        server = xllamacpp.Server(settings)
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stderr.write(f"listening on {server.listening_address}\n")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    # Held back from every thread to come, so that only `sigwait` sees them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main())
