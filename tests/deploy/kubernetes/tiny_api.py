"""A Kubernetes API in this process: what server-side apply, deletion and selectors promise, and no more.

Kept: fields belong to who applied them, another manager's different value is a conflict, fields left out go
unless somebody else has them too; every write has a new resourceVersion and a stale one is refused; labels
and names must be legal; deletion in the foreground waits for what is owned, a pod for its grace; an eviction
waits for budgets. `step` does what controllers do: it makes the pods of sets, ends Jobs that are past their
deadline (none has pods), collects garbage, and gives pods to machines. What a machine that died was asked to
end stays until somebody takes the machine away.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from atoll.deploy.kubernetes.kube_client import HttpAnswer
from atoll.deploy.kubernetes.kube_lease import read_time_s, write_time
from tests.deploy.kubernetes.tiny_machines import choose_machine, may_evict

Json = dict[str, Any]
Path = tuple[str, ...]

KINDS = {
    "configmaps": ("v1", "ConfigMap"),
    "events": ("v1", "Event"),
    "fleets": ("atoll-serving.github.io/v1alpha1", "Fleet"),
    "jobs": ("batch/v1", "Job"),
    "leaderworkersets": ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    "leases": ("coordination.k8s.io/v1", "Lease"),
    "nodepools": ("karpenter.sh/v1", "NodePool"),
    "nodes": ("v1", "Node"),
    "pods": ("v1", "Pod"),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget"),
    "secrets": ("v1", "Secret"),
    "services": ("v1", "Service"),
    "statefulsets": ("apps/v1", "StatefulSet"),
}
PLURALS = {kind: plural for plural, (_, kind) in KINDS.items()}
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[a-z0-9.-]+/v1(?:alpha1)?))(?:/namespaces/(?P<space>[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>log|status|binding|eviction))?"
)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_KEYED = {"ownerReferences": "uid", "containers": "name", "env": "name", "volumes": "name"}
_FOREGROUND = "foregroundDeletion"


class RefusedError(Exception):
    """An answer that is not what was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TinyApi:
    """Objects by plural, namespace and name; a `KubeTransport`."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.logs: dict[str, str] = {}
        self.rules: list[Json] | None = None
        self.used: set[tuple[str, str, bool]] = set()
        self.max_pods: int | None = None
        self.asked: list[tuple[str, str]] = []
        self.fail_after: int | None = None
        self.dead: set[str] = set()
        # APIs that the cluster does not have.
        self.absent = {"leaderworkerset.x-k8s.io/v1"}
        self._groups: dict[str, set[str]] = {}
        self._version = 0
        self._uid = 0

    # -- the server

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> HttpAnswer:
        self.asked.append((method, path))
        if self.fail_after is not None and method != "GET":
            if self.fail_after == 0:
                raise ControllerDiedError
            self.fail_after -= 1
        try:
            said = self._answer(method, path, query, json.loads(body) if body else {}, content_type)
        except RefusedError as error:
            status = {"kind": "Status", "code": error.status, "message": str(error)}
            return HttpAnswer(error.status, json.dumps(status).encode())
        return HttpAnswer(
            200, said.encode() if isinstance(said, str) else json.dumps(said).encode()
        )

    def _answer(
        self, method: str, path: str, query: Mapping[str, str], body: Json, content_type: str
    ) -> Json | str:
        groups = {version for version, _ in KINDS.values() if version not in self.absent}
        if path.removeprefix("/apis/") in groups:
            return {"kind": "APIResourceList"}
        match = _PATH.fullmatch(path)
        if match is None or match["plural"] not in KINDS:
            raise RefusedError(404, "the server could not find the requested resource")
        plural, space, name = match["plural"], match["space"] or "", unquote(match["name"] or "")
        version = match["core"] or match["group"]
        if KINDS[plural][0] != version or version in self.absent:
            raise RefusedError(404, "the server could not find the requested resource")
        key = (plural, space, name)
        self._authorize(method, plural, match["sub"], space, bool(name))
        if match["sub"] is not None:
            return self._subresource(method, key, match["sub"], query, body)
        if method == "GET":
            return copy.deepcopy(self._at(key)) if name else self._list(plural, space, query)
        if method == "POST":
            return self._create((plural, space, body["metadata"]["name"]), body)
        if method == "PUT":
            return self._replace(key, body)
        if method == "DELETE":
            return self._delete(key, body)
        assert method == "PATCH"
        if content_type != "application/apply-patch+yaml":
            raise RefusedError(415, "the body of the request was in an unknown format")
        return self._apply(key, body, query)

    def _authorize(self, method: str, plural: str, sub: str | None, space: str, one: bool) -> None:
        verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        verb = verbs.get(method, "get" if one else "list")
        self._allow(verb, f"{plural}/{sub}" if sub else plural, KINDS[plural][0], space)

    def _allow(self, verb: str, resource: str, version: str, space: str) -> None:
        if self.rules is None:
            return
        group = version.rpartition("/")[0]
        for rule in self.rules:
            allowed = rule["verbs"], rule["resources"], rule["apiGroups"]
            named = verb in allowed[0] and resource in allowed[1] and group in allowed[2]
            if named and bool(space) != rule.get("everywhere", False):
                self.used.add((verb, resource, not space))
                return
        raise RefusedError(
            403, f'User "x" cannot {verb} resource "{resource}" in API group "{group}"'
        )

    def _at(self, key: tuple[str, str, str]) -> Json:
        if key not in self.objects:
            raise RefusedError(404, f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def _list(self, plural: str, space: str, query: Mapping[str, str]) -> Json:
        items = [
            item
            for (kind, within, _), item in sorted(self.objects.items())
            if kind == plural and (not space or within == space)
            if fits(item["metadata"].get("labels") or {}, query.get("labelSelector", ""))
            if fits(_fields(item), query.get("fieldSelector", ""))
        ]
        first, limit = int(query.get("continue", 0)), int(query.get("limit", 10**9))
        page, more = items[first : first + limit], first + limit < len(items)
        meta = {"continue": str(first + limit)} if more else {}
        return {"kind": "List", "metadata": meta, "items": copy.deepcopy(page)}

    def _create(self, key: tuple[str, str, str], body: Json) -> Json:
        if key in self.objects:
            raise RefusedError(409, f'{key[0]} "{key[2]}" already exists')
        made = copy.deepcopy(body)
        made["apiVersion"], made["kind"] = KINDS[key[0]]
        self._uid += 1
        meta = made["metadata"]
        meta |= {"uid": f"uid-{self._uid}", "creationTimestamp": write_time(self.now_s)}
        return self._store(key, made)

    def _store(self, key: tuple[str, str, str], made: Json) -> Json:
        _validate(made)
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = made
        return copy.deepcopy(made)

    def _replace(self, key: tuple[str, str, str], body: Json) -> Json:
        there = self._at(key)
        version = body["metadata"].get("resourceVersion")
        if version is not None and version != there["metadata"]["resourceVersion"]:
            raise RefusedError(
                409, "the object has been modified; please apply your changes to the latest"
            )
        kept = {"uid": there["metadata"]["uid"]}
        kept["creationTimestamp"] = there["metadata"]["creationTimestamp"]
        return self._store(key, {**body, "metadata": {**body["metadata"], **kept}})

    def _apply(self, key: tuple[str, str, str], body: Json, query: Mapping[str, str]) -> Json:
        manager = query.get("fieldManager")
        if not manager:
            raise RefusedError(400, "fieldManager is required for apply patch")
        if (body["apiVersion"], body["kind"]) != KINDS[key[0]] or body["metadata"]["name"] != key[
            2
        ]:
            raise RefusedError(400, "the object does not match the URL")
        wanted = dict(leaves(body))
        there = self.objects.get(key)
        if there is None:
            # To apply what is not there yet takes both rights.
            self._allow("create", key[0], KINDS[key[0]][0], key[1])
            self._create(key, body)
            self.objects[key]["metadata"]["managedFields"] = own_fields({}, manager, wanted)
            return copy.deepcopy(self.objects[key])
        owners: dict[str, list[Path]] = {
            entry["manager"]: [tuple(path) for path in entry["fields"]]
            for entry in there["metadata"].get("managedFields", ())
        }
        have = dict(leaves(there))
        for other, paths in owners.items():
            for path in paths:
                clash = path in wanted and have.get(path) != wanted[path]
                if other != manager and clash and query.get("force") != "true":
                    field = "." + ".".join(path)
                    raise RefusedError(409, f'Apply failed with 1 conflict: "{other}" owns {field}')
        others = {path for other, paths in owners.items() if other != manager for path in paths}
        for path in set(owners.get(manager, ())) - set(wanted) - others:
            have.pop(path, None)
        made = build({**have, **wanted})
        if _spec_of(there) != _spec_of(made):
            raise RefusedError(422, f"{key[2]}: updates to immutable fields are forbidden")
        if made == build(have) and have == dict(leaves(there)):
            return copy.deepcopy(there)
        made["metadata"]["managedFields"] = own_fields(owners, manager, wanted)
        return self._store(key, made)

    def edit(self, kind: str, name: str, path: Path, value: object, manager: str) -> None:
        """Set a field as somebody else would, with `kubectl edit`."""
        there = self.objects[PLURALS[kind], "default", name]
        managed = there["metadata"].setdefault("managedFields", [])
        managed.append({"manager": manager, "fields": [list(path)]})
        target = there
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = value

    def _delete(self, key: tuple[str, str, str], options: Json) -> Json:
        there = self._at(key)
        meta = there["metadata"]
        wanted = options.get("preconditions", {}).get("uid")
        if wanted is not None and wanted != meta["uid"]:
            raise RefusedError(409, "Precondition failed: UID in precondition")
        if key[0] == "pods":
            grace_s = there["spec"].get("terminationGracePeriodSeconds", 30)
            grace_s = options.get("gracePeriodSeconds", grace_s)
            if grace_s == 0 or not there["spec"].get("nodeName"):
                return self.objects.pop(key)
            left_s = meta.get("deletionGracePeriodSeconds")
            if left_s is None or grace_s < left_s:
                meta["deletionTimestamp"] = write_time(self.now_s + grace_s)
                meta["deletionGracePeriodSeconds"] = grace_s
        elif options.get("propagationPolicy") == "Foreground":
            meta.setdefault("deletionTimestamp", write_time(self.now_s))
            meta["finalizers"] = [_FOREGROUND]
        else:
            return self.objects.pop(key)
        return self._store(key, there)

    def _subresource(
        self,
        method: str,
        key: tuple[str, str, str],
        sub: str,
        query: Mapping[str, str],
        body: Json,
    ) -> Json | str:
        there = self._at(key)
        if sub == "log":
            if key[2] not in self.logs:
                raise RefusedError(400, "container is waiting to start")
            lines = self.logs[key[2]].splitlines()[-int(query["tailLines"]) :]
            return "\n".join(lines)
        if sub == "eviction":
            budgets = [
                made for (_, space, _), made in self.of("poddisruptionbudgets") if space == key[1]
            ]
            if not may_evict(there, budgets, [pod for _, pod in self.of("pods")]):
                raise RefusedError(
                    429, "Cannot evict pod as it would violate the disruption budget"
                )
            return self._delete(key, {})
        if sub == "binding":
            there["spec"]["nodeName"] = body["target"]["name"]
        else:
            there["status"] = {**there.get("status", {}), **body["status"]}
        return self._store(key, there)

    # -- the controllers

    def step(self) -> None:
        """Make pods, collect garbage and give pods to machines, until nothing changes."""
        before = (-1, -1)
        while before != (self._version, len(self.objects)):
            before = (self._version, len(self.objects))
            self._make_pods()
            self._make_groups()
            self._end_jobs()
            self._collect()
            self._schedule()

    def advance(self, by_s: float) -> None:
        """Let time pass: pods whose grace is over are killed."""
        self.now_s += by_s
        for key, pod in self._alive_pods():
            ends = pod["metadata"].get("deletionTimestamp")
            if ends is not None and ends <= write_time(self.now_s):
                del self.objects[key]
        self.step()

    def of(self, plural: str) -> Iterator[tuple[tuple[str, str, str], Json]]:
        yield from sorted((key, made) for key, made in self.objects.items() if key[0] == plural)

    def add_node(self, name: str, labels: Mapping[str, str], gpus: int, **spec: object) -> None:
        status = {
            "allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        meta = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
        self._create(("nodes", "", name), {"metadata": meta, "spec": spec, "status": status})

    def set_status(self, pod: str, **status: object) -> None:
        key = ("pods", "default", pod)
        there = self._at(key)
        there["status"] = {**there.get("status", {}), **status}
        self._store(key, there)

    def make_ready(self) -> None:
        """Have every pod that has a machine be ready."""
        for key, pod in self._alive_pods():
            if pod["spec"].get("nodeName"):
                at = write_time(self.now_s)
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": at}
                self.set_status(key[2], phase="Running", conditions=[ready])

    def end_pods(self) -> None:
        """Have pods that were asked to go be gone: their streams have ended."""
        for key, pod in self._alive_pods():
            if pod["metadata"].get("deletionTimestamp"):
                del self.objects[key]
        self.step()

    def lose_machine(self, name: str) -> None:
        """Have a machine die: its pods are not ready, for which no reason is given."""
        self.dead.add(name)
        at = write_time(self.now_s)
        (ready,) = self.objects["nodes", "", name]["status"]["conditions"]
        ready |= {"status": "Unknown", "reason": "NodeStatusUnknown", "lastTransitionTime": at}
        for key, pod in self.of("pods"):
            if pod["spec"].get("nodeName") == name:
                lost = {"type": "Ready", "status": "False", "lastTransitionTime": at}
                self.set_status(key[2], conditions=[lost])

    def remove_machine(self, name: str) -> None:
        """Have a machine be taken out of the cluster, and its pods with it."""
        del self.objects["nodes", "", name]
        for key, pod in list(self.of("pods")):
            if pod["spec"].get("nodeName") == name:
                del self.objects[key]
        self.step()

    def cordon(self, name: str) -> None:
        """Have nothing new be put on a machine; it says since when."""
        node = self.objects["nodes", "", name]
        node["spec"]["unschedulable"] = True
        changed: Json = {"f:spec": {"f:unschedulable": {}}}
        node["metadata"]["managedFields"] = [
            {"manager": "kubectl", "time": write_time(self.now_s), "fieldsV1": changed}
        ]

    def _alive_pods(self) -> list[tuple[tuple[str, str, str], Json]]:
        return [
            (k, pod) for k, pod in self.of("pods") if pod["spec"].get("nodeName") not in self.dead
        ]

    def _make_groups(self) -> None:
        """Make the pods of groups; where one of them is gone, all come anew."""
        for (_, space, name), made in list(self.of("leaderworkersets")):
            if "deletionTimestamp" in made["metadata"]:
                continue
            spec = made["spec"]["leaderWorkerTemplate"]
            names = [f"{name}-0", *(f"{name}-0-{index}" for index in range(1, spec["size"]))]
            there = {
                pod: self.objects["pods", space, pod]["metadata"]["uid"]
                for pod in names
                if ("pods", space, pod) in self.objects
            }
            known = self._groups.setdefault(name, set())
            if known and set(there.values()) != known:
                for pod in there:
                    del self.objects["pods", space, pod]
                known.clear()
            if not known:
                owner = {"kind": "StatefulSet", "name": name, "uid": made["metadata"]["uid"]}
                for pod in names:
                    kind = "workerTemplate" if pod != names[0] else "leaderTemplate"
                    template = copy.deepcopy(spec[kind])
                    meta = {**template["metadata"], "name": pod, "namespace": space}
                    meta["ownerReferences"] = [{**owner, "blockOwnerDeletion": True}]
                    made_pod = {"metadata": meta, "spec": template["spec"], "status": {}}
                    known.add(self._create(("pods", space, pod), made_pod)["metadata"]["uid"])

    def _end_jobs(self) -> None:
        """Take note of Jobs, and take those away that have run for long enough."""
        for key, job in list(self.of("jobs")):
            start = job.setdefault("status", {}).setdefault("startTime", write_time(self.now_s))
            if self.now_s > read_time_s(start) + job["spec"]["activeDeadlineSeconds"]:
                del self.objects[key]

    def _make_pods(self) -> None:
        for (_, space, name), made in list(self.of("statefulsets")):
            key = ("pods", space, f"{name}-0")
            wanted = made["spec"]["replicas"] > 0 and "deletionTimestamp" not in made["metadata"]
            if not wanted or key in self.objects:
                continue
            if self.max_pods is not None and sum(1 for _ in self.of("pods")) >= self.max_pods:
                event = f"{name}.failed"
                message = f'pods "{name}-0" is forbidden: exceeded quota: team, used: pods=1'
                self.objects["events", space, event] = {
                    "metadata": {"name": event},
                    "involvedObject": {"kind": "StatefulSet", "name": name},
                    "reason": "FailedCreate",
                    "type": "Warning",
                    "message": message,
                }
                continue
            template = copy.deepcopy(made["spec"]["template"])
            meta = {**template["metadata"], "name": key[2], "namespace": space}
            meta["labels"]["controller-revision-hash"] = f"{name}-0123456789"
            owner = {"kind": "StatefulSet", "name": name, "uid": made["metadata"]["uid"]}
            meta["ownerReferences"] = [{**owner, "blockOwnerDeletion": True}]
            self._create(key, {"metadata": meta, "spec": template["spec"], "status": {}})

    def _collect(self) -> None:
        alive = {
            made["metadata"]["uid"]: made
            for made in self.objects.values()
            if "uid" in made["metadata"]
        }
        waited: set[str] = set()
        for key, made in list(self.objects.items()):
            owners = made["metadata"].get("ownerReferences") or ()
            going = [o for o in owners if _is_going(alive.get(o["uid"]))]
            asked = "deletionTimestamp" in made["metadata"]
            if owners and len(going) == len(owners) and not asked:
                self._delete(key, {"propagationPolicy": "Foreground"})
            waited |= {
                o["uid"] for o in owners if o.get("blockOwnerDeletion") and key in self.objects
            }
        for key, made in list(self.objects.items()):
            meta = made["metadata"]
            if _FOREGROUND in meta.get("finalizers", ()) and meta["uid"] not in waited:
                del self.objects[key]

    def _schedule(self) -> None:
        for key, pod in list(self.of("pods")):
            if pod["spec"].get("nodeName"):
                continue
            nodes = [node for _, node in self.of("nodes")]
            name = choose_machine(pod, nodes, [other for _, other in self.of("pods")])
            if name is not None:
                pod["spec"]["nodeName"] = name
                self._store(key, pod)
            else:
                message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
                cause = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                cause |= {"message": message, "lastTransitionTime": write_time(self.now_s)}
                if not pod["status"].get("conditions"):
                    self.set_status(key[2], phase="Pending", conditions=[cause])


class ControllerDiedError(Exception):
    """Whoever was asking is no more."""


def fits(values: Mapping[str, Any], selector: str) -> bool:
    for term in filter(None, selector.split(",")):
        name, _, value = term.partition("=")
        if values.get(name) != value:
            return False
    return True


def _fields(item: Json) -> Json:
    return {**item, "metadata.name": item["metadata"]["name"]}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the fields that have owners: lists are whole but for those that Kubernetes merges by a key."""
    if path and path[-1] in _KEYED and isinstance(value, list):
        value = {f"\0{item[_KEYED[path[-1]]]}": item for item in value}
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if (*path, key) != ("metadata", "managedFields"):
                yield from leaves(item, (*path, key))
    else:
        yield path, copy.deepcopy(value)


def build(fields: Mapping[Path, Any]) -> Json:
    made: Json = {}
    for path, value in fields.items():
        target = made
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = value
    listed = _as_lists(made)
    assert isinstance(listed, dict)
    return listed


def _as_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _as_lists(item) for key, item in value.items()}
    if inner and all(key.startswith("\0") for key in inner):
        return list(inner.values())
    return inner


def own_fields(
    owners: Mapping[str, list[Path]], manager: str, wanted: Mapping[Path, Any]
) -> list[Json]:
    new = {**owners, manager: list(wanted)}
    return [{"manager": who, "fields": [list(p) for p in new[who]]} for who in sorted(new)]


def _validate(made: Json) -> None:
    meta = made["metadata"]
    if not _NAME.fullmatch(meta["name"]) or (
        made["kind"] in ("Service", "StatefulSet", "Pod") and len(meta["name"]) > 63
    ):
        raise RefusedError(422, f"metadata.name: Invalid value: {meta['name']}")
    for value in (meta.get("labels") or {}).values():
        if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            raise RefusedError(422, f"metadata.labels: Invalid value: {value!r}")


def _spec_of(made: Json) -> object:
    """What may not change once it is there."""
    if made["kind"] in ("ConfigMap", "Secret") and made.get("immutable"):
        return made.get("data")
    spec = made.get("spec", {})
    return (
        (spec.get("selector"), spec.get("serviceName")) if made["kind"] == "StatefulSet" else None
    )


def _is_going(owner: Json | None) -> bool:
    return owner is None or "deletionTimestamp" in owner["metadata"]
