"""SGLang: an instance of one node."""

from __future__ import annotations

import sys

from atoll.plan.plan import Instance
from atoll.runtime.adapters.base import (
    Endpoint,
    MachineShare,
    RunDirectory,
    ServedModel,
    single_node,
)
from atoll.runtime.adapters.devices import visible_gpus
from atoll.runtime.adapters.probes import TokenProbe
from atoll.runtime.pool.member import Backend
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.process import Command
from atoll.runtime.supervise.supervision import RestartLimits

_LIMITS = RestartLimits(ready_s=1800.0, unwell=3, term_s=30.0)


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
