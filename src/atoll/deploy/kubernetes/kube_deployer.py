"""The target kubernetes: instances come by server-side apply and go with the object that owns them."""

from __future__ import annotations

import builtins
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from atoll.catalog.catalog import Catalog
from atoll.deploy.kubernetes.eviction_guard import EvictionGuard
from atoll.deploy.kubernetes.host_shares import HostShare, read_shares
from atoll.deploy.kubernetes.kube_client import KubeClient
from atoll.deploy.kubernetes.kube_lease import LeaseHolder, find_newest_term
from atoll.deploy.kubernetes.kube_machines import (
    cordoned_s,
    is_cordoned,
    is_lost,
    list_unknown,
    read_offers,
)
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import (
    belongs_to,
    can_be_found,
    read_labels,
    select_fleet,
    select_instance,
    workload_name,
)
from atoll.deploy.kubernetes.manifests import own, render_instance, render_secret, write_manifests
from atoll.deploy.kubernetes.node_pools import count_unborn
from atoll.deploy.kubernetes.worker_group import KIND as GROUP_KIND
from atoll.deploy.kubernetes.worker_group import is_group, name_pod, why_no_group
from atoll.deploy.kubernetes.workload_status import (
    SeenMachines,
    WorkloadParts,
    judge_instance,
    read_count,
)
from atoll.deploy.labels import Labels
from atoll.deploy.target import DeployError, InstanceStatus, StartOrder
from atoll.deploy.terms import refuse_old_term
from atoll.plan.problem import Offer

Json = dict[str, Any]

STOP_GRACE_S = 1
UNOWNED_KINDS = ("Service", "Secret")


class KubernetesDeployer:
    """A namespace of a cluster.

    An instance that has drained or was stopped leaves nothing, so it is not listed any more, and not being
    listed means gone: `decide` counts it as lost only if it wanted it. One that failed stays, with its
    reason, until it is stopped.
    """

    name = "kubernetes"

    def __init__(
        self,
        client: KubeClient,
        settings: KubernetesSettings,
        catalog: Catalog | None = None,
        clock: Callable[[], float] = time.time,
        fleet: str = "",
    ) -> None:
        self._client = client
        self._settings = settings
        self._catalog = catalog or Catalog.default()
        self._clock = clock
        self._fleet = fleet
        self._told: set[str] = set()
        self._cordoned: dict[str, float] = {}
        self._starting: dict[str, float] = {}
        self._grows = bool(settings.node_pools)
        self._guard: EvictionGuard | None = None
        self._shares: tuple[HostShare, ...] | None = None

    @classmethod
    def connect(
        cls, settings: KubernetesSettings, catalog: Catalog | None = None, fleet: str = ""
    ) -> KubernetesDeployer:
        """Return the target in the cluster that the settings name, for one fleet."""
        from atoll.deploy.kubernetes.kube_transport import ClusterTransport

        transport = ClusterTransport(settings.kubeconfig, settings.context)
        return cls(KubeClient(transport, settings.namespace), settings, catalog, fleet=fleet)

    def offers(self) -> Sequence[Offer]:
        """Return what machines with GPUs can be had, less what pods of others hold of them.

        Others are other fleets of Atoll, too; whose GPUs are of no known type is said once.
        """
        nodes = self._client.select("Node")
        # Rights over a namespace alone do not show what is in others; then the machines count as free.
        pods = self._client.select_if_allowed("Pod", everywhere=True)
        if pods is None:
            pods = self._client.select("Pod", labels=select_fleet(self._fleet))
        self._shares = read_shares(nodes, self._settings, self._catalog)
        unknown = list_unknown(nodes, self._settings, self._catalog)
        self._tell(
            f"not offered, since the catalog has no such GPU: {each}; set gpu_names"
            for each in unknown
        )
        own: builtins.list[Json] = []
        others: builtins.list[Json] = []
        for pod in pods:
            mine = belongs_to(pod, self._fleet, self._settings.namespace)
            (own if mine else others).append(pod)
        karpenter = self._client.select_if_allowed("NodePool") or ()
        unborn = count_unborn(nodes, karpenter, self._settings, self._catalog)
        self._grows = bool(unborn)
        return read_offers(nodes, others, own, unborn, self._settings, self._catalog)

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return every instance of a fleet that stands here, by handle."""
        return self._look(select_fleet(fleet), fleet)

    def start(self, order: StartOrder) -> InstanceStatus:
        """Apply an instance's objects; one that stands whole, or is on its way out, is returned as it is."""
        labels = order.labels
        refuse_old_term(labels.fleet, labels.term, self._newest_term(labels.fleet))
        name = workload_name(labels.fleet, labels.instance)
        status = self._find(name)
        # A controller may have died halfway through.
        if status is None or (status.unfinished and status.state != "draining"):
            try:
                self._apply(order)
            except DeployError as error:
                # What cannot be finished does not stay; where nobody answers, the next look decides.
                if error.kind != "unreachable":
                    self._end(name, labels.term)
                raise
            status = self._find(name)
        # A list may lack what was applied just now.
        if status is None and self._client.get("ConfigMap", name) is not None:
            status = InstanceStatus(
                name, labels, "starting", self._clock(), instance=order.instance
            )
        if status is None:
            raise DeployError(f"{labels.instance} was taken away while it started", kind="ended")
        return status

    def drain(self, handle: str, term: int) -> None:
        """Have an instance end: its pods withdraw, finish their streams within their grace, and go."""
        self._end(handle, term)

    def stop(self, handle: str, term: int) -> None:
        """End an instance now; its pods get a second, since a pod without any may still run."""
        self._end(handle, term)
        for pod in self._client.select("Pod", labels=select_instance(handle)):
            meta = pod["metadata"]
            self._client.delete("Pod", meta["name"], uid=meta["uid"], grace_s=STOP_GRACE_S)

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of every node, each under the name of its pod if there are several."""
        pods = self._client.select("Pod", labels=select_instance(handle))
        if not pods and self._client.get("ConfigMap", handle) is None:
            raise DeployError(f"no instance stands as {handle!r} here", kind="ended")
        names = sorted(pod["metadata"]["name"] for pod in pods)
        texts = {name: self._client.logs(name, lines) for name in names}
        if len(texts) == 1:
            return next(iter(texts.values()))
        return "\n".join(f"== {name}\n{text.rstrip()}" for name, text in texts.items())

    def dry_run(self, order: StartOrder) -> str:
        """Return what `start` would apply, as YAML; nothing is asked of the cluster."""
        return write_manifests(order, self._settings, self._catalog)

    def lease(self, fleet: str, holder: str, duration_s: int = 30) -> LeaseHolder:
        """Return the lease by which one controller of a fleet acts at a time."""
        return LeaseHolder(self._client, fleet, holder, duration_s)

    def hold_evictions(self, fleet: str, now_s: float | None) -> None:
        """Have evictions wait for a fleet's controller; None: it ends, and what is idle is not held any more.

        Where that may not be they pass, which is said once.
        """
        if self._guard is None:
            self._guard = EvictionGuard(self._client, self._settings, fleet)
        try:
            if now_s is None:
                self._guard.end()
            else:
                self._guard.renew(now_s)
        except DeployError as error:
            if error.kind != "unreachable":
                self._tell([f"evictions pass without asking: {error}"])

    def _apply(self, order: StartOrder) -> None:
        # All of it is rendered, and every secret read, before anything is applied.
        # One that a controller left halfway stays as it is: it cannot be changed, and pods refer to it.
        name = workload_name(order.labels.fleet, order.labels.instance)
        owner = self._client.get("ConfigMap", name)
        group = self._is_to_group(order) if owner is None else is_group(owner)
        anchor, *others = render_instance(
            order, self._settings, self._catalog, group=group, shares=self._find_shares()
        )
        secret = render_secret(order, self._settings)
        if owner is None:
            owner = self._client.apply(anchor)
        for manifest in (*([secret] if secret else ()), *others):
            self._client.apply(own(manifest, owner))

    def _find_shares(self) -> tuple[HostShare, ...]:
        """Return what machines have beside GPUs; nothing is known where nobody may look."""
        if self._shares is None:
            nodes = self._client.select_if_allowed("Node") or ()
            self._shares = read_shares(nodes, self._settings, self._catalog)
        return self._shares

    def _is_to_group(self, order: StartOrder) -> bool:
        """Whether the nodes of an instance become one set; DeployError where they should and cannot."""
        wish = self._settings.multi_node
        if len(order.commands) < 2 or wish == "stateful-sets":
            return False
        if wish == "auto":
            return why_no_group(order) is None and self._client.has(GROUP_KIND)
        if not self._client.has(GROUP_KIND):
            raise DeployError(
                f"the cluster has no {GROUP_KIND}",
                kind="settings",
                hint="install it, or set multi_node: auto",
            )
        return True

    def _end(self, handle: str, term: int) -> None:
        anchor = self._client.get("ConfigMap", handle)
        if anchor is None:
            return
        kind = _set_kind(anchor)
        listed = self._client.select(kind, labels=select_instance(handle))
        sets = self._complete(anchor, kind, listed)
        labels = self._read_whose(anchor, sets)
        if labels is None:
            raise DeployError(f"ConfigMap {handle} is not an instance of Atoll", kind="settings")
        refuse_old_term(labels.fleet, term, self._newest_term(labels.fleet))
        # The owner first: the cluster finishes it if nobody else does. The sets at once, because one that is
        # being deleted makes no new pods.
        if anchor["metadata"].get("deletionTimestamp") is None:
            self._client.delete("ConfigMap", handle, uid=anchor["metadata"]["uid"])
        for found in sets:
            meta = found["metadata"]
            if meta.get("deletionTimestamp") is None:
                self._client.delete(kind, meta["name"], uid=meta["uid"])
        # They have no owner where a person applied what a dry run wrote.
        for kind in UNOWNED_KINDS:
            self._client.delete(kind, handle)

    def _newest_term(self, fleet: str) -> int:
        """The term of the Lease, or of what stands: a controller may keep its lease elsewhere."""
        anchors = self._client.select("ConfigMap", labels=select_fleet(fleet))
        carried = [read_labels(each["metadata"].get("annotations") or {}) for each in anchors]
        terms = [each.term for each in carried if each is not None and each.fleet == fleet]
        return max(find_newest_term(self._client, fleet), *terms, 0)

    def _find(self, name: str) -> InstanceStatus | None:
        return next(iter(self._look(select_instance(name))), None)

    def _look(self, selector: str, fleet: str | None = None) -> tuple[InstanceStatus, ...]:
        anchors = self._client.select("ConfigMap", labels=selector)
        sets = _by_instance(self._client.select("StatefulSet", labels=selector))
        anchors += self._find_anchors(sets.keys() - {each["metadata"]["name"] for each in anchors})
        if not anchors:
            return ()
        if any(map(is_group, anchors)):
            groups = _by_instance(self._client.select(GROUP_KIND, labels=selector))
            # Sets that a group is made of are its own business.
            sets |= {each["metadata"]["name"]: [] for each in anchors if is_group(each)} | groups
        pods = _by_instance(self._client.select("Pod", labels=selector))
        now_s = self._clock()
        nodes = self._client.select_if_allowed("Node")
        machines = self._look_at(nodes, now_s)
        statuses = []
        warnings: dict[str, str] | None = None
        for anchor in sorted(anchors, key=lambda each: str(each["metadata"]["name"])):
            name = anchor["metadata"]["name"]
            own_sets = self._complete(anchor, _set_kind(anchor), sets[name])
            own_pods = self._complete(anchor, "Pod", pods[name])
            labels = self._read_whose(anchor, own_sets)
            if labels is None:
                self._tell([f"ConfigMap {name} has lost what says whose it is: it is left alone"])
            # A label holds a digest of a long name; the name itself decides.
            if labels is None or (fleet is not None and labels.fleet != fleet):
                continue
            if warnings is None and len(own_pods) < read_count(anchor):
                warnings = self._warnings()
            parts = WorkloadParts(anchor, labels, own_sets, own_pods, warnings or {})
            status = judge_instance(
                parts, self._settings, now_s, machines, self._starting.get(name)
            )
            statuses.append(status)
            # A pod that is evicted again and again begins anew each time; its instance does not.
            if status.state == "starting":
                self._starting.setdefault(name, status.since_s)
            elif status.state == "ready":
                self._starting.pop(name, None)
        return tuple(sorted(statuses, key=lambda status: status.handle))

    def _find_anchors(self, names: Iterable[str]) -> builtins.list[Json]:
        """Return ConfigMaps that selectors do not find, and of which sets say that they are there."""
        found = []
        for name in sorted(filter(None, names)):
            anchor = self._client.get("ConfigMap", name)
            if anchor is not None:
                self._tell_damage(anchor, name)
                found.append(anchor)
        return found

    def _complete(self, anchor: Json, kind: str, found: Sequence[Json]) -> Sequence[Json]:
        """Return the sets or pods of an instance, those too that have lost the labels they are found by."""
        handle, group = anchor["metadata"]["name"], is_group(anchor)
        if kind == "Pod":
            names = [name_pod(handle, index, group=group) for index in range(read_count(anchor))]
        else:
            names = [handle] if group else [f"{handle}-{i}" for i in range(read_count(anchor))]
        if len(found) >= len(names) or anchor["metadata"].get("deletionTimestamp") is not None:
            return found
        there = {each["metadata"]["name"] for each in found}
        more = []
        for name in names:
            if name in there:
                continue
            # Listed, not read: that is a right that the deployer needs anyway.
            for lost in self._client.select(kind, fields=f"metadata.name={name}"):
                self._tell_damage(lost, handle)
                more.append(lost)
        return (*found, *more)

    def _tell_damage(self, made: Json, name: str) -> None:
        # A list may also have been cut short.
        if not can_be_found(made, name):
            title = f"{made.get('kind', 'object')} {made['metadata']['name']}"
            self._tell([f"{title} has lost labels: it is known by its name, and left as it is"])

    def _read_whose(self, anchor: Json, sets: Sequence[Json]) -> Labels | None:
        """Return the labels of an instance, from its ConfigMap or its sets; None where none has them."""
        for each in (anchor, *sets):
            labels = read_labels(each["metadata"].get("annotations") or {})
            if labels is not None and workload_name(labels.fleet, labels.instance) == anchor[
                "metadata"
            ].get("name"):
                return labels
        return None

    def _look_at(self, nodes: Sequence[Json] | None, now_s: float) -> SeenMachines:
        """Return what is known of machines, and remember since when each is cordoned."""
        if nodes is None:
            return SeenMachines(grows=self._grows)
        since = {node["metadata"]["name"]: cordoned_s(node) for node in nodes if is_cordoned(node)}
        self._cordoned = {
            name: self._cordoned.get(name, now_s) if at_s is None else at_s
            for name, at_s in since.items()
        }
        well = frozenset(node["metadata"]["name"] for node in nodes if not is_lost(node))
        return SeenMachines(well, dict(self._cordoned), self._grows)

    def _tell(self, lines: Iterable[str]) -> None:
        """Say each line once."""
        for line in lines:
            if line not in self._told:
                self._told.add(line)
                sys.stderr.write(f"atoll: {line}\n")

    def _warnings(self) -> dict[str, str]:
        """Return why sets could not make their pods: it stands nowhere but in events."""
        events = self._client.select("Event", fields="reason=FailedCreate,type=Warning")
        # "Create Pod P in StatefulSet S failed error: pods "P" is forbidden: exceeded quota: ..."
        return {
            event["involvedObject"]["name"]: str(event.get("message", "")).rpartition(
                "failed error: "
            )[2]
            for event in events
        }


def _set_kind(anchor: Json) -> str:
    return GROUP_KIND if is_group(anchor) else "StatefulSet"


def _by_instance(objects: Sequence[Json]) -> defaultdict[str, builtins.list[Json]]:
    """Return objects by the instance they are labelled with; those without that label are nobody's yet."""
    found: defaultdict[str, builtins.list[Json]] = defaultdict(list)
    for each in objects:
        labels = each["metadata"].get("labels") or {}
        found[labels.get("app.kubernetes.io/instance", "")].append(each)
    return found
