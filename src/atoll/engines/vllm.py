"""vLLM: an instance of one node, or of equal nodes in a row that may hold uneven layer ranges.

A node whose GPUs hold several copies of the layers runs them as data-parallel ranks of one server. Where
phases run apart, NIXL carries the KV cache: decode fetches it from prefill instances of one stage with any
tensor parallel size; a prefill pipeline sends it (`NixlPushConnector`). Decode has one stage.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from atoll.core.errors import InputError
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
    SERVER_HOST_TIME,
    SERVER_LAUNCH,
    SERVER_REQUEST_S,
    SERVER_STREAM_S,
    SERVER_TOKENIZE_S,
    USUAL_KERNELS,
    EngineDefaults,
    KernelRatios,
    StartTime,
    is_since,
)

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType

_LARGE_GPU_BYTES = 70 * 2**30
_SEQUENCES = 256
"""Limit of sequences in a step that its server sets by itself on most GPUs."""
_LARGE_GPU_SEQUENCES = 1024
_ROCM_TUNED_SINCE = (0, 7)
_ROCM_2024 = KernelRatios(
    kernels=1.18,
    source="vLLM of 2024 on ROCm: kernels 1.18 times as long as under 0.10.0 (benchmarks.mi300x)",
)
"""Kernels on Instincts before AMD tuned them for vLLM. A token of Llama 3.1 405B on eight MI300X took 1.18
times as long as with vLLM 0.10.0 on ROCm 6.4.1: the median of batches of 1 to 128, 1.16 to 1.41."""
KV_KEPT_S = 60
"""How long the prefill side keeps KV cache that nobody fetches."""


def _transfer(connector: str, role: str) -> str:
    # A decode instance computes what does not come in time, instead of failing the request.
    said = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": KV_KEPT_S},
    }
    return json.dumps(said, separators=(",", ":"))


_HANDOVERS = {
    "prefill": _transfer("NixlConnector", "kv_producer"),
    "decode": _transfer("NixlConnector", "kv_consumer"),
    "prefill-push": _transfer("NixlPushConnector", "kv_producer"),
    "decode-push": _transfer("NixlPushConnector", "kv_consumer"),
}
_KV_DTYPES = {"fp8": "fp8", "bf16": "bfloat16"}


def _ratios(gpu: GpuType | None, version: str | None) -> KernelRatios:
    is_old = version is not None and not is_since(version, _ROCM_TUNED_SINCE)
    on_rocm = gpu is not None and gpu.whole.compute_capability.startswith("gfx")
    return _ROCM_2024 if is_old and on_rocm else USUAL_KERNELS


class _GuessConfig(GuessOption):
    """`--speculative-config`, in JSON."""

    name = "--speculative-config"

    def words(self, guess: Speculation, model: str, revision: str | None) -> list[str]:
        """Return the option."""
        said: dict[str, object] = {"method": guess.method}
        said |= {"model": model} if model else {}
        said |= {"revision": revision} if revision else {}
        said["num_speculative_tokens"] = guess.num_speculative_tokens
        return [self.name, json.dumps(said, separators=(",", ":"))]

    def read(self, options: dict[str, tuple[str, ...]]) -> object:
        """Take it out of options."""
        found = options.pop(self.name, None)
        if found is None:
            return None
        said = json.loads(" ".join(found))
        revision = said.pop("revision", None)
        if revision is not None:
            said["model"] = ServedModel.source_of(said["model"], (revision,))
        return said


_OPTIONS: LaunchOptions = {
    "max_num_batched_tokens": ValueOption("--max-num-batched-tokens"),
    "max_num_seqs": ValueOption("--max-num-seqs"),
    "gpu_memory_utilization": ValueOption("--gpu-memory-utilization"),
    "kv_cache_dtype": ValueOption("--kv-cache-dtype", _KV_DTYPES),
    "kv_bytes": ValueOption("--kv-cache-memory-bytes"),
    "max_model_len": ValueOption("--max-model-len"),
    "dtype": ValueOption("--dtype", {"fp16": "half", "bf16": "bfloat16"}),
    "quantization": ValueOption("--quantization"),
    "load_format": ValueOption("--load-format"),
    "tool_parser": ValueOption("--tool-call-parser", before=("--enable-auto-tool-choice",)),
    "reasoning_parser": ValueOption("--reasoning-parser"),
    "prefix_caching": SwitchOption(
        {True: "--enable-prefix-caching", False: "--no-enable-prefix-caching"}, default=True
    ),
    "handover": ValueOption("--kv-transfer-config", _HANDOVERS),
    "scheduling": SwitchOption({"async": "--async-scheduling", "sync": "--no-async-scheduling"}),
    "speculative": _GuessConfig(),
    "expert_parallel": SwitchOption({True: "--enable-expert-parallel"}),
}
_EXECUTOR = "--distributed-executor-backend"
_RANK_OPTIONS = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless")
_PARTITION = "VLLM_PP_LAYER_PARTITION"
"""Numbers of layers of the stages of a pipeline."""
_MXFP8 = "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8"
"""Asks for experts in MXFP4 to compute in MXFP8, on GPUs that can."""


def _batch(gpu: GpuType | None) -> tuple[int, int]:
    # Its server takes more on GPUs of 70 GiB and up, but not on an A100.
    large = gpu is None or (
        gpu.whole.memory_bytes >= _LARGE_GPU_BYTES and not gpu.name.startswith("A100")
    )
    return (_LARGE_GPU_SEQUENCES, 8192) if large else (_SEQUENCES, 2048)


class Vllm(Engine):
    """`vllm serve`."""

    name = "vllm"
    title = "vLLM"
    preference = 20
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
    on_shares = True
    connector = Connector("nixl", frozenset({Phase.PREFILL}), pushes=True)
    served_on = frozenset({"Hopper"})
    served_shares_on = frozenset({"Hopper"})
    tested = frozenset({"one node", "several nodes", "phases apart"})
    settings: ClassVar = {
        "max-model-len": is_whole,
        "max-num-seqs": is_whole,
        "tensor-parallel-size": is_whole,
        "gpu-memory-utilization": is_share,
        "dtype": one_of("auto", "bfloat16", "float16", "float32", "half"),
        "quantization": one_of(
            "awq", "awq_marlin", "fp8", "gptq", "gptq_marlin", "compressed-tensors"
        ),
        "kv-cache-dtype": one_of("auto", "fp8", "fp8_e5m2", "fp8_e4m3"),
        "revision": is_revision,
    }
    settings_are_flags = True
    # The first holds compiled graphs, DeepGEMM's kernels and FlashInfer's tuning.
    compile_caches: ClassVar = {
        "VLLM_CACHE_ROOT": "vllm",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    }
    ray_options = (_EXECUTOR, "ray")
    program = re.compile(r"vllm(\..*)?")
    default_port = 8000
    detail_paths = ("/version",)
    metrics: ClassVar = {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "tokens": ("vllm:generation_tokens_total",),
    }
    counts = "usage"
    recounts = "ids"
    vllm_tokens = True
    defaults = EngineDefaults(
        SERVER_HOST_TIME,
        "async",
        _batch,
        memory_share=0.9,
        prefix_caching=True,
        launch=replace(SERVER_LAUNCH, fused_experts=True, fused_mxfp4=True),
        fuses_all_reduce=True,
        ratios=_ratios,
        schedules_ahead=True,
        async_since=(0, 14),
        request_s=SERVER_REQUEST_S,
        stream_s=SERVER_STREAM_S,
        tokenize_s=SERVER_TOKENIZE_S,
        admits_by_prompts=True,
        mxfp8=False,
        guesses=GUESS_METHODS,
        expert_parallel=True,
        guesses_sync=frozenset({"ngram"}),
    )
    start = StartTime(
        123.0,
        "the median of seven starts of vLLM 0.22.1 on an H200, 111 to 189 s, random weights; with kept"
        " compilations one of a 3B, which took 130 s without (benchmarks/results/gpu_promise.json)",
        kept_s=75.0,
    )

    def takes(self, source: str, *, stand_in: bool) -> bool:
        """Return whether the weights are a repository or a folder, of the plan's own model."""
        return not stand_in and not source.endswith(".gguf") and not source.startswith("pypi:")

    def command(self, layout: EngineLayout, served: ServedModel, host: ServerHost) -> ServerCommand:
        """Return `vllm serve` with the tensor, data and pipeline parallel sizes of the layout."""
        arguments = [
            *("vllm", "serve", served.repository[0], *served.revision_words()),
            *("--host", "127.0.0.1", "--port", host.port),
            *("--served-model-name", *served.names),
            *("--tensor-parallel-size", str(layout.tp)),
            *self.flags(served.launch),
        ]
        environment: dict[str, str] = {}
        if served.launch is not None and served.launch.mxfp8:
            environment[_MXFP8] = "1"
        if layout.alone:
            way = served.launch.handover if served.launch is not None else None
            if way is None:
                arguments += _OPTIONS["handover"].write(str(layout.phase))
            if len(layout.layers) > 1 and way != "prefill-push":
                raise InputError(
                    f"{layout.instance} is a pipeline, and its service hands KV cache over by fetching it",
                    field="engine",
                    hint="plan with --engines vllm: then decode instances know that it is sent",
                )
            environment |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": host.address,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": host.handover_port,
                # Versions before leases, which the option above sets.
                "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(KV_KEPT_S),
            }
        if layout.copies > 1:
            arguments += ["--data-parallel-size", str(layout.copies)]
        if len(layout.layers) > 1:
            arguments += ["--pipeline-parallel-size", str(len(layout.layers))]
            environment[_PARTITION] = ",".join(map(str, layout.layers))
        return ServerCommand(tuple(arguments), environment)

    def rank_command(
        self, command: ServerCommand, rank: int, nodes: Sequence[str]
    ) -> ServerCommand:
        """Return the command of a rank of a pipeline: the first listens, the others work for it."""
        words = [
            *command.arguments,
            *("--nnodes", str(len(nodes)), "--node-rank", str(rank)),
            *("--master-addr", f"@host:{nodes[0]}", "--master-port", f"@port:{nodes[0]}"),
        ]
        if rank:
            at = words.index("--port")
            words = [*words[:at], *words[at + 2 :], "--headless"]
        # Else each finds an address by the way to the internet, which others may not reach.
        own = {"VLLM_HOST_IP": f"@host:{nodes[rank]}"}
        return ServerCommand(tuple(words), {**command.environment, **own})

    def parse(self, command: ServerCommand) -> ParsedCommand:
        """Return what a command serves."""
        options = split_options(command.arguments[3:])
        launch = read_launch(_OPTIONS, options)
        if command.environment.get(_MXFP8) == "1":
            launch = launch.model_copy(update={"mxfp8": True})
        served = ServedModel(
            ServedModel.source_of(command.arguments[2], options.pop("--revision", None)),
            options.pop("--served-model-name"),
            launch,
        )
        port = options.pop("--port", None)
        parsed = ParsedCommand(
            tp=take_number(options, "--tensor-parallel-size"),
            copies=take_number(options, "--data-parallel-size"),
            layers=tuple(int(n) for n in command.environment.get(_PARTITION, "").split(",") if n),
            served=served,
            port=None if port is None else port[0],
        )
        refuse_rest(
            options.keys() - {"--host", "--pipeline-parallel-size", _EXECUTOR, *_RANK_OPTIONS}
        )
        return parsed

    def settle(self, launch: EngineLaunch) -> EngineLaunch:
        """Return a launch as a server runs it."""
        # Plans reckon with short steps where prompts and decoding share them, which both do on one instance.
        tokens = launch.max_num_batched_tokens
        if tokens is None and not prompts_alone(launch):
            tokens = max(MIXED_TOKENS, launch.max_num_seqs or 0)
        sequences = launch.max_num_seqs
        if sequences is None and tokens is not None and tokens < _LARGE_GPU_SEQUENCES:
            # vLLM refuses more sequences than tokens in a step, its own number of them too.
            sequences = min(tokens, _SEQUENCES)
        update: dict[str, object] = {"max_num_batched_tokens": tokens, "max_num_seqs": sequences}
        update["expert_parallel"] = launch.expert_parallel or None
        settled = settle_launch(_OPTIONS, launch.model_copy(update=update))
        return settled.model_copy(update={"mxfp8": launch.mxfp8 or None})

    def flags(self, launch: EngineLaunch | None) -> tuple[str, ...]:
        """Return the options that make it keep the limits a plan reckons with."""
        if launch is None:
            return ("--enable-prefix-caching",)
        if launch.kv_cache_dtype is not None:
            self.kv_flag(launch.kv_cache_dtype, _KV_DTYPES)
        return write_launch(_OPTIONS, self.settle(launch))


ENGINE = Vllm()
