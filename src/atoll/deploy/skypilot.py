"""The SkyPilot target: an instance is a task on a cluster of its own, rented where it can be had.

    deployer = SkyDeployer(offers, SkypilotSettings(setup=("pip install 'atoll[serve,fabric]' vllm",)))

A task asks for any of several resources (`any_of`), of which SkyPilot takes the cheapest to be had: the
machine that was planned, and those that were named as good enough instead. It runs on spot or on demand as
planned, goes down by itself when idle, and carries its labels, which SkyPilot keeps with the cluster. An
instance whose nodes are unlike is refused: the nodes of one task are alike.

The SDK is imported with the first call that needs it; `write_task` and `format_tasks` work without it.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import Field

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError, InputError, MissingDependencyError, shorten
from atoll.core.frozen import Frozen
from atoll.core.ids import parse_node_type
from atoll.deploy.labels import Labels
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import (
    Claim,
    Deployer,
    DeployError,
    DeployerSettings,
    FailureKind,
    InstanceState,
    InstanceStatus,
    StartOrder,
    TargetSite,
)
from atoll.deploy.terms import refuse_old_term
from atoll.plan.plan import Instance, Market
from atoll.plan.problem import Offer

_PREFIX = "atoll-"
_LABEL = re.compile(r"[^a-z0-9_-]")
MAX_LABEL_CHARACTERS = 63
"""Of a label's value, by the strictest cloud (GCP)."""
MAX_NAME_CHARACTERS = 50
MAX_REASON_CHARACTERS = 300
_SECRETS_FOLDER = "~/.atoll-secrets"
_HOST_PORT = 8000
PID_FILE = "~/.atoll-node.pid"
_ANSWERS = "atoll: this node answers"
"""Line that a node's script writes once its engine does: a job that runs has begun to start it."""
_WATCH = (
    "import http.client as h; "
    f"c = h.HTTPConnection('127.0.0.1', {_HOST_PORT}, timeout=4); "
    "c.request('GET', '/health'); s = c.getresponse().status; exit(s >= 400 and s != 404)"
)
_MAX_LOG_CHARACTERS = 2**22
LABELS_VARIABLE = "ATOLL_LABELS"
INSTANCE_VARIABLE = "ATOLL_INSTANCE"
_HINTS = {
    "NoCloudAccessError": "run 'sky check' and enable a cloud that the pool names",
    "CloudUserIdentityError": "log in to the cloud again, then 'sky check'",
    "ApiServerConnectionError": "run 'sky api start', or name the server with SKYPILOT_API_SERVER_ENDPOINT",
}
_SKY_NAMES = {"A100-80": "A100-80GB"}
"""GPUs that SkyPilot calls otherwise than the catalog."""
_STATES: Mapping[str, InstanceState] = {
    "INIT": "starting",
    "PENDING": "starting",
    "UP": "starting",
    "AUTOSTOPPING": "draining",
    "STOPPED": "gone",
    "TERMINATED": "gone",
}
"""State of a cluster as long as its job says nothing more."""
_JOB_STATES: Mapping[str, InstanceState] = {
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


class SkypilotSettings(DeployerSettings):
    """How machines are rented through SkyPilot.

    `setup` are commands that install what an instance's commands need. `image` is a container or machine
    image. `idle_minutes` after which a machine that runs nothing goes down. `instead` are further places and
    node types that will do where the planned one cannot be had.
    """

    setup: tuple[str, ...] = ("pip install 'atoll[serve,fabric]' vllm",)
    image: str | None = None
    idle_minutes: int = Field(default=10, ge=1)
    disk_gb: int = Field(default=256, ge=1)
    instead: tuple[tuple[str, str], ...] = ()

    def open(self, site: TargetSite) -> Deployer:
        """Return SkyPilot with the offers of the pool that are not somebody's own machines."""
        return SkyDeployer([offer for offer in site.pool if offer.market != "owned"], self)

    def claim(self, region: str) -> Claim:
        """Claim every place of a cloud ("aws/us-east-2")."""
        return Claim.CLOUD if "/" in region else Claim.NONE

    def render_orders(
        self, orders: Sequence[StartOrder], deployer: Deployer, catalog: Catalog
    ) -> dict[str, str]:
        """Return the tasks that `sky launch` reads, a file for every instance.

        Secrets that nobody has made yet, because nothing was ever brought up, are files beside them that say
        what to put there.
        """
        del deployer, catalog
        texts = {}
        for order in orders:
            task = write_task(order, self)
            for place, path in task.get("file_mounts", {}).items():
                if not Path(path).is_file():
                    name = f"{place.rpartition('/')[2]}.token"
                    task["file_mounts"][place] = f"./{name}"
                    texts[name] = f"put the content of {path} here, which `atoll up` makes\n"
            texts[f"{order.file_name}.sky.yaml"] = format_tasks([task])
        return texts


def name_cluster(labels: Labels) -> str:
    """Return the name of an instance's cluster: readable, short, and no other instance's."""
    import hashlib

    # Names that are cut or cleaned may be equal; with this they are not.
    mark = hashlib.sha256(f"{labels.fleet}\0{labels.instance}".encode()).hexdigest()[:8]
    shown = _LABEL.sub("-", f"{labels.fleet}-{labels.instance}".lower()).strip("-_")
    most = MAX_NAME_CHARACTERS - len(_PREFIX) - len(mark) - 1
    return f"{_PREFIX}{shown[:most].strip('-_')}-{mark}"


def list_resources(
    region: str, node_type: str, market: Market, settings: SkypilotSettings
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


def write_task(order: StartOrder, settings: SkypilotSettings) -> dict[str, Any]:
    """Return the task of an instance as a dictionary in SkyPilot's own form.

    Every node of a task runs the same script, which picks its command by rank. Secrets are copied as files
    that only their owner reads; the script sets the variables that name them.
    """
    order.refuse_shares("SkyPilot")
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
        f"{_PREFIX}{name.replace('_', '-')}": _LABEL.sub("-", str(value).lower())[
            :MAX_LABEL_CHARACTERS
        ]
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
        lines.append(f"  {rank})")
        if words != [*command.argv]:
            watch = f"python3 -c {shlex.quote(_WATCH)} 2>/dev/null"
            lines.append(
                f"    (while kill -0 $$ 2>/dev/null; do sleep 2; {watch} || continue; "
                f"echo {shlex.quote(_ANSWERS)}; break; done) &"
            )
        lines.append(f"    {' '.join(start)} {shlex.join(words)} ;;")
    return "\n".join([*lines, "esac", ""])


def format_tasks(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return tasks as the YAML that `sky launch` reads, for a dry run."""
    return yaml.safe_dump_all(tasks, sort_keys=False, allow_unicode=True, width=100)


def read_status(
    cluster: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]], labels: Labels
) -> InstanceStatus:
    """Return an instance by what `sky status` and `sky queue` say of its cluster and its last job."""
    state: InstanceState = _STATES.get(
        str(cluster.get("status", "")).rpartition(".")[2], "starting"
    )
    since_s = float(cluster.get("launched_at") or 0.0)
    reason, kind = "", None
    last = max(jobs, key=lambda job: int(job.get("job_id") or 0), default=None)
    # A cluster that is up says nothing of its job; of one that goes down the job says nothing more.
    if last is not None and state in ("starting", "ready"):
        word = str(last.get("status", "")).rpartition(".")[2]
        state = _JOB_STATES.get(word, state)
        since_s = float(last.get("start_at") or last.get("submitted_at") or since_s)
        if state == "failed":
            reason, kind = f"its job is {word.lower().replace('_', ' ')}", _job_failure(word)
    return InstanceStatus(
        str(cluster.get("name", "")), labels, state, since_s, reason=reason, kind=kind
    )


def _job_failure(word: str) -> FailureKind:
    return "image" if word == "FAILED_SETUP" else "settings"


def load_sky() -> Any:
    """Return the SkyPilot SDK, or say how to get it."""
    try:
        return importlib.import_module("sky")
    except ImportError as error:
        raise MissingDependencyError("sky", "skypilot", needed_for="the SkyPilot target") from error


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
    said = shorten(lines[0], MAX_REASON_CHARACTERS) if lines else type(error).__name__
    hint = error.hint if isinstance(error, AtollError) else _HINTS.get(type(error).__name__)
    return DeployError(f"SkyPilot: {said}", kind=kind, hint=hint)


F = TypeVar("F", bound=Frozen)

_MAX_YAML = 2**20
_DRAIN = f"""
pid=$(cat {PID_FILE})
test -e {PID_FILE}.drained || kill -TERM "$pid"
touch {PID_FILE}.drained
"""


@dataclass(frozen=True, slots=True)
class _Launch:
    """A request to rent machines that SkyPilot's server works on, and the instance as it stands till then."""

    request: Any
    status: InstanceStatus


class SkyDeployer:
    """See the module. `start` asks for machines and does not wait for them; `list` says what came of it.

    An instance is ready when its engine answers, as a line of its job's log says. An order of an older term
    than the newest that an instance of its fleet carries is refused.
    """

    name = "skypilot"

    def __init__(
        self,
        offers: Sequence[Offer],
        settings: SkypilotSettings | None = None,
        *,
        sky: Callable[[], Any] = load_sky,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._offers = tuple(offers)
        self._settings = settings or SkypilotSettings()
        self._load = sky
        self._clock = clock
        self._launches: dict[str, _Launch] = {}
        self._known: dict[str, InstanceStatus] = {}
        self._answering: set[tuple[str, int]] = set()

    def offers(self) -> Sequence[Offer]:
        """Return what was given: the catalog's prices."""
        return self._offers

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return the clusters of a fleet as SkyPilot's server knows them, and those that are being rented.

        Of a cluster that cannot be asked for its jobs, what was known of it last stands; the others are
        not concerned.
        """
        statuses = {}
        # Spot machines that were taken away are known to the cloud first.
        modes = getattr(self._load(), "StatusRefreshMode", None)
        asked = {} if modes is None else {"refresh": modes.AUTO}
        for cluster in self._ask("status", **asked):
            record = _as_dict(cluster)
            labels = read_task_labels(record.get("last_creation_yaml"))
            name = str(record.get("name", ""))
            if labels is None or labels.fleet != fleet or not name.startswith(_PREFIX):
                continue
            status = replace(
                self._judge(name, record, labels),
                instance=read_task_instance(record.get("last_creation_yaml")),
            )
            statuses[name] = self._known[name] = status
        for name, launch in list(self._launches.items()):
            if launch.status.labels.fleet == fleet:
                self._follow(name, launch, statuses)
        return tuple(statuses[name] for name in sorted(statuses))

    def _judge(self, name: str, record: Mapping[str, Any], labels: Labels) -> InstanceStatus:
        """Return an instance by its cluster, its job, and whether its engine has answered."""
        up = str(record.get("status", "")).endswith("UP")
        try:
            jobs = [_as_dict(job) for job in self._ask("queue", name)] if up else []
            # What drains runs as a job besides; the instance is the one that bears the cluster's name.
            own = [job for job in jobs if job.get("job_name") in (None, name)]
            if up and not own and self._was_heard(name, record):
                # It has answered: a list without it is cut, or its server was started anew.
                raise DeployError(f"{name}: SkyPilot does not list its job", kind="unreachable")
            status = read_status(record, own, labels)
            if status.state == "ready" and not self._answers(name, own, record):
                return replace(status, state="starting", reason="runs; it does not answer yet")
        except DeployError as error:
            known = self._known.get(name)
            if known is None or known.labels != labels:
                known = read_status(record, (), labels)
                if self._was_heard(name, record):
                    known = replace(known, state="ready")
            return replace(known, reason=str(error))
        return status

    def _was_heard(self, name: str, record: Mapping[str, Any]) -> bool:
        """Whether its log says that its nodes have answered; no where it cannot be read."""
        wanted = _count_watched(record)
        try:
            return 0 < wanted <= self._read_log(name).count(_ANSWERS)
        except DeployError:
            return False

    def _answers(
        self, name: str, jobs: Sequence[Mapping[str, Any]], record: Mapping[str, Any]
    ) -> bool:
        """Whether as many nodes say that they answer as were told to watch themselves."""
        key = name, max(int(job.get("job_id") or 0) for job in jobs)
        wanted = _count_watched(record)
        if key not in self._answering and wanted:
            if self._read_log(name).count(_ANSWERS) < wanted:
                return False
            self._answering.add(key)
        return True

    def _read_log(self, name: str) -> str:
        return self.logs(name, 0)[:_MAX_LOG_CHARACTERS]

    def _follow(self, name: str, launch: _Launch, statuses: dict[str, InstanceStatus]) -> None:
        """See what came of a request: nothing yet, machines, or a refusal, which stands until `stop`."""
        status = launch.status
        if status.state != "failed":
            word = self._request_state(launch.request)
            if word in ("SUCCEEDED", "CANCELLED"):
                del self._launches[name]
                return
            if word == "FAILED":
                try:
                    self._wait(launch.request)
                except DeployError as error:
                    status = replace(status, state="failed", reason=str(error), kind=error.kind)
                    self._launches[name] = replace(launch, status=status)
        found = statuses.get(name)
        if found is None or (status.state == "failed" and found.state == "starting"):
            statuses[name] = status

    def _request_state(self, request: Any) -> str:
        found = self._call("api_status", [request], all_status=True)
        words = (str(_as_dict(each).get("status", "")).rpartition(".")[2] for each in found)
        # What the server does not know any more is over.
        return next(words, "SUCCEEDED")

    def start(self, order: StartOrder) -> InstanceStatus:
        """Ask for machines to run the instance's task on; many are rented at a time."""
        name, labels = name_cluster(order.labels), order.labels
        status = self._fence(labels.fleet, labels.term, name)
        if status is not None and status.state != "gone":
            return status
        task = write_task(order, self._settings)
        sky = self._load()
        try:
            made = sky.Task.from_yaml_config(task)
        except Exception as error:
            raise read_refusal(error) from error
        request = self._call("launch", made, cluster_name=name)
        status = InstanceStatus(
            name, labels, "starting", self._clock(), reason="being rented", instance=order.instance
        )
        self._launches[name] = _Launch(request, status)
        return next((each for each in self.list(labels.fleet) if each.handle == name), status)

    def drain(self, handle: str, term: int) -> None:
        """Tell the instance's processes to end when their streams have; the idle machine then goes down."""
        status = self._find(handle, term)
        if status is None or status.state in ("gone", "draining", "failed"):
            return
        sky = self._load()
        task = sky.Task.from_yaml_config({"name": f"{handle}-drain", "run": _DRAIN})
        self._ask("exec", task, cluster_name=handle)

    def stop(self, handle: str, term: int) -> None:
        """Give the machines back now, also those that are being rented."""
        launch = self._launches.get(handle)
        if launch is not None:
            self._fence(launch.status.labels.fleet, term, handle)
            if self._launches.pop(handle, launch).status.state != "failed":
                self._ask("api_cancel", [launch.request])
        if self._find(handle, term) is not None:
            self._ask("down", handle)

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of the instance's job."""
        stream = io.StringIO()
        self._call("tail_logs", handle, None, follow=False, tail=lines, output_stream=stream)
        return stream.getvalue().rstrip("\n")

    def _find(self, handle: str, term: int) -> InstanceStatus | None:
        for cluster in self._ask("status"):
            record = _as_dict(cluster)
            if record.get("name") == handle:
                labels = read_task_labels(record.get("last_creation_yaml"))
                if labels is None:
                    raise DeployError(f"{handle} is no instance of a fleet", kind="settings")
                return self._fence(labels.fleet, term, handle)
        return None

    def _fence(self, fleet: str, term: int, name: str) -> InstanceStatus | None:
        """Return the instance of this name, if the term is no older than what stands."""
        statuses = self.list(fleet)
        newest = max((each.labels.term for each in statuses), default=0)
        refuse_old_term(fleet, term, newest)
        return next((each for each in statuses if each.handle == name), None)

    def _ask(self, verb: str, *words: Any, **options: Any) -> Any:
        """Send a request to SkyPilot's server and wait for its answer."""
        return self._wait(self._call(verb, *words, **options))

    def _wait(self, request: Any) -> Any:
        try:
            return self._load().get(request)
        except Exception as error:
            raise read_refusal(error) from error

    def _call(self, verb: str, *words: Any, **options: Any) -> Any:
        sky = self._load()
        try:
            return getattr(sky, verb)(*words, **options)
        except Exception as error:
            raise read_refusal(error) from error


def _count_watched(record: Mapping[str, Any]) -> int:
    """Return how many nodes watch themselves: in the script their line stands once for each of them."""
    return str(_read_task(record.get("last_creation_yaml")).get("run")).count(_ANSWERS)


def read_task_labels(text: object) -> Labels | None:
    """Return the labels in the task that a cluster was made with; None if it is nobody's instance."""
    return _read_variable(text, LABELS_VARIABLE, Labels)


def read_task_instance(text: object) -> Instance | None:
    """Return what the instance consists of that a cluster was made for."""
    return _read_variable(text, INSTANCE_VARIABLE, Instance)


def _read_variable(text: object, name: str, kind: type[F]) -> F | None:
    try:
        return kind.from_json(_read_task(text)["envs"][name])
    except (KeyError, TypeError, InputError):
        return None


@functools.lru_cache(maxsize=1024)
def _read_task(text: object) -> Mapping[str, Any]:
    """Return the task that a cluster was made with, empty where that cannot be read.

    Kept, since a cluster's never changes and reading YAML takes longer than all else here.
    """
    if not isinstance(text, str) or len(text) > _MAX_YAML:
        return {}
    try:
        task = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return task if isinstance(task, dict) else {}


def _as_dict(record: Any) -> dict[str, Any]:
    """Answers are models in some versions of the SDK and dictionaries in others."""
    return dict(record) if isinstance(record, dict) else dict(record.model_dump())
