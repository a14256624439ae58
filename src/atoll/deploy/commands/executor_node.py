"""One executor of an any-to-any model, on whatever machine a target starts it.

    python -m atoll.deploy.commands.executor_node --name think-0 --components JSON --listen HOST:PORT --port N

Graph servers of its fleet find it in a pool of the fabric (`ExecutorOffer`) and send it invocations over TCP,
checked by sums and a token that $ATOLL_EXECUTORS names the file of, not encrypted: run it in a network where
only your own machines are. Where TCP does not lead to it they go through the fabric's tunnel, which is
sealed (`reach`). Where NIXL is installed on both sides arrays are read by it; $ATOLL_NIXL, which is "auto",
"always" or "never", says otherwise. /health answers at `--port`. SIGTERM finishes what runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from atoll.core.errors import AtollError, InputError, UsageError
from atoll.core.frozen import Frozen
from atoll.deploy.commands.prefill_helpers import MAX_LABEL
from atoll.runtime.executor.executor_config import ExecutorConfig

TOKEN_VARIABLE = "ATOLL_EXECUTORS"  # noqa: S105 - the name of a variable
"""Names the file with the token of a fleet's executors."""
NIXL_VARIABLE = "ATOLL_NIXL"
"""Says whether arrays go between machines by NIXL: auto, always or never."""


class ExecutorOffer(Frozen):
    """Announcement of an executor: its name in its fleet, and the components that it runs."""

    id: str = Field(min_length=1)
    runs: tuple[str, ...] = Field(min_length=1)


def offer_executor(name: str, components: Mapping[str, object]) -> ExecutorOffer:
    """Return what an executor says in its pool; InputError where that does not fit into a label."""
    offer = ExecutorOffer(id=name, runs=tuple(components))
    if len(offer.to_json()) > MAX_LABEL:
        raise InputError(
            f"{name} runs too many components to be named in a fabric",
            field="parts",
            hint="plan with its parts on several executors, or give components shorter names",
        )
    return offer


def pool_of(fleet: str) -> str:
    """Return where the executors of a fleet and its graph servers meet."""
    return f"{fleet.replace('/', '_')}.executors"


def token_from_environment() -> str:
    """Return the file with the token of a fleet's executors."""
    path = os.environ.get(TOKEN_VARIABLE, "").removeprefix("@")
    if not path:
        raise UsageError(
            "no file with the token of executors is named",
            field=TOKEN_VARIABLE,
            hint="set it to @FILE, as targets do",
        )
    return path


def make_config(
    name: str,
    components: Mapping[str, Mapping[str, Any]],
    listen: str,
    port: int,
    store: Path,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int = 1,
    drain_s: float = 20.0,
) -> ExecutorConfig:
    """Return the configuration of an executor whose arrays lie in `store`."""
    return ExecutorConfig.parse(
        {
            "name": name,
            "components": {each: dict(given) for each, given in components.items()},
            "address": listen,
            "health_port": port,
            # Whoever starts it looks from the same machine.
            "health_host": "127.0.0.1",
            "store": str(store),
            "token_file": token_from_environment(),
            # Targets let each process see the GPUs that are its own.
            "device": "cuda:0" if device == "cuda" else device,
            "threads": threads,
            "drain_s": drain_s,
            "nixl": os.environ.get(NIXL_VARIABLE, "auto"),
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Read the options, run the executor, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.deploy.commands.executor_node")
    parser.add_argument("--name", required=True)
    parser.add_argument("--components", required=True, help="JSON: names, with options for each")
    parser.add_argument("--listen", required=True, help="where invocations come in: host:port")
    parser.add_argument("--port", type=int, required=True, help="where /health answers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="cores for each component")
    parser.add_argument("--drain", type=float, default=20.0, help="seconds")
    options = parser.parse_args(arguments)
    from atoll.components.component_weights import prefetch
    from atoll.deploy.commands.reach import reach, way_beside
    from atoll.runtime.executor.executor_process import serve_executor
    from atoll.runtime.executor.store import choose_store_folder, remove_stale_stores
    from atoll.runtime.http.program import run
    from atoll.runtime.local.cores import usable_cores

    store = None
    try:
        components = json.loads(options.components)
        prefetch(components)
        store = choose_store_folder(ExecutorConfig.model_fields["store_bytes"].default)
        config = make_config(
            *(options.name, components, options.listen, options.port),
            store,
            device=options.device,
            threads=options.threads or len(usable_cores()),
            drain_s=options.drain,
        )
        run(serve_executor(config, reach(way_beside())))
        return 0
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    finally:
        if store is not None:
            remove_stale_stores(store.parent)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still runs a batch cannot be ended, and an orderly exit would wait for it.
    os._exit(code)
