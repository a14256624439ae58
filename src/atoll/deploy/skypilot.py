"""The SkyPilot target behind the deployers' door: machines rented wherever SkyPilot finds them.

    deployer = SkyDeployer(offers, SkySettings(setup=("pip install 'atoll[serve,fabric]' vllm",)))

The SDK is imported with the first call that needs it. Labels travel in the task itself, which SkyPilot's
server keeps with the cluster, so whoever asks later reads them there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import yaml

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.deploy.door import DeployError, Labels, Standing, StartOrder
from atoll.deploy.skypilot_tasks import (
    INSTANCE_VARIABLE,
    LABELS_VARIABLE,
    PID_FILE,
    SkySettings,
    load_sky,
    name_cluster,
    read_refusal,
    read_status,
    write_task,
)
from atoll.deploy.terms import refuse_old_term
from atoll.plan.plan import Instance
from atoll.plan.problem import Offer

F = TypeVar("F", bound=Frozen)

_PREFIX = "atoll-"
_MOST_YAML = 2**20
_DRAIN = f"""
pid=$(cat {PID_FILE})
test -e {PID_FILE}.drained || kill -TERM "$pid"
touch {PID_FILE}.drained
"""


class SkyDeployer:
    """See the module. `start` takes as long as SkyPilot takes to rent the machines.

    An order of an older term than the newest that an instance of its fleet carries is refused.
    """

    name = "skypilot"

    def __init__(
        self,
        offers: Sequence[Offer],
        settings: SkySettings | None = None,
        *,
        sky: Callable[[], Any] = load_sky,
    ) -> None:
        self._offers = tuple(offers)
        self._settings = settings or SkySettings()
        self._load = sky

    def offers(self) -> Sequence[Offer]:
        """Return what was given: the catalog's prices (see `list_sky_offers`)."""
        return self._offers

    def list(self, fleet: str) -> Sequence[Standing]:
        """Return the clusters of a fleet as SkyPilot's server knows them."""
        standings = []
        for cluster in self._ask("status"):
            record = _as_dict(cluster)
            labels = read_task_labels(record.get("last_creation_yaml"))
            name = str(record.get("name", ""))
            if labels is None or labels.fleet != fleet or not name.startswith(_PREFIX):
                continue
            up = str(record.get("status", "")).endswith("UP")
            jobs = [_as_dict(job) for job in self._ask("queue", name)] if up else []
            # What drains runs as a job besides; the instance is the one that bears the cluster's name.
            own = [job for job in jobs if job.get("job_name") in (None, name)]
            found = read_task_instance(record.get("last_creation_yaml"))
            standings.append(replace(read_status(record, own, labels), instance=found))
        return tuple(sorted(standings, key=lambda standing: standing.handle))

    def start(self, order: StartOrder) -> Standing:
        """Rent machines and run the instance's task there."""
        name, labels = name_cluster(order.labels), order.labels
        standing = self._fence(labels.fleet, labels.term, name)
        if standing is not None and standing.state != "gone":
            return standing
        task = write_task(order, self._settings)
        sky = self._load()
        try:
            made = sky.Task.from_yaml_config(task)
        except Exception as error:
            raise read_refusal(error) from error
        self._ask("launch", made, cluster_name=name)
        found = next((each for each in self.list(labels.fleet) if each.handle == name), None)
        if found is None:
            raise DeployError(f"{name} ended at once", kind="ended")
        return found

    def drain(self, handle: str, term: int) -> None:
        """Tell the instance's processes to end when their streams have; the idle machine then goes down."""
        standing = self._find(handle, term)
        if standing is None or standing.state in ("gone", "draining", "failed"):
            return
        sky = self._load()
        task = sky.Task.from_yaml_config({"name": f"{handle}-drain", "run": _DRAIN})
        self._ask("exec", task, cluster_name=handle)

    def stop(self, handle: str, term: int) -> None:
        """Give the machines back now."""
        if self._find(handle, term) is not None:
            self._ask("down", handle)

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of the instance's job."""
        stream = io.StringIO()
        self._call("tail_logs", handle, None, follow=False, tail=lines, output_stream=stream)
        return stream.getvalue().rstrip("\n")

    def _find(self, handle: str, term: int) -> Standing | None:
        for cluster in self._ask("status"):
            record = _as_dict(cluster)
            if record.get("name") == handle:
                labels = read_task_labels(record.get("last_creation_yaml"))
                if labels is None:
                    raise DeployError(f"{handle} is no instance of a fleet", kind="settings")
                return self._fence(labels.fleet, term, handle)
        return None

    def _fence(self, fleet: str, term: int, name: str) -> Standing | None:
        """Return the instance of this name, if the term is no older than what stands."""
        standings = self.list(fleet)
        newest = max((each.labels.term for each in standings), default=0)
        refuse_old_term(fleet, term, newest)
        return next((each for each in standings if each.handle == name), None)

    def _ask(self, verb: str, *words: Any, **options: Any) -> Any:
        """Send a request to SkyPilot's server and wait for its answer."""
        request = self._call(verb, *words, **options)
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


def read_task_labels(text: object) -> Labels | None:
    """Return the labels in the task that a cluster was made with; None if it is nobody's instance."""
    return _read_variable(text, LABELS_VARIABLE, Labels)


def read_task_instance(text: object) -> Instance | None:
    """Return what the instance consists of that a cluster was made for."""
    return _read_variable(text, INSTANCE_VARIABLE, Instance)


def _read_variable(text: object, name: str, kind: type[F]) -> F | None:
    if not isinstance(text, str) or len(text) > _MOST_YAML:
        return None
    try:
        task = yaml.safe_load(text)
        return kind.from_json(task["envs"][name])
    except (yaml.YAMLError, KeyError, TypeError, InputError):
        return None


def _as_dict(record: Any) -> dict[str, Any]:
    """Answers are models in some versions of the SDK and dictionaries in others."""
    return dict(record) if isinstance(record, dict) else dict(record.model_dump())
