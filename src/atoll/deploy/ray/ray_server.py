"""Runs vLLM's server in an instance's placement group, where Ray starts its workers in the bundles.

    python -m atoll.deploy.ray.ray_server -- vllm serve NAME ... --distributed-executor-backend ray

vLLM takes the placement group of the actor that it runs in, and elsewhere makes one of its own, for which
there would be no room. So the server runs in an actor of the group $ATOLL_RAY_GROUP, on this machine, and
this process stands for it: SIGTERM goes on to it, what it writes is written here, and when either ends, so
does the other. Ranks go to bundles in the order of $VLLM_RAY_BUNDLE_INDICES: stages stand as planned.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.core.errors import AtollError, UsageError
from atoll.deploy.ray.ray_job import load_ray
from atoll.deploy.ray.ray_package import GROUP_VARIABLE

_MAIN = "vllm.entrypoints.cli.main"
_LOOK_S = 0.5
_RAYS_OWN = ("RAY_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""How variables begin that Ray sets for each of its processes."""


class ServerActor:
    """vLLM's command line in a process of Ray."""

    def pid(self) -> int:
        """Return its number, for signals."""
        return os.getpid()

    def serve(self, words: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the command until it ends; returns its exit code."""
        os.environ.update(environment)
        sys.argv = list(words)
        try:
            importlib.import_module(_MAIN).main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


def run_server(ray: Any, group: str, words: Sequence[str]) -> int:
    """Run the command in an actor of a placement group, on this machine, and return its exit code."""
    util = importlib.import_module("ray.util")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    exceptions = importlib.import_module("ray.exceptions")
    first = int(os.environ["VLLM_RAY_BUNDLE_INDICES"].partition(",")[0])
    path = os.environ.get("PYTHONPATH")
    actor = (
        ray.remote(ServerActor)
        .options(
            num_cpus=0,
            num_gpus=0,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                util.get_placement_group(group), placement_group_bundle_index=first
            ),
            runtime_env={"env_vars": {"PYTHONPATH": path}} if path else None,
        )
        .remote()
    )
    try:
        pid = ray.get(actor.pid.remote())

        def pass_on(*_: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

        own = {k: v for k, v in os.environ.items() if not k.startswith(_RAYS_OWN)}
        # What vLLM starts connects to the cluster by itself.
        own["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        serving = actor.serve.remote(list(words), own)
        signal.signal(signal.SIGTERM, pass_on)
        while not ray.wait([serving], timeout=_LOOK_S)[0]:
            continue
        return int(ray.get(serving))
    except exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        sys.stderr.write(f"{lines[-1] if lines else 'its process was lost'}\n")
        return 1


def main(arguments: list[str] | None = None) -> int:
    """Read the command, run it, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.deploy.ray.ray_server")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        group = os.environ.get(GROUP_VARIABLE)
        if group is None:
            raise UsageError(f"${GROUP_VARIABLE} is not set", hint="the Ray target sets it")
        # What the server writes is for a log: no colours, and every line.
        os.environ |= {"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}
        return run_server(load_ray(show_actors=True), group, words)
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
