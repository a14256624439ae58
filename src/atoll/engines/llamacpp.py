"""llama.cpp's server: GGUF weights on GPUs of all makers and on cores, in one process on one machine.

`llama-server --hf-repo ORG/NAME:TAG` fetches weights from the hub; it comes with llama.cpp, built for the
GPUs there. `python -m atoll.engines.llamacpp --model FILE --port N --alias NAME` serves a .gguf file: by that
program where it is, else by the same server from the wheel `xllamacpp`, with the same options.

The KV cache is cut evenly into slots (`--ctx-size` over `--parallel`), so a slot holds the longest request
and no more requests run than there are slots. A step takes a token of each answer, and prompts up to
`--batch-size` tokens. GPUs of a machine hold layers in a row, and one works at a time (`--tensor-split`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from atoll.catalog.frozenmap import FrozenMap
from atoll.core.errors import AtollError, InputError, MissingDependencyError
from atoll.engines.engine import (
    Engine,
    EngineLayout,
    ParsedCommand,
    Platform,
    ServedModel,
    ServerCommand,
    ServerHost,
    WeightFormat,
    is_whole,
    platform_of,
)
from atoll.engines.limits import MIXED_TOKENS, EngineLaunch, HostTime
from atoll.engines.options import (
    LaunchOptions,
    SwitchOption,
    ValueOption,
    read_launch,
    refuse_rest,
    settle_launch,
    split_options,
    write_launch,
)
from atoll.engines.profile import (
    COMPILED_LAYER_S,
    EngineDefaults,
    KernelSpeeds,
    LaunchTime,
    StartTime,
)

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.transformer import TransformerSpec

_MODULE = "atoll.engines.llamacpp"
_PROGRAM = "llama-server"
_CONTEXT_TOKENS = 2048
"""Prompt and answer of one request, unless a plan says how many tokens."""
_SLOTS = 4
"""Requests that run at a time, unless a plan says how many: what its server takes by itself."""
_MAX_SLOTS = 32
"""Requests that plans let run at a time: public runs with batches end there."""
_PART_TOKENS = 512
"""Tokens that its kernels take at once (`--ubatch-size`), of which plans set none."""
_KV_DTYPES = {"fp16": "f16", "bf16": "bf16"}
_OPTIONS: LaunchOptions = {
    "max_num_batched_tokens": ValueOption("--batch-size"),
    "max_num_seqs": ValueOption("--parallel"),
    "prefix_caching": SwitchOption({True: "--cache-prompt", False: "--no-cache-prompt"}),
}
"""Beside these `--ctx-size` says the longest request times the slots, and both caches have a type."""
_KV_OPTIONS = ("--cache-type-k", "--cache-type-v")
_FIXED = ("--host", "127.0.0.1", "--metrics", "--gpu-layers", "999")
_HOST_TIME = HostTime(step_s=1.0e-3, sequence_s=0.5e-3)
"""An assumption: it samples on the host, one answer after the other, after each step."""
_HOP_S = 0.2e-3
"""Public runs on 1 to 4 equal GPUs: a token takes 0.1 to 0.2 ms more for each GPU more."""
_METAL = KernelSpeeds(
    source="llama.cpp's own batched runs on M2 Ultra, 2026",
    compute=0.75,
    memory=0.9,
    p=0.5,
    experts=0.7,
    attention_compute=0.35,
    attention_memory=0.4,
    t0_us=5.0,
    formats=FrozenMap({"q6_k": 0.85, "q4_k_m": 0.85}),
)
_CUDA = KernelSpeeds(
    source="llama.cpp's own batched runs on GB10, 2026, and public runs of one request on other GPUs",
    compute=0.4,
    memory=0.8,
    p=0.75,
    experts=0.8,
    attention_compute=0.3,
    attention_memory=0.6,
    t0_us=4.0,
    max_flops=100e12,
    max_bytes_per_s=850e9,
    formats=FrozenMap({"q6_k": 0.75, "q4_k_m": 0.75}),
)
_STOPS = {signal.SIGTERM, signal.SIGINT}
_KERNELS: dict[Platform, KernelSpeeds] = {"metal": _METAL}


def _batch(gpu: GpuType | None) -> tuple[int, int]:
    del gpu
    return _MAX_SLOTS, MIXED_TOKENS


def _kernels(gpu: GpuType | None) -> KernelSpeeds:
    return _CUDA if gpu is None else _KERNELS.get(platform_of(gpu)[0], _CUDA)


def _is_gguf(source: str) -> bool:
    """Whether a source is a GGUF file, or a repository of such files: hf://ORG/NAME-GGUF:TAG."""
    repository = source.removeprefix("hf://").partition(":")[0]
    return source.lower().endswith(".gguf") or repository.lower().endswith("-gguf")


class LlamaCpp(Engine):
    """`llama-server`, or the same server from a wheel."""

    name = "llamacpp"
    title = "llama.cpp"
    aliases = ("llama.cpp", "llama-server", "xllamacpp")
    preference = 10  # Of use for GGUF files alone, where nobody asked for an engine.
    plan_preference = 90
    launches = True
    weights = "gguf"
    on_cores = True
    on_shares = True
    max_nodes = 1
    max_copies = 1
    splits_by = "layers"
    platforms: ClassVar = {"cuda": 5.0, "rocm": 0.0, "metal": 0.0, "vulkan": 0.0}
    formats: ClassVar = dict.fromkeys(
        ("bf16", "fp16", "mxfp4", "q8_0", "q6_k", "q4_k_m"),
        WeightFormat(platforms=("cuda", "rocm", "metal", "vulkan")),
    )
    tested = frozenset({"one node"})
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
    counts = "timings"
    completion_tokens = None
    tokenizes_messages = False
    defaults = EngineDefaults(
        {"async": _HOST_TIME, "sync": _HOST_TIME},
        "sync",
        _batch,
        memory_share=0.9,
        # A slot keeps its last prompt, but nothing is shared between slots: plans do not count on it.
        prefix_caching=False,
        launch=LaunchTime(COMPILED_LAYER_S),
        slots=True,
        part_tokens=_PART_TOKENS,
        layer_split_s=_HOP_S,
        kernels=_kernels,
        admits_by_prompts=True,
    )
    start = StartTime(10.0, "not measured: it compiles nothing and maps its weights")

    def takes(self, source: str, *, stand_in: bool) -> bool:
        """Return whether the weights are a GGUF file, or a repository of such files."""
        del stand_in
        return _is_gguf(source)

    def check_source(self, source: str) -> None:
        """Refuse everything but a GGUF file or a repository of such files."""
        if not _is_gguf(source):
            raise InputError(
                f"llama.cpp needs a GGUF file, not {source}",
                field="model",
                hint="name a .gguf file or hf://ORG/NAME-GGUF:TAG, or use the engine 'atoll'",
            )

    def refuses(self, spec: TransformerSpec, gpu: GpuType) -> str | None:
        """Return why it cannot compute a model on a kind of GPU; its KV cache has 16 bits."""
        if spec.kv_dtype.name not in _KV_DTYPES:
            return f"{self.title} has no KV cache in {spec.kv_dtype.name}"
        return super().refuses(spec, gpu)

    def command(self, layout: EngineLayout, served: ServedModel, host: ServerHost) -> ServerCommand:
        """Return `llama-server`, which fetches from the hub, or this module for a file."""
        source = served.source.removeprefix("hf://")
        program = [host.python, "-m", _MODULE, "--model", source]
        if not source.lower().endswith(".gguf"):
            # Plans keep no memory for what reads images.
            program = [_PROGRAM, "--no-mmproj", "--hf-repo", source]
        arguments = [*program, "--alias", served.names[0], "--port", host.port, *_FIXED]
        arguments += self._write(served.launch or EngineLaunch())
        if layout.tp > 1:
            arguments += ["--tensor-split", ",".join(["1"] * layout.tp)]
        if host.threads is not None:
            arguments += ["--threads", str(host.threads)]
        return ServerCommand(tuple(arguments), {})

    def _write(self, launch: EngineLaunch) -> list[str]:
        """The options that make it keep the limits a plan reckons with."""
        if launch.kv_cache_dtype is not None:
            self.kv_flag(launch.kv_cache_dtype, _KV_DTYPES)
        settled = self.settle(launch)
        words = [*write_launch(_OPTIONS, settled)]
        assert settled.max_model_len is not None
        assert settled.max_num_seqs is not None
        words += ["--ctx-size", str(settled.max_model_len * settled.max_num_seqs)]
        if settled.kv_cache_dtype is not None:
            for option in _KV_OPTIONS:
                words += [option, _KV_DTYPES[settled.kv_cache_dtype]]
        return words

    def parse(self, command: ServerCommand) -> ParsedCommand:
        """Return what a command serves."""
        at = command.arguments.index("--alias") - 2
        options = split_options(command.arguments[at:])
        (source,), names, (port,), (context,) = (
            options.pop(name) for name in (command.arguments[at], "--alias", "--port", "--ctx-size")
        )
        (split,) = options.pop("--tensor-split", ("1",))
        (kv,), _ = (options.pop(option, ("",)) for option in _KV_OPTIONS)
        said = read_launch(_OPTIONS, options)
        longest = int(context) // (said.max_num_seqs or 1)
        kv_dtype = {word: name for name, word in _KV_DTYPES.items()}.get(kv)
        launch = said.model_copy(update={"max_model_len": longest, "kv_cache_dtype": kv_dtype})
        refuse_rest(options.keys() - {*_FIXED, "--no-mmproj", "--threads"})
        served = ServedModel(source, names, launch)
        return ParsedCommand(split.count("1"), 1, (), served, port)

    def settle(self, launch: EngineLaunch) -> EngineLaunch:
        """Return a launch as a server runs it."""
        slots = launch.max_num_seqs or _SLOTS
        tokens = launch.max_num_batched_tokens or max(MIXED_TOKENS, slots)
        update = {"max_num_seqs": slots, "max_num_batched_tokens": tokens}
        said = settle_launch(_OPTIONS, launch.model_copy(update=update))
        return said.model_copy(
            update={
                "max_model_len": launch.max_model_len or _CONTEXT_TOKENS,
                "kv_cache_dtype": launch.kv_cache_dtype
                if launch.kv_cache_dtype in _KV_DTYPES
                else None,
            }
        )

    def list_unkept(self, launch: EngineLaunch, dtype: str) -> tuple[str, ...]:
        """Return the limits that it is not told; numbers are computed in the format of the weights."""
        del dtype
        settled = self.settle(launch)
        return tuple(
            f"{name} {value}"
            for name, value in launch.options().items()
            if getattr(settled, name) != value
        )


ENGINE = LlamaCpp()


def main(arguments: list[str] | None = None) -> int:
    """Serve a GGUF file until told to stop: by `llama-server` where it is, else by the wheel.

    The program was built for the GPUs of its machine, which the wheel seldom is.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", required=True, help="the name requests ask for")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=_SLOTS, help="requests at a time")
    parser.add_argument(
        "--ctx-size", type=int, help="tokens of all requests together; 2048 each unless given"
    )
    parser.add_argument("--batch-size", type=int, default=MIXED_TOKENS, help="tokens of a step")
    parser.add_argument("--gpu-layers", type=int, default=-1)
    parser.add_argument("--tensor-split", type=str, help="shares of layers by GPU")
    parser.add_argument("--cache-type-k", choices=tuple(_KV_DTYPES.values()))
    parser.add_argument("--cache-type-v", choices=tuple(_KV_DTYPES.values()))
    parser.add_argument("--cache-prompt", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--metrics", action="store_true")
    options = parser.parse_args(words)
    program = shutil.which(_PROGRAM)
    if program is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        os.execv(program, [program, *words])
    try:
        try:
            import xllamacpp
        except ImportError as error:
            raise MissingDependencyError("xllamacpp", "llamacpp", needed_for="llama.cpp") from error
        settings = xllamacpp.CommonParams()
        settings.model.path = str(options.model)
        settings.model_alias = {options.alias}
        settings.hostnames = [options.host]
        settings.port = options.port
        settings.n_parallel = options.parallel
        settings.n_ctx = options.ctx_size or _CONTEXT_TOKENS * options.parallel
        settings.n_batch = options.batch_size
        settings.n_gpu_layers = options.gpu_layers
        settings.cache_prompt = options.cache_prompt
        settings.cpuparams.n_threads = options.threads
        settings.cpuparams_batch.n_threads = options.threads
        settings.endpoint_metrics = True
        server = xllamacpp.Server(settings)
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stderr.write(f"listening on {server.listening_address}\n")
    signal.sigwait(_STOPS)
    return 0


if __name__ == "__main__":
    # Held back from every thread to come, so that only `sigwait` sees them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    sys.exit(main())
