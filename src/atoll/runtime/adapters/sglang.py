"""SGLang: an instance of one node."""

from __future__ import annotations

import sys

from atoll.perf.engines import MIXED_TOKENS, EngineLaunch
from atoll.plan.plan import Instance
from atoll.runtime.adapters.base import (
    Endpoint,
    MachineShare,
    RunDirectory,
    ServedModel,
    kv_flag,
    single_node,
)
from atoll.runtime.adapters.devices import visible_gpus
from atoll.runtime.adapters.probes import TokenProbe
from atoll.runtime.pool.member import Backend
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.process import Command
from atoll.runtime.supervise.supervision import RestartLimits

_LIMITS = RestartLimits(ready_s=1800.0, unwell=3, term_s=30.0)
_KV_DTYPES = {"fp8": "fp8_e4m3", "bf16": "bf16"}


def sglang_flags(launch: EngineLaunch | None) -> tuple[str, ...]:
    """Return the options that make SGLang keep the limits a plan reckons with."""
    if launch is None:
        return ()
    flags = ["--chunked-prefill-size", str(launch.max_num_batched_tokens or MIXED_TOKENS)]
    if launch.max_num_seqs is not None:
        flags += ["--max-running-requests", str(launch.max_num_seqs)]
    if launch.gpu_memory_utilization is not None:
        flags += ["--mem-fraction-static", f"{launch.gpu_memory_utilization:g}"]
    if launch.kv_cache_dtype is not None:
        flags += ["--kv-cache-dtype", kv_flag(launch.kv_cache_dtype, _KV_DTYPES, "SGLang")]
    if launch.prefix_caching is False:
        flags.append("--disable-radix-cache")
    if launch.scheduling == "sync":
        flags.append("--disable-overlap-schedule")
    return tuple(flags)


def sglang_endpoint(
    instance: Instance,
    served: ServedModel,
    port: int,
    home: RunDirectory,
    share: MachineShare,
    *,
    weight: float = 1.0,
) -> Endpoint:
    """Return the process of an instance under SGLang."""
    del share  # SGLang takes the GPUs it is shown
    single_node(instance, "SGLang")
    node = instance.nodes[0]
    url = f"http://127.0.0.1:{port}"
    arguments: tuple[str, ...] = (
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", served.source.removeprefix("hf://")),
        *("--served-model-name", served.names[0]),
        *("--host", "127.0.0.1", "--port", str(port), "--tp", str(node.tp)),
    )
    arguments += sglang_flags(served.launch)
    copies = node.gpus // node.tp
    if copies > 1:
        arguments += ("--dp", str(copies))
    server = ProcessSpec(
        instance.id,
        Command(arguments, home.log(instance.id), visible_gpus([node])),
        TokenProbe(url, served.names[0]),
        _LIMITS,
    )
    return Endpoint(
        # SGLang serves one name.
        Backend(id=instance.id, url=url, models=served.names[:1], weight=weight, kind="sglang"),
        (instance.id,),
        server=server,
        held=((instance.id, node.id, node.start, node.end),),
    )
