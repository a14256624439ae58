"""`vllm serve`: an instance of one node, or of equal nodes in a row that may hold uneven layer ranges.

A node whose GPUs hold several copies of the layers runs them as data-parallel ranks of one server.
"""

from __future__ import annotations

from itertools import pairwise

from atoll.core.errors import InputError
from atoll.perf.engines import MIXED_TOKENS, EngineLaunch
from atoll.plan.plan import Instance
from atoll.runtime.adapters.base import (
    Endpoint,
    MachineShare,
    RunDirectory,
    ServedModel,
    kv_flag,
)
from atoll.runtime.adapters.devices import visible_gpus
from atoll.runtime.adapters.probes import TokenProbe
from atoll.runtime.pool.member import Backend
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.process import Command
from atoll.runtime.supervise.supervision import RestartLimits

_LIMITS = RestartLimits(ready_s=1800.0, unwell=3, term_s=30.0)
_KV_DTYPES = {"fp8": "fp8", "bf16": "bfloat16"}


def vllm_layout(instance: Instance) -> tuple[int, int, tuple[int, ...]]:
    """Return tensor- and data-parallel size and the layers of each stage; what vLLM cannot do is refused."""
    stages = instance.layout()
    why = None
    if instance.partial:
        why = "has nodes that run only a part of their layers"
    elif any(len(stage.nodes) > 1 for stage in stages):
        why = "has several nodes in a stage"
    elif len({(node.kind, node.tp) for node in instance.nodes}) > 1:
        why = "mixes node types"
    elif any(a.end != b.start for a, b in pairwise(stages)):
        why = "has layer ranges that overlap"
    if why is not None:
        raise InputError(
            f"{instance.id} {why}, which vLLM cannot run",
            field="engine",
            hint="use the engine 'atoll'",
        )
    node = instance.nodes[0]
    return node.tp, node.gpus // node.tp, tuple(stage.end - stage.start for stage in stages)


_FEW_SEQUENCES, _MOST_SEQUENCES = 256, 1024
"""Sequences in a step that vLLM's server allows by itself: on most GPUs, and on large ones."""


def vllm_flags(launch: EngineLaunch | None) -> tuple[str, ...]:
    """Return the options that make vLLM keep the limits a plan reckons with."""
    if launch is None:
        return ("--enable-prefix-caching",)
    # Plans reckon with short steps where prompts and decoding share them, which both do on one instance.
    tokens = launch.max_num_batched_tokens or max(MIXED_TOKENS, launch.max_num_seqs or 0)
    flags = ["--max-num-batched-tokens", str(tokens)]
    sequences = launch.max_num_seqs
    if sequences is None and tokens < _MOST_SEQUENCES:
        # vLLM refuses more sequences than tokens in a step, its own number of them too.
        sequences = min(tokens, _FEW_SEQUENCES)
    if sequences is not None:
        flags += ["--max-num-seqs", str(sequences)]
    if launch.gpu_memory_utilization is not None:
        flags += ["--gpu-memory-utilization", f"{launch.gpu_memory_utilization:g}"]
    if launch.kv_cache_dtype is not None:
        flags += ["--kv-cache-dtype", kv_flag(launch.kv_cache_dtype, _KV_DTYPES, "vLLM")]
    flags.append(
        "--no-enable-prefix-caching"
        if launch.prefix_caching is False
        else "--enable-prefix-caching"
    )
    if launch.scheduling is not None:
        flags.append(
            "--async-scheduling" if launch.scheduling == "async" else "--no-async-scheduling"
        )
    return tuple(flags)


def vllm_command(instance: Instance, served: ServedModel, port: int, log: RunDirectory) -> Command:
    """Return the command that serves an instance."""
    tp, copies, layers = vllm_layout(instance)
    arguments = [
        *("vllm", "serve", served.source.removeprefix("hf://")),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", *served.names),
        *("--tensor-parallel-size", str(tp)),
        *vllm_flags(served.launch),
    ]
    environment = visible_gpus(instance.nodes)
    if copies > 1:
        arguments += ["--data-parallel-size", str(copies)]
    if len(layers) > 1:
        arguments += ["--pipeline-parallel-size", str(len(layers))]
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layers))
    return Command(tuple(arguments), log.log(instance.id), environment)


def vllm_endpoint(
    instance: Instance,
    served: ServedModel,
    port: int,
    home: RunDirectory,
    share: MachineShare,
    *,
    weight: float = 1.0,
) -> Endpoint:
    """Return the process of an instance under vLLM."""
    del share  # vLLM takes the GPUs it is shown
    url = f"http://127.0.0.1:{port}"
    server = ProcessSpec(
        instance.id,
        vllm_command(instance, served, port, home),
        TokenProbe(url, served.names[0]),
        _LIMITS,
    )
    return Endpoint(
        Backend(id=instance.id, url=url, models=served.names, weight=weight, kind="vllm"),
        (instance.id,),
        server=server,
        held=tuple((instance.id, node.id, node.start, node.end) for node in instance.nodes),
    )
