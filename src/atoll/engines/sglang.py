"""SGLang: an instance of one node, or of equal nodes in a row that may hold uneven layer ranges.

Where phases run apart, both are asked at once and meet at the prefill side's bootstrap server; NIXL carries
the KV cache. An instance that decodes computes no prompts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from atoll.core.ids import Phase
from atoll.engines.engine import (
    Connector,
    Engine,
    EngineLayout,
    ParsedCommand,
    ServedModel,
    ServerCommand,
    ServerHost,
    WeightFormat,
    is_revision,
    is_share,
    is_whole,
    one_of,
)
from atoll.engines.limits import GUESS_METHODS, MIXED_TOKENS, EngineLaunch, Speculation
from atoll.engines.options import (
    GuessOption,
    LaunchOptions,
    SwitchOption,
    ValueOption,
    prompts_alone,
    read_launch,
    refuse_rest,
    settle_launch,
    split_options,
    take_number,
    write_launch,
)
from atoll.engines.profile import (
    EAGER_LAUNCH,
    SERVER_REQUEST_S,
    SERVER_STREAM_S,
    SERVER_TOKENIZE_S,
    SGLANG_HOST_TIME,
    EngineDefaults,
)

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType

_KV_DTYPES = {"fp8": "fp8_e4m3", "bf16": "bf16"}
_TOOL_PARSERS = {
    "hermes": "qwen25",
    "llama3_json": "llama3",
    "openai": "gpt-oss",
    "kimi_k2": "kimi_k2",
    "glm45": "glm45",
    "qwen3_coder": "qwen3_coder",
}
_REASONING_PARSERS = {
    "qwen3": "qwen3",
    "openai_gptoss": "gpt-oss",
    "deepseek_r1": "deepseek-r1",
    "glm45": "glm45",
}
_ALGORITHMS = {
    "ngram": "NGRAM",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "draft_model": "STANDALONE",
}
PROMPT_INTERVALS = 2
"""Prompts wait as if it looked at them after twice the steps of `--scheduler-recv-interval`: on servers of
DeepSeek (0.5.9, B200, intervals of 10 and 30) first tokens took 1.3 to 1.5 intervals longer than without any,
not half of one. Why is not known; its code looks at them once in an interval."""
GUESSING_SEQUENCES = 48
"""Requests that it runs at a time where it guesses tokens, unless told."""


class _GuessChain(GuessOption):
    """`--speculative-algorithm` and what goes with it; one guess for each position."""

    name = "--speculative-algorithm"
    model = "--speculative-draft-model-path"
    revision = "--speculative-draft-model-revision"
    checked = "--speculative-num-draft-tokens"
    _chain = ("--speculative-num-steps", "--speculative-eagle-topk")

    def words(self, guess: Speculation, model: str, revision: str | None) -> list[str]:
        """Return the options. Tokens that it checks have the last one that is sure among them."""
        count = guess.num_speculative_tokens
        said = [self.name, _ALGORITHMS[guess.method]]
        said += [self.model, model] if model else []
        said += [self.revision, revision] if revision else []
        if guess.method != "ngram":
            steps, width = self._chain
            said += [steps, str(count), width, "1"]
        return [*said, self.checked, str(count + 1)]

    def read(self, options: dict[str, tuple[str, ...]]) -> object:
        """Take it out of options."""
        found = options.pop(self.name, None)
        if found is None:
            return None
        for name in self._chain:
            options.pop(name, None)
        count = take_number(options, self.checked) - 1
        model, revision = options.pop(self.model, None), options.pop(self.revision, None)
        return {
            "method": {word: method for method, word in _ALGORITHMS.items()}[found[0]],
            "num_speculative_tokens": count,
            "model": None if model is None else ServedModel.source_of(model[0], revision),
        }


_OPTIONS: LaunchOptions = {
    "max_num_batched_tokens": ValueOption("--chunked-prefill-size"),
    "max_num_seqs": ValueOption("--max-running-requests"),
    "gpu_memory_utilization": ValueOption("--mem-fraction-static"),
    "kv_cache_dtype": ValueOption("--kv-cache-dtype", _KV_DTYPES),
    "max_model_len": ValueOption("--context-length"),
    "dtype": ValueOption("--dtype", {"fp16": "half", "bf16": "bfloat16"}),
    "quantization": ValueOption("--quantization"),
    "load_format": ValueOption("--load-format"),
    "tool_parser": ValueOption("--tool-call-parser", _TOOL_PARSERS),
    "reasoning_parser": ValueOption("--reasoning-parser", _REASONING_PARSERS),
    "prefix_caching": SwitchOption({False: "--disable-radix-cache"}, default=True),
    "handover": ValueOption(
        "--disaggregation-mode",
        {"prefill": "prefill", "decode": "decode"},
        before=("--disaggregation-transfer-backend", "nixl"),
    ),
    "scheduling": SwitchOption({"sync": "--disable-overlap-schedule"}, default="async"),
    "prompt_interval": ValueOption("--scheduler-recv-interval"),
    "mixed_chunk": SwitchOption({True: "--enable-mixed-chunk"}),
    "speculative": _GuessChain(),
}
_BOOTSTRAP = "--disaggregation-bootstrap-port"
_RANK_OPTIONS = ("--nnodes", "--node-rank", "--dist-init-addr")
_PARTITION = "SGLANG_PP_LAYER_PARTITION"
"""Numbers of layers of the stages of a pipeline."""
_EP, _DP_ATTENTION = "--ep-size", "--enable-dp-attention"
_SEQUENCES = 2048
KV_KEPT_S = 60
"""How long either side waits for the other to meet it, and decode for KV cache to come."""
_GIB = 2**30


def _of_ranks(launch: EngineLaunch, ranks: float) -> EngineLaunch:
    """Return a launch with the limits of a step times so many ranks."""
    names = ("max_num_seqs", "max_num_batched_tokens")
    limits = {name: getattr(launch, name) for name in names}
    return launch.model_copy(
        update={name: limit and round(limit * ranks) for name, limit in limits.items()}
    )


def _batch(gpu: GpuType | None) -> tuple[int, int]:
    # It cuts prompts by memory, and runs 2,048 requests or more.
    size = 70 * _GIB if gpu is None else gpu.whole.memory_bytes
    return _SEQUENCES, 8192 if size >= 60 * _GIB else 4096 if size >= 35 * _GIB else 2048


class Sglang(Engine):
    """`python -m sglang.launch_server`."""

    name = "sglang"
    title = "SGLang"
    preference = (
        40  # Only where it is asked for: the stage engine comes before it and takes everything.
    )
    launches = True
    platforms: ClassVar = {"cuda": 7.5, "rocm": 0.0}
    formats: ClassVar = {
        "bf16": WeightFormat(native=8.0),
        "fp16": WeightFormat(),
        "fp8": WeightFormat(8.0, native=8.9, rocm=9.4),
        "int8": WeightFormat(7.5, platforms=("cuda",)),
        "int4": WeightFormat(7.5, native=math.inf),
        "mxfp4": WeightFormat(8.0, native=10.0, rocm=9.4),
        "nvfp4": WeightFormat(8.0, native=10.0, platforms=("cuda",)),
    }
    max_names = 1
    connector = Connector("bootstrap", frozenset({Phase.PREFILL}), recomputes=False)
    settings: ClassVar = {
        "context-length": is_whole,
        "max-running-requests": is_whole,
        "tp": is_whole,
        "mem-fraction-static": is_share,
        "dtype": one_of("auto", "bfloat16", "float16", "float32", "half"),
        "quantization": one_of(
            "awq", "awq_marlin", "fp8", "gptq", "gptq_marlin", "compressed-tensors"
        ),
        "revision": is_revision,
    }
    settings_are_flags = True
    # The second holds what older versions do not put below the first.
    compile_caches: ClassVar = {
        "SGLANG_CACHE_DIR": "sglang",
        "SGLANG_DG_CACHE_DIR": "deep_gemm",
        "TVM_FFI_CACHE_DIR": "tvm_ffi",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    }
    program = re.compile(r"sglang(\..*)?")
    default_port = 30000
    # The address by which its own health checks mean nobody.
    counts = "usage"
    apart_proof: ClassVar = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    detail_paths = ("/get_server_info", "/server_info", "/get_model_info", "/model_info")
    metrics: ClassVar = {
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv": ("sglang:token_usage",),
        "tokens": ("sglang:generation_tokens_total",),
    }
    defaults = EngineDefaults(
        SGLANG_HOST_TIME,
        "async",
        _batch,
        memory_share=0.88,
        prefix_caching=True,
        launch=EAGER_LAUNCH,
        fuses_all_reduce=True,
        schedules_ahead=True,
        async_since=(0, 4),
        request_s=SERVER_REQUEST_S,
        stream_s=SERVER_STREAM_S,
        tokenize_s=SERVER_TOKENIZE_S,
        admits_by_prompts=True,
        prompts_first=True,
        prompt_interval=PROMPT_INTERVALS,
        guesses=GUESS_METHODS,
        expert_parallel=True,
        guesses_sync=frozenset({"ngram"}),
        guessing_sequences=GUESSING_SEQUENCES,
    )

    def command(self, layout: EngineLayout, served: ServedModel, host: ServerHost) -> ServerCommand:
        """Return the command with the tensor, data and pipeline parallel sizes of the layout."""
        launch, gpus = served.launch, layout.tp
        spread = launch is not None and bool(launch.expert_parallel)
        if spread and launch is not None:
            # Copies are ranks of one group then, and its limits those of all of them.
            gpus *= layout.copies
            launch = _of_ranks(self.settle(launch), layout.copies)
        # Its bootstrap server listens where it does, and instances on other machines come there.
        listens = "0.0.0.0" if layout.alone else "127.0.0.1"
        arguments = [
            *(host.python, "-m", "sglang.launch_server"),
            *("--model-path", served.repository[0], *served.revision_words()),
            *("--served-model-name", served.names[0]),
            *("--host", listens, "--port", host.port, "--tp", str(gpus)),
            *self._flags(launch),
        ]
        if spread:
            arguments += [_EP, str(gpus)]
        if spread and layout.copies > 1:
            arguments += ["--dp-size", str(layout.copies), _DP_ATTENTION]
        elif layout.copies > 1:
            arguments += ["--dp", str(layout.copies)]
        environment: dict[str, str] = {}
        if len(layout.layers) > 1:
            arguments += ["--pp-size", str(len(layout.layers))]
            environment[_PARTITION] = ",".join(map(str, layout.layers))
        if not layout.alone:
            return ServerCommand(tuple(arguments), environment)
        if "--disaggregation-mode" not in arguments:
            arguments += _OPTIONS["handover"].write(str(layout.phase))
        if layout.phase is Phase.PREFILL:
            arguments += [_BOOTSTRAP, host.handover_port]
        waits = ("BOOTSTRAP_TIMEOUT", "WAITING_TIMEOUT")
        environment |= {f"SGLANG_DISAGGREGATION_{name}": str(KV_KEPT_S) for name in waits}
        return ServerCommand(tuple(arguments), environment)

    def rank_command(
        self, command: ServerCommand, rank: int, nodes: Sequence[str]
    ) -> ServerCommand:
        """Return the command of a rank of a pipeline: the first listens, the others say they are well."""
        words = [
            *command.arguments,
            *("--nnodes", str(len(nodes)), "--node-rank", str(rank)),
            *("--dist-init-addr", f"@host:{nodes[0]}:@port:{nodes[0]}"),
        ]
        if rank:
            words[words.index("--port") + 1] = f"@port2:{nodes[rank]}"
        own = {"SGLANG_HOST_IP": f"@host:{nodes[rank]}"}
        return ServerCommand(tuple(words), {**command.environment, **own})

    def parse(self, command: ServerCommand) -> ParsedCommand:
        """Return what a command serves."""
        options = split_options(command.arguments[3:])
        spread = options.pop(_EP, None) is not None
        ranks = take_number(options, "--dp-size")
        options.pop(_DP_ATTENTION, None)
        gpus = take_number(options, "--tp")
        launch = read_launch(_OPTIONS, options)
        if spread:
            launch = _of_ranks(launch, 1 / ranks).model_copy(update={"expert_parallel": True})
        served = ServedModel(
            ServedModel.source_of(options.pop("--model-path")[0], options.pop("--revision", None)),
            options.pop("--served-model-name"),
            launch,
        )
        parsed = ParsedCommand(
            tp=gpus // ranks,
            copies=ranks if spread else take_number(options, "--dp"),
            layers=tuple(int(n) for n in command.environment.get(_PARTITION, "").split(",") if n),
            served=served,
            port=options.pop("--port")[0],
        )
        refuse_rest(options.keys() - {"--host", "--pp-size", _BOOTSTRAP, *_RANK_OPTIONS})
        return parsed

    def settle(self, launch: EngineLaunch) -> EngineLaunch:
        """Return a launch as a server runs it."""
        tokens = launch.max_num_batched_tokens
        if tokens is None and not prompts_alone(launch):
            tokens = max(MIXED_TOKENS, launch.max_num_seqs or 0)
        update: dict[str, object] = {"max_num_batched_tokens": tokens}
        if launch.expert_parallel and launch.max_num_seqs is None:
            # Its own number is for all ranks together, and plans reckon with each of them.
            sequences, guess = _SEQUENCES, launch.speculative
            update["max_num_seqs"] = (
                GUESSING_SEQUENCES if guess else min(sequences, tokens or sequences)
            )
        settled = settle_launch(_OPTIONS, launch.model_copy(update=update))
        return settled.model_copy(update={"expert_parallel": launch.expert_parallel or None})

    def _flags(self, launch: EngineLaunch | None) -> tuple[str, ...]:
        """The options that make it keep the limits a plan reckons with."""
        if launch is None:
            return ()
        if launch.kv_cache_dtype is not None:
            self.kv_flag(launch.kv_cache_dtype, _KV_DTYPES)
        return write_launch(_OPTIONS, self.settle(launch))


ENGINE = Sglang()
