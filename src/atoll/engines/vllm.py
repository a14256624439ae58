"""vLLM: an instance of one node, or of equal nodes in a row that may hold uneven layer ranges.

A node whose GPUs hold several copies of the layers runs them as data-parallel ranks of one server.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, ClassVar

from atoll.engines.engine import (
    Engine,
    EngineLayout,
    ServedModel,
    ServerCommand,
    ServerHost,
    WeightFormat,
    is_revision,
    is_share,
    is_whole,
    one_of,
)
from atoll.engines.limits import MIXED_TOKENS, EngineLaunch
from atoll.engines.profile import COMPILED_LAYER_S, SERVER_HOST_TIME, EngineDefaults

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType

_LARGE_GPU_BYTES = 70 * 2**30
_SEQUENCES = 256
"""Limit of sequences in a step that its server sets by itself on most GPUs."""
_LARGE_GPU_SEQUENCES = 1024
_KV_DTYPES = {"fp8": "fp8", "bf16": "bfloat16"}


def _batch(gpu: GpuType | None) -> tuple[int, int]:
    # Its server takes more on GPUs of 70 GiB and up, but not on an A100.
    large = gpu is None or (
        gpu.memory_bytes >= _LARGE_GPU_BYTES and not gpu.name.startswith("A100")
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
        "fp8": WeightFormat(8.0, native=8.9),
        "int8": WeightFormat(7.5, platforms=("cuda",)),
        "int4": WeightFormat(7.5, native=math.inf),
        "mxfp4": WeightFormat(8.0, native=10.0),
        "nvfp4": WeightFormat(8.0, native=10.0, platforms=("cuda",)),
    }
    tested = frozenset({"one node"})
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
    program = re.compile(r"vllm(\..*)?")
    default_port = 8000
    detail_paths = ("/version",)
    metrics: ClassVar = {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "tokens": ("vllm:generation_tokens_total",),
    }
    vllm_tokens = True
    defaults = EngineDefaults(
        SERVER_HOST_TIME,
        "async",
        _batch,
        memory_share=0.9,
        prefix_caching=True,
        prefill_layer_s=COMPILED_LAYER_S,
        fuses_all_reduce=True,
    )
    admits_by_prompts = True

    def takes(self, source: str, *, stand_in: bool) -> bool:
        """Return whether the weights are a repository or a folder, of the plan's own model."""
        return not stand_in and not source.endswith(".gguf") and not source.startswith("pypi:")

    def command(self, layout: EngineLayout, served: ServedModel, host: ServerHost) -> ServerCommand:
        """Return `vllm serve` with the tensor, data and pipeline parallel sizes of the layout."""
        arguments = [
            *("vllm", "serve", served.source.removeprefix("hf://")),
            *("--host", "127.0.0.1", "--port", host.port),
            *("--served-model-name", *served.names),
            *("--tensor-parallel-size", str(layout.tp)),
            *self.flags(served.launch),
        ]
        environment = {}
        if layout.copies > 1:
            arguments += ["--data-parallel-size", str(layout.copies)]
        if len(layout.layers) > 1:
            arguments += ["--pipeline-parallel-size", str(len(layout.layers))]
            environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layout.layers))
        return ServerCommand(tuple(arguments), environment)

    def rank_command(self, command: ServerCommand, rank: int, ranks: int, first: str) -> list[str]:
        """Return the command of a rank of a pipeline: the first listens, the others work for it."""
        words = [
            *command.arguments,
            *("--nnodes", str(ranks), "--node-rank", str(rank)),
            *("--master-addr", f"{{host:{first}}}", "--master-port", f"{{port:{first}}}"),
        ]
        if rank:
            at = words.index("--port")
            words = [*words[:at], *words[at + 2 :], "--headless"]
        return words

    def flags(self, launch: EngineLaunch | None) -> tuple[str, ...]:
        """Return the options that make it keep the limits a plan reckons with."""
        if launch is None:
            return ("--enable-prefix-caching",)
        # Plans reckon with short steps where prompts and decoding share them, which both do on one instance.
        tokens = launch.max_num_batched_tokens or max(MIXED_TOKENS, launch.max_num_seqs or 0)
        flags = ["--max-num-batched-tokens", str(tokens)]
        sequences = launch.max_num_seqs
        if sequences is None and tokens < _LARGE_GPU_SEQUENCES:
            # vLLM refuses more sequences than tokens in a step, its own number of them too.
            sequences = min(tokens, _SEQUENCES)
        if sequences is not None:
            flags += ["--max-num-seqs", str(sequences)]
        if launch.gpu_memory_utilization is not None:
            flags += ["--gpu-memory-utilization", f"{launch.gpu_memory_utilization:g}"]
        if launch.kv_cache_dtype is not None:
            flags += ["--kv-cache-dtype", self.kv_flag(launch.kv_cache_dtype, _KV_DTYPES)]
        if launch.max_model_len is not None:
            flags += ["--max-model-len", str(launch.max_model_len)]
        cached = launch.prefix_caching is not False
        flags.append("--enable-prefix-caching" if cached else "--no-enable-prefix-caching")
        if launch.scheduling is not None:
            overlaps = launch.scheduling == "async"
            flags.append("--async-scheduling" if overlaps else "--no-async-scheduling")
        return tuple(flags)


ENGINE = Vllm()
