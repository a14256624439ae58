"""Ray as a target: every instance is a job of the cluster, with a placement group for its nodes.

A job carries its labels in its metadata, so that the cluster's own list of jobs is the list of what stands,
and a controller that starts anew, or elsewhere, finds all of it there. The job's driver (`ray_job`) runs in
the cluster and needs no controller. Here nothing but HTTP is spoken.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.ray.ray_client import Json, RayClient
from atoll.deploy.ray.ray_jobs import (
    ENDED,
    INSTANCE,
    LABELS,
    STOP_SUFFIX,
    STOPS,
    RayJobRecord,
    judge_job,
    name_job,
    read_jobs,
    read_state,
)
from atoll.deploy.ray.ray_machines import RayMachine, count_held, list_offers, read_machines
from atoll.deploy.ray.ray_package import RayCommand, RayOrder, pack, read_secrets
from atoll.deploy.ray.ray_settings import RaySettings
from atoll.deploy.target import DeployError, InstanceStatus, StartOrder
from atoll.deploy.terms import refuse_old_term
from atoll.plan.problem import Offer

_JOB = "atoll.deploy.ray.ray_job"
_STOP = "atoll.deploy.ray.ray_stop"
_STOP_MORE_S = 60
"""From the end of the time to drain to Ray's SIGKILL."""
_MAX_METADATA_BYTES = 96 * 2**10
"""Ray hands metadata to the driver in one variable, which Linux limits to 128 KiB."""
_POLL_S = 0.1
_HEED_S = 5.0
"""How long a driver may take to say that it drains."""
_END_S = 60.0


class RayDeployer:
    """A Ray cluster; `drain_s` is how long a draining instance may take to finish its streams."""

    name = "ray"

    def __init__(
        self,
        client: RayClient,
        settings: RaySettings,
        *,
        catalog: Catalog | None = None,
        drain_s: float = 600.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._settings = client, settings
        self._catalog = catalog or Catalog.default()
        self._drain_s = drain_s
        self._clock, self._sleep = clock, sleep

    # What there is

    def offers(self) -> Sequence[Offer]:
        """Return what machines with GPUs can be had, less what others in the cluster hold of them."""
        held = count_held(self._client.groups(), self._client.actors())
        return list_offers(self._machines(), held, self._settings)

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return the jobs of a fleet, and those that ended a short while ago, in the order of handles."""
        jobs = self._client.jobs()
        recent_s = self._clock() - self._settings.keep_s
        return tuple(
            self._look(record, jobs)
            for record in read_jobs(jobs)
            if record.labels.fleet == fleet and not (record.ended and record.end_s < recent_s)
        )

    # Orders

    def start(self, order: StartOrder) -> InstanceStatus:
        """Submit an instance's job; one that was submitted before is returned as it is."""
        labels, name = order.labels, name_job(order.labels)
        self._fence(labels.fleet, labels.term)
        known = self._find(name)
        if known is None:
            self._forget_old(labels.fleet)
            written = self._write_order(order, self._machines())
            secrets = read_secrets({n: path for each in order.commands for n, path in each.secrets})
            metadata = {LABELS: labels.to_json(), INSTANCE: order.instance.to_json()}
            if len(metadata[INSTANCE]) > _MAX_METADATA_BYTES:
                del metadata[INSTANCE]
            job = self._job(name, [_JOB], metadata)
            job["runtime_env"]["working_dir"] = self._client.upload(*pack(written, secrets))
            try:
                self._client.submit(job)
            except DeployError:
                # Ray may have taken it although it did not say so in time, or another controller was first.
                known = self._find(name)
                if known is None:
                    raise
            known = known or self._find(name)
        if known is None:
            raise DeployError(f"Ray knows nothing of {name} that it took", kind="unreachable")
        return known

    def drain(self, handle: str, term: int) -> None:
        """Have the commands of an instance finish what runs; one that waits for room ends."""
        record = self._standing(handle, term)
        if record is None:
            return
        self._client.stop(handle)
        self._wait(handle, _HEED_S, lambda status: status.state not in ("starting", "ready"))

    def stop(self, handle: str, term: int) -> None:
        """End an instance now, and wait until nothing of it is left."""
        record = self._standing(handle, term)
        if record is None:
            return
        self._client.stop(handle)
        # What has no streams ends at once; the nodes of the rest are killed.
        if self._wait(handle, _HEED_S, _has_ended):
            return
        state, hurried = read_state(self._client.job_log(handle)), handle + STOP_SUFFIX
        known = {job.get("submission_id") for job in self._client.jobs()}
        if state is not None and state.nodes and hurried not in known:
            nodes = [each.node for each in state.nodes if each.log]
            metadata = {STOPS: record.labels.fleet}
            self._client.submit(self._job(hurried, [_STOP, handle, *nodes], metadata))
        if not self._wait(handle, _END_S, _has_ended):
            raise DeployError(f"{handle} does not end", kind="unreachable")

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of each node, each under its name if there are several."""
        if self._find(handle) is None:
            raise DeployError(f"there is no job {handle} of Atoll", kind="ended")
        log = self._client.job_log(handle)
        state = read_state(log)
        if state is None or not state.nodes:
            return "\n".join(log.splitlines()[-lines:])
        texts = {
            each.node: self._tail(each.machine, each.log, lines) for each in state.nodes if each.log
        }
        if len(texts) == 1:
            return next(iter(texts.values()))
        return "\n".join(f"== {name}\n{text}" for name, text in texts.items())

    def dry_run(self, order: StartOrder) -> str:
        """Return the order of an instance's job as JSON; submits nothing, and shows no secret."""
        return self._write_order(order, self._machines()).to_json(indent=2) + "\n"

    # Asking

    def _machines(self) -> tuple[RayMachine, ...]:
        return read_machines(self._client.nodes(), self._settings, self._catalog)

    def _find(self, handle: str) -> InstanceStatus | None:
        jobs = self._client.jobs()
        record = next((each for each in read_jobs(jobs) if each.id == handle), None)
        return None if record is None else self._look(record, jobs)

    def _look(self, record: RayJobRecord, jobs: Sequence[Json]) -> InstanceStatus:
        # What ended is told in its record, also when the machine with its log is gone.
        log = record.message if record.ended else self._client.job_log(record.id)
        hurried = record.id + STOP_SUFFIX
        stopped = any(job.get("submission_id") == hurried for job in jobs)
        return judge_job(record, log, stopped=stopped)

    def _standing(self, handle: str, term: int) -> RayJobRecord | None:
        """Return the job of an instance that has not ended; None if there is none to be told anything."""
        jobs = read_jobs(self._client.jobs())
        record = next((each for each in jobs if each.id == handle), None)
        if record is None:
            return None
        self._fence(record.labels.fleet, term)
        return None if record.ended else record

    def _fence(self, fleet: str, term: int) -> None:
        """Refuse a term older than the newest that an instance of the fleet carries."""
        terms = [r.labels.term for r in read_jobs(self._client.jobs()) if r.labels.fleet == fleet]
        refuse_old_term(fleet, term, max(terms, default=0))

    def _wait(self, handle: str, max_s: float, done: Callable[[InstanceStatus], bool]) -> bool:
        for _ in range(round(max_s / _POLL_S)):
            status = self._find(handle)
            if status is None or done(status):
                return True
            self._sleep(_POLL_S)
        return False

    def _tail(self, machine: str, file: str, lines: int) -> str:
        try:
            return self._client.tail(machine, file, lines).rstrip("\n")
        except DeployError as error:
            # Its log is on its machine, which may have left.
            return f"(no log: {error.message})"

    def _forget_old(self, fleet: str) -> None:
        """Remove the records of what ended long ago."""
        oldest_s = self._clock() - self._settings.keep_s
        jobs = self._client.jobs()
        old = {each.id for each in read_jobs(jobs) if each.labels.fleet == fleet and each.ended}
        for job in jobs:
            stops = (job.get("metadata") or {}).get(STOPS) == fleet and job.get("status") in ENDED
            name, end_s = str(job["submission_id"]), float(job.get("end_time") or 0) / 1e3
            if (stops or name in old) and end_s < oldest_s:
                self._client.forget(name)

    # Writing

    def _job(self, name: str, module: Sequence[str], metadata: dict[str, str]) -> Json:
        wait_s = str(int(self._drain_s) + _STOP_MORE_S)
        return {
            "submission_id": name,
            "entrypoint": f"exec {shlex.join([self._settings.python, '-m', *module])}",
            "metadata": metadata,
            "runtime_env": {"env_vars": {**self._settings.env, "RAY_JOB_STOP_WAIT_TIME_S": wait_s}},
        }

    def _write_order(self, order: StartOrder, machines: Sequence[RayMachine]) -> RayOrder:
        order.refuse_shares("Ray")
        by_name = {machine.name: machine.id for machine in machines}
        avoid = tuple(sorted(by_name[host] for host in order.avoid_hosts if host in by_name))
        usable = [machine for machine in machines if machine.id not in avoid]
        self._check_room(order, usable)
        planned = {node.id: node for node in order.instance.nodes}
        commands = []
        for command in order.commands:
            node = planned.get(command.node)
            host = None if node is None else node.host
            commands.append(
                RayCommand(
                    node=command.node,
                    argv=command.argv,
                    gpus=command.gpus,
                    accelerator=_accelerator(command, usable),
                    only=None if host is None else by_name.get(host),
                    env=dict(command.env),
                    secrets=tuple(sorted(name for name, _ in command.secrets)),
                )
            )
        return RayOrder(
            job=name_job(order.labels),
            commands=tuple(commands),
            avoid=avoid,
            cpus_per_gpu=self._settings.cpus_per_gpu,
            ready_s=order.ready_s,
            drain_s=self._drain_s,
            schedule_s=self._settings.schedule_s,
        )

    def _check_room(self, order: StartOrder, machines: Sequence[RayMachine]) -> None:
        """Refuse what the cluster has not, however little of it is in use."""
        if self._settings.autoscales:
            return
        kinds = {parse_node_type(c.node_type).gpu for c in order.commands if c.gpus}
        for kind in sorted(kinds):
            asked = sorted(
                (
                    c.gpus
                    for c in order.commands
                    if c.gpus and parse_node_type(c.node_type).gpu == kind
                ),
                reverse=True,
            )
            free = [machine.gpus for machine in machines if machine.gpu == kind]
            for gpus in asked:
                room = [at for at, left in enumerate(free) if left >= gpus]
                if not room:
                    has = sum(machine.gpus for machine in machines if machine.gpu == kind)
                    largest = max((m.gpus for m in machines if m.gpu == kind), default=0)
                    raise DeployError(
                        f"no room for {' + '.join(map(str, asked))} {kind} of {order.labels.instance}: the"
                        f" cluster has {has}"
                        + (f", at most {largest} in a machine" if has else ""),
                        kind="capacity",
                        hint="plan with fewer, or set `autoscales` if more will come",
                    )
                free[min(room, key=lambda at: free[at])] -= gpus


def _has_ended(status: InstanceStatus) -> bool:
    return status.state in ("gone", "failed")


def _accelerator(command: NodeCommand, machines: Sequence[RayMachine]) -> str | None:
    """What Ray calls the GPU of a command: the type that most machines give it which could hold it."""
    gpu = parse_node_type(command.node_type).gpu
    fitting = [m.accelerator for m in machines if m.gpu == gpu and m.gpus >= command.gpus]
    if not fitting:
        return gpu  # it is yet to come
    return max(sorted(set(fitting), key=str), key=fitting.count)
