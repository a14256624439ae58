"""Tasks of the SkyPilot target: an instance is a task on a cluster of its own, rented where it can be had.

A task asks for any of several resources (`any_of`), of which SkyPilot takes the cheapest to be had: the
machine that was planned, and those that were named as good enough instead. It runs on spot or on demand as
planned, goes down by itself when idle, and carries its labels. SkyPilot itself is imported only where it is
asked to do something; tasks are plain dictionaries, and `format_tasks` shows them without it.

An instance whose nodes are unlike is refused: the nodes of one task are alike.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from atoll.catalog.prices import PriceTable
from atoll.core.errors import AtollError, MissingDependencyError, shorten
from atoll.core.ids import parse_node_type
from atoll.deploy.door import (
    DeployError,
    FailureKind,
    Labels,
    NodeCommand,
    Standing,
    StandingState,
    StartOrder,
)
from atoll.plan.plan import Market
from atoll.plan.problem import Offer

_PREFIX = "atoll-"
_LABEL = re.compile(r"[^a-z0-9_-]")
_LONGEST_LABEL, _LONGEST_NAME = 63, 50
_REASON = 300
_SECRETS_FOLDER = "~/.atoll-secrets"
_HOST_PORT = 8000
PID_FILE = "~/.atoll-node.pid"
LABELS_VARIABLE = "ATOLL_LABELS"
INSTANCE_VARIABLE = "ATOLL_INSTANCE"
_HINTS = {
    "NoCloudAccessError": "run 'sky check' and enable a cloud that the pool names",
    "CloudUserIdentityError": "log in to the cloud again, then 'sky check'",
    "ApiServerConnectionError": "run 'sky api start', or name the server with SKYPILOT_API_SERVER_ENDPOINT",
}
_SKY_NAMES = {"A100-80": "A100-80GB"}
"""GPUs that SkyPilot calls otherwise than the catalog."""
_STATES: Mapping[str, StandingState] = {
    "INIT": "starting",
    "PENDING": "starting",
    "UP": "starting",
    "AUTOSTOPPING": "draining",
    "STOPPED": "gone",
    "TERMINATED": "gone",
}
"""What a cluster's state says as long as its job says nothing more."""
_JOB_STATES: Mapping[str, StandingState] = {
    "INIT": "starting",
    "PENDING": "starting",
    "SETTING_UP": "starting",
    "RUNNING": "ready",
    "SUCCEEDED": "gone",
    "CANCELLED": "gone",
    "FAILED": "failed",
    "FAILED_SETUP": "failed",
    "FAILED_DRIVER": "failed",
}


@dataclass(frozen=True, slots=True)
class SkySettings:
    """How machines are rented.

    `setup` are commands that install what an instance's commands need. `image` is a container or machine
    image. `idle_minutes` after which a machine that runs nothing goes down. `instead` are further places and
    node types that will do where the planned one cannot be had.
    """

    setup: tuple[str, ...] = ()
    image: str | None = None
    idle_minutes: int = 10
    disk_gb: int = 256
    instead: tuple[tuple[str, str], ...] = ()


def name_cluster(labels: Labels) -> str:
    """Return the name of an instance's cluster: readable, short, and no other instance's."""
    import hashlib

    mark = hashlib.sha256(f"{labels.fleet}\0{labels.instance}".encode()).hexdigest()[:8]
    shown = _LABEL.sub("-", f"{labels.fleet}-{labels.instance}".lower()).strip("-_")
    most = _LONGEST_NAME - len(_PREFIX) - len(mark) - 1
    return f"{_PREFIX}{shown[:most].strip('-_')}-{mark}"


def list_resources(
    region: str, node_type: str, market: Market, settings: SkySettings
) -> list[dict[str, Any]]:
    """Return what will do: place, GPUs, spot or not."""
    places = dict.fromkeys(((region, node_type), *settings.instead))
    resources = []
    for place, kind in places:
        gpu, count = parse_node_type(kind)
        entry: dict[str, Any] = {
            "infra": place,
            "accelerators": {_SKY_NAMES.get(gpu, gpu): count},
            "use_spot": market == "spot",
        }
        resources.append(entry)
    return resources


def write_task(order: StartOrder, settings: SkySettings) -> dict[str, Any]:
    """Return the task of an instance as a dictionary in SkyPilot's own form.

    Every node of a task runs the same script, which picks its command by rank. Secrets are copied as files
    that only their owner reads; the script sets the variables that name them.
    """
    nodes = {node.id: node for node in order.instance.nodes}
    kinds = {(command.node_type, command.gpus) for command in order.commands}
    markets = {node.market for node in nodes.values()}
    regions = {order.instance.region_of(node) for node in nodes.values()}
    if len(kinds) > 1 or len(markets) > 1 or len(regions) > 1:
        raise DeployError(
            f"{order.labels.instance} has unlike nodes, and those of a SkyPilot task are alike",
            kind="settings",
            hint="plan with equal nodes here, or put it on Slurm or Kubernetes",
        )
    (node_type, _), (market,), (region,) = kinds.pop(), tuple(markets), tuple(regions)
    if market == "owned":
        raise DeployError(
            f"{order.labels.instance} is planned on machines of one's own",
            kind="settings",
            hint="SkyPilot rents: plan with cloud offers",
        )
    files = sorted({(name, path) for each in order.commands for name, path in each.secrets})
    resources: dict[str, Any] = {
        "any_of": list_resources(region, node_type, market, settings),
        "autostop": {"idle_minutes": settings.idle_minutes, "down": True},
        "disk_size": settings.disk_gb,
        "labels": write_labels(order.labels),
    }
    if settings.image is not None:
        resources["image_id"] = settings.image
    task: dict[str, Any] = {
        "name": name_cluster(order.labels),
        "num_nodes": len(order.commands),
        "resources": resources,
        "envs": {
            LABELS_VARIABLE: order.labels.to_json(),
            INSTANCE_VARIABLE: order.instance.to_json(),
        },
        "run": _write_script(order.commands),
    }
    if files:
        task["file_mounts"] = {f"{_SECRETS_FOLDER}/{name}": path for name, path in files}
    if settings.setup:
        task["setup"] = "set -e\n" + "\n".join(settings.setup) + "\n"
    return task


def write_labels(labels: Labels) -> dict[str, str]:
    """Return the labels as clouds take them: short, lower case. All of them travel in the task besides."""
    return {
        f"{_PREFIX}{name.replace('_', '-')}": _LABEL.sub("-", str(value).lower())[:_LONGEST_LABEL]
        for name, value in labels.model_dump().items()
        if str(value)
    }


def _write_script(commands: Sequence[NodeCommand]) -> str:
    # What `drain` signals; `exec` keeps the number.
    lines = ["set -eu", f"echo $$ > {PID_FILE}"]
    names = sorted({name for command in commands for name, _ in command.secrets})
    if names:
        # A mounted file has the modes of its copy.
        lines.append(f"chmod 700 {_SECRETS_FOLDER}; chmod 600 {_SECRETS_FOLDER}/*")
        lines += [f"export {name}={_SECRETS_FOLDER}/{name}" for name in names]
    lines.append('case "${SKYPILOT_NODE_RANK}" in')
    for rank, command in enumerate(commands):
        env = [f"{name}={shlex.quote(value)}" for name, value in command.env]
        # A machine of its own: nobody else takes its ports.
        words = [word.replace("{port}", str(_HOST_PORT)) for word in command.argv]
        start = ["exec", "env", *env] if env else ["exec"]
        lines.append(f"  {rank}) {' '.join(start)} {shlex.join(words)} ;;")
    return "\n".join([*lines, "esac", ""])


def format_tasks(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return tasks as the YAML that `sky launch` reads, for a dry run."""
    return yaml.safe_dump_all(tasks, sort_keys=False, allow_unicode=True, width=100)


def list_sky_offers(
    prices: PriceTable, node_types: Sequence[str], regions: Sequence[str], available: int
) -> tuple[Offer, ...]:
    """Return what the catalog's prices say can be rented; how many there are nobody knows beforehand."""
    offers = []
    for place in sorted(set(regions)):
        for kind in sorted(set(node_types)):
            for market in ("on-demand", "spot"):
                spot = market == "spot"
                price = prices.cheapest(place, kind, spot=spot)
                usd = None if price is None else price.cost(spot=spot)
                if price is not None and usd is not None:
                    offers.append(
                        Offer(
                            region=price.place,
                            node_type=kind,
                            market="spot" if spot else "on-demand",
                            available=available,
                            usd_per_hour=usd,
                            instance=price.instance,
                            whole=True,
                        )
                    )
    return tuple(offers)


def read_status(
    cluster: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]], labels: Labels
) -> Standing:
    """Return an instance by what `sky status` and `sky queue` say of its cluster and its last job."""
    state: StandingState = _STATES.get(
        str(cluster.get("status", "")).rpartition(".")[2], "starting"
    )
    since_s = float(cluster.get("launched_at") or 0.0)
    reason, kind = "", None
    last = max(jobs, key=lambda job: int(job.get("job_id") or 0), default=None)
    if last is not None and state in ("starting", "ready"):
        word = str(last.get("status", "")).rpartition(".")[2]
        state = _JOB_STATES.get(word, state)
        since_s = float(last.get("start_at") or last.get("submitted_at") or since_s)
        if state == "failed":
            reason, kind = f"its job is {word.lower().replace('_', ' ')}", _job_failure(word)
    return Standing(str(cluster.get("name", "")), labels, state, since_s, reason=reason, kind=kind)


def _job_failure(word: str) -> FailureKind:
    return "image" if word == "FAILED_SETUP" else "settings"


def load_sky() -> Any:
    """Return the SkyPilot SDK, or say how to get it."""
    try:
        return importlib.import_module("sky")
    except ImportError as error:
        raise MissingDependencyError("sky", "skypilot", needed_for="the SkyPilot target") from error


def check_task(task: Mapping[str, Any]) -> None:
    """Have SkyPilot read a task as it would launch it; DeployError says what it does not take."""
    sky = load_sky()
    try:
        sky.Task.from_yaml_config(dict(task))
    except Exception as error:
        raise read_refusal(error) from error


def read_refusal(error: Exception) -> DeployError:
    """Return what SkyPilot raised as a refusal; the names of its errors last longer than their words."""
    kinds: Mapping[str, FailureKind] = {
        "ResourcesUnavailableError": "capacity",
        "ProvisionerError": "capacity",
        "ApiServerConnectionError": "unreachable",
        "QuotaExceededError": "quota",
    }
    if isinstance(error, DeployError):
        return error
    kind = kinds.get(type(error).__name__, "settings")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = shorten(lines[0], _REASON) if lines else type(error).__name__
    hint = error.hint if isinstance(error, AtollError) else _HINTS.get(type(error).__name__)
    return DeployError(f"SkyPilot: {said}", kind=kind, hint=hint)
