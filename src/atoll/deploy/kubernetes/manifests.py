"""An instance as Kubernetes objects: plain dicts, and the same ones for the same order.

Every node of an instance is a StatefulSet of one pod, also where there is only one. Nodes differ in what they
run, in GPUs and in the machines they may stand on, and a pod template says all three, so pods of one set
could not differ; where all but the first are alike they may be one LeaderWorkerSet (`worker_group`). A
Deployment would start a second pod while the first, on a machine that does not answer, may still hold its
requests; a StatefulSet starts no second, and gives its pod a name by which the others of a pipeline find it.
Everything hangs on one ConfigMap, so that one deletion ends an instance.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.core.ids import parse_node_type
from atoll.deploy.kubernetes import kube_machines as machines
from atoll.deploy.kubernetes import worker_group
from atoll.deploy.kubernetes.gpu_labels import COUNT, PARTITIONED, SHARED, GpuRule, list_rules
from atoll.deploy.kubernetes.host_shares import HostShare, ask_host
from atoll.deploy.kubernetes.kube_settings import VARIABLE, KubernetesSettings
from atoll.deploy.kubernetes.labels import (
    DOMAIN,
    FULL,
    MANAGER,
    NODE,
    object_labels,
    workload_name,
)
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import DeployError, StartOrder
from atoll.plan.plan import Node

READY_S = f"{DOMAIN}/ready-s"
INSTANCE = "instance"
"""Name of the object that lists an instance's parts, for a controller that knows only the cluster."""
PORT = 8000
SECRETS = "/run/secrets/atoll"
_WEIGHTS = "/var/cache/atoll"
COMPILED = "/var/cache/atoll-compiled"
_SCRATCH = "/tmp"
_PERIOD_S = 5
# From the end of the time to drain to the kubelet's SIGKILL.
_GRACE_MORE_S = 30
_SECRET_BYTES = 1 << 16
# The kubelet sends its own SIGTERM when this has ended: a second one while streams run would cut them.
_DRAIN = (
    'kill -TERM "${ATOLL_PID:-1}"; while kill -0 "${ATOLL_PID:-1}" 2>/dev/null; do sleep 1; done'
)
# Engines that listen on loopback answer this; the kubelet's own request would not reach them.
_LOOK = (
    "import http.client as h, os, sys; "
    "c = h.HTTPConnection('127.0.0.1', int(os.environ['ATOLL_PORT']), timeout=4); "
    "c.request('GET', '/health'); s = c.getresponse().status; sys.exit(s >= 400 and s != 404)"
)

Manifest = dict[str, Any]


def render_instance(
    order: StartOrder,
    settings: KubernetesSettings,
    catalog: Catalog,
    *,
    group: bool = False,
    shares: Sequence[HostShare] = (),
) -> tuple[Manifest, ...]:
    """Return an instance's objects, in the order in which they are applied: the ConfigMap owns the others.

    Secrets are referred to and not among them (`render_secret`). With `group` its nodes are one
    LeaderWorkerSet, which makes names for its pods by itself. `shares` is what machines have beside GPUs.
    """
    _check(order)
    order.refuse_shares("Kubernetes")
    name = workload_name(order.labels.fleet, order.labels.instance)
    if group:
        return (
            _config_map(order, name, settings, group=True),
            _group(order, name, settings, catalog, shares),
        )
    several = len(order.commands) > 1
    sets = (
        _stateful_set(order, index, name, settings, catalog, shares)
        for index in range(len(order.commands))
    )
    return (
        _config_map(order, name, settings),
        *((_service(order, name, settings),) if several else ()),
        *sets,
    )


def render_secret(order: StartOrder, settings: KubernetesSettings) -> Manifest | None:
    """Return the Secret of what an order's files hold; None if Secrets hold all of it already."""
    files = _own_secrets(order, settings)
    if not files:
        return None
    name = workload_name(order.labels.fleet, order.labels.instance)
    data = {
        key: base64.b64encode(_read_secret(key, path)).decode()
        for key, path in sorted(files.items())
    }
    return {
        **_head("v1", "Secret", name, order, settings),
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }


def write_manifests(order: StartOrder, settings: KubernetesSettings, catalog: Catalog) -> str:
    """Return an instance's objects as one YAML text; secrets are named, not shown."""
    group = settings.multi_node == "leader-worker-set" and len(order.commands) > 1
    objects = render_instance(order, settings, catalog, group=group)
    text = yaml.safe_dump_all(objects, sort_keys=False, width=110)
    files = _own_secrets(order, settings)
    if not files:
        return text
    name = objects[0]["metadata"]["name"]
    return f"# Needs the Secret {name} with {', '.join(sorted(files))}; starting makes it.\n{text}"


def own(manifest: Manifest, owner: Mapping[str, Any]) -> Manifest:
    """Return an object that goes when its owner does, and without which the owner is not gone."""
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "blockOwnerDeletion": True,
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def _head(
    version: str, kind: str, name: str, order: StartOrder, settings: KubernetesSettings
) -> Manifest:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": object_labels(order.labels),
            "annotations": {FULL: order.labels.to_json(), READY_S: str(order.ready_s)},
        },
    }


def _config_map(
    order: StartOrder, name: str, settings: KubernetesSettings, *, group: bool = False
) -> Manifest:
    data = {
        f"{index}.{variable}": value
        for index, command in enumerate(order.commands)
        for variable, value in sorted(command.env)
    }
    return {
        **_head("v1", "ConfigMap", name, order, settings),
        "immutable": True,
        "data": {
            "nodes": str(len(order.commands)),
            **({worker_group.LAYOUT: worker_group.GROUP} if group else {}),
            INSTANCE: order.instance.to_json(),
            **data,
        },
    }


def _service(order: StartOrder, name: str, settings: KubernetesSettings) -> Manifest:
    """Names for the pods of a pipeline, also before they are ready: that takes all of them."""
    return {
        **_head("v1", "Service", name, order, settings),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": name},
        },
    }


def _stateful_set(
    order: StartOrder,
    index: int,
    name: str,
    settings: KubernetesSettings,
    catalog: Catalog,
    shares: Sequence[HostShare],
) -> Manifest:
    head = _head("apps/v1", "StatefulSet", f"{name}-{index}", order, settings)
    labels = {**head["metadata"]["labels"], NODE: str(index)}
    head["metadata"]["labels"] = labels
    return {
        **head,
        "spec": {
            "replicas": 1,
            "serviceName": name,
            "selector": {"matchLabels": {"app.kubernetes.io/instance": name, NODE: str(index)}},
            "template": _template(order, index, name, settings, catalog, shares),
        },
    }


def _template(
    order: StartOrder,
    index: int,
    name: str,
    settings: KubernetesSettings,
    catalog: Catalog,
    shares: Sequence[HostShare],
) -> Manifest:
    meta = _head("v1", "Pod", name, order, settings)["metadata"]
    return {
        "metadata": {
            "labels": {**meta["labels"], NODE: str(index)},
            "annotations": {**settings.annotations, **meta["annotations"]},
        },
        "spec": _pod(order, index, name, settings, catalog, shares),
    }


def _group(
    order: StartOrder,
    name: str,
    settings: KubernetesSettings,
    catalog: Catalog,
    shares: Sequence[HostShare],
) -> Manifest:
    why = worker_group.why_no_group(order)
    if why is not None:
        raise DeployError(
            f"{order.labels.instance} cannot be a {worker_group.KIND}: {why}",
            kind="settings",
            hint="set multi_node: auto, or stateful-sets",
        )
    leader, worker = (_template(order, index, name, settings, catalog, shares) for index in (0, 1))
    command = worker_group.choose_by_index(order)
    if command is not None:
        worker["spec"]["containers"][0]["command"] = command
    head = _head(worker_group.API, worker_group.KIND, name, order, settings)
    return worker_group.render_group(head, (leader, worker), len(order.commands))


def _pod(
    order: StartOrder,
    index: int,
    name: str,
    settings: KubernetesSettings,
    catalog: Catalog,
    shares: Sequence[HostShare],
) -> Manifest:
    command = order.commands[index]
    volumes, mounts = _volumes(command, name, settings)
    gpus: Manifest = {machines.GPU: command.gpus} if command.gpus else {}
    # What is limited and not asked for is asked for in full, as Kubernetes has it.
    asked = ask_host(parse_node_type(command.node_type)[0], command.gpus, shares, settings, catalog)
    resources = {kind: {**asked[kind], **gpus} for kind in ("limits", "requests")}
    listens = any("{port}" in word for word in command.argv)
    container: Manifest = {
        "name": "engine",
        "image": settings.images.get(order.labels.service, settings.image),
        "command": [_expand(word) for word in command.argv],
        "env": _env(order, index, name, settings),
        "resources": {kind: given for kind, given in resources.items() if given},
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", _DRAIN]}}},
        # Where it leaves no message, the end of its log says why it ended.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            **({"readOnlyRootFilesystem": True} if settings.read_only_root else {}),
        },
        "volumeMounts": mounts,
    }
    if listens:
        container["ports"] = [{"name": "http", "containerPort": PORT}]
        container |= _probes(order, settings)
    own_user = {"runAsNonRoot": True, "runAsUser": settings.user} if settings.user else {}
    return {
        "automountServiceAccountToken": False,
        # Else every Service of the namespace would add variables to the environment.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.drain_s + _GRACE_MORE_S,
        "securityContext": {
            **own_user,
            "fsGroup": settings.user or 1000,
            # Not every file of a volume full of weights, every time.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **(
            {"imagePullSecrets": [{"name": secret} for secret in settings.image_pull_secrets]}
            if settings.image_pull_secrets
            else {}
        ),
        **_scheduling(order, command, settings, catalog),
        **({"priorityClassName": settings.priority_class} if settings.priority_class else {}),
        **({"runtimeClassName": settings.runtime_class} if settings.runtime_class else {}),
        **({"nodeSelector": settings.node_selector} if settings.node_selector else {}),
        "containers": [container, *settings.sidecars],
        "volumes": volumes,
    }


def _probes(order: StartOrder, settings: KubernetesSettings) -> Manifest:
    """Starting may take long, being unwell may not; `atoll join` starts a sick engine anew by itself."""
    look: Manifest = (
        {"exec": {"command": ["python3", "-c", _LOOK]}}
        if settings.probe == "exec"
        else {"httpGet": {"path": "/health", "port": "http"}}
    )
    every: Manifest = {"periodSeconds": _PERIOD_S, "timeoutSeconds": _PERIOD_S}
    # Rounded up: no less time than the order gives.
    tries = max(1, -int(-order.ready_s // _PERIOD_S))
    return {
        "startupProbe": {**look, **every, "failureThreshold": tries},
        # Twice: `atoll join` looks more often than this, so by then gateways have heard of it.
        "readinessProbe": {**look, **every, "successThreshold": 2, "failureThreshold": 3},
    }


def _env(order: StartOrder, index: int, name: str, settings: KubernetesSettings) -> list[Manifest]:
    command = order.commands[index]
    given: dict[str, Manifest] = {
        variable: {"valueFrom": {"configMapKeyRef": {"name": name, "key": f"{index}.{variable}"}}}
        for variable, _ in command.env
    }
    for variable, _ in command.secrets:
        given[variable] = {"value": f"{SECRETS}/{variable}"}
    given.setdefault("ATOLL_PORT", {"value": str(PORT)})
    # Where the other nodes of the instance reach this one.
    given.setdefault("ATOLL_ADDRESS", {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    if settings.weights_claim or settings.weights_path:
        given.setdefault("HF_HOME", {"value": _WEIGHTS})
    if settings.read_only_root:
        given.setdefault("HOME", {"value": _SCRATCH})
    for variable, value in settings.env.items():
        given.setdefault(variable, {"value": value})
    return [{"name": variable, **given[variable]} for variable in sorted(given)]


def _volumes(
    command: NodeCommand, name: str, settings: KubernetesSettings
) -> tuple[list[Manifest], list[Manifest]]:
    memory = {"medium": "Memory", "sizeLimit": settings.shared_memory}
    volumes: list[Manifest] = [{"name": "shared-memory", "emptyDir": memory}]
    mounts: list[Manifest] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if command.secrets:
        sources = [
            {"secret": {"name": secret, "items": [{"key": key, "path": variable}]}}
            for variable, secret, key in _references(command, name, settings)
        ]
        # Group-readable: the files are root's, and the pod's group is `fsGroup`.
        projected = {"defaultMode": 0o440, "sources": sources}
        volumes.append({"name": "secrets", "projected": projected})
        mounts.append({"name": "secrets", "mountPath": SECRETS, "readOnly": True})
    if settings.read_only_root:
        volumes.append({"name": "scratch", "emptyDir": {}})
        mounts.append({"name": "scratch", "mountPath": _SCRATCH})
    kept = (
        ("weights", settings.weights_claim, settings.weights_path, _WEIGHTS),
        ("compiled", settings.compile_cache_claim, settings.compile_cache_path, COMPILED),
    )
    for called, claim, path, where in kept:
        if claim:
            volumes.append({"name": called, "persistentVolumeClaim": {"claimName": claim}})
        elif path:
            folder = {"path": path, "type": "DirectoryOrCreate"}
            volumes.append({"name": called, "hostPath": folder})
        if claim or path:
            mounts.append({"name": called, "mountPath": where})
    return volumes, mounts


def _scheduling(
    order: StartOrder, command: NodeCommand, settings: KubernetesSettings, catalog: Catalog
) -> Manifest:
    """Say which machines a node may stand on: those with its GPU, in its region, of its market."""
    aside = [_rule(rule.key, rule.operator, *rule.values) for rule in settings.node_affinity]
    if order.avoid_hosts:
        aside.append(_rule(machines.HOST, "NotIn", *sorted(order.avoid_hosts)))
    if not command.gpus:
        given = {"tolerations": list(settings.tolerations)} if settings.tolerations else {}
        return {**(_require([{"matchExpressions": aside}]) if aside else {}), **given}
    node = _planned(order, command)
    gpu, count = parse_node_type(command.node_type)
    base = [*aside, *(_rule(key, "NotIn", *values) for key, values in SHARED)]
    base.append(_rule(PARTITIONED, "DoesNotExist"))
    if node is not None and node.host is not None:
        base.append(_rule(machines.HOST, "In", node.host))
    region = order.instance.region if node is None else order.instance.region_of(node)
    places = [[_rule(machines.REGION, "In", *machines.region_labels(region, settings))]]
    # Machines without a label of their region are in the one of the settings.
    if region == settings.region:
        places.append([_rule(machines.REGION, "DoesNotExist")])
    spot = node is not None and node.market == "spot"
    # Clouds mark spot machines each in its own way: one of the marks makes it spot, none of them not.
    if spot:
        markets = [[_rule(key, "In", value)] for key, value in machines.SPOT]
    else:
        markets = [[_rule(key, "NotIn", value) for key, value in machines.SPOT]]
    terms = [
        {"matchExpressions": [*kind, *base, *place, *market]}
        for kind in map(_have, _gpu_rules(gpu, settings, catalog))
        for place in places
        for market in markets
    ]
    # A machine of that many GPUs first, so that small instances do not break up large machines.
    liked = {
        "weight": 100,
        "preference": {"matchExpressions": [_rule(COUNT, "In", str(count))]},
    }
    keys = [machines.GPU, *((key for key, _ in machines.SPOT) if spot else ())]
    found = _require(terms, [liked])
    # Then beside others of ours: whole machines stay free for who needs one.
    found["affinity"]["podAffinity"] = {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 50,
                "podAffinityTerm": {
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/managed-by": MANAGER}},
                    "topologyKey": machines.HOST,
                },
            }
        ]
    }
    tolerated = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]
    return {**found, "tolerations": [*tolerated, *settings.tolerations]}


def _require(terms: list[Manifest], liked: list[Manifest] | None = None) -> Manifest:
    rules: Manifest = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
    }
    if liked:
        rules["preferredDuringSchedulingIgnoredDuringExecution"] = liked
    return {"affinity": {"nodeAffinity": rules}}


def _gpu_rules(gpu: str, settings: KubernetesSettings, catalog: Catalog) -> tuple[GpuRule, ...]:
    rules = list_rules(gpu, catalog, settings.gpu_names)
    if not rules:
        raise DeployError(
            f"pods ask for {machines.GPU}, and {gpu} is not NVIDIA's",
            kind="settings",
            hint="let a machine with it join the fabric by itself: atoll join",
        )
    return rules


def _have(rule: GpuRule) -> list[Manifest]:
    """Return what a machine's labels are to say of its GPUs."""
    return [
        *(_rule(key, "In", *values) for key, values in rule.values.items()),
        *(_rule(key, "DoesNotExist") for key in rule.absent),
    ]


def _rule(key: str, operator: str, *values: str) -> Manifest:
    rule: Manifest = {"key": key, "operator": operator}
    return {**rule, "values": list(values)} if values else rule


def _planned(order: StartOrder, command: NodeCommand) -> Node | None:
    return next((node for node in order.instance.nodes if node.id == command.node), None)


def _references(
    command: NodeCommand, name: str, settings: KubernetesSettings
) -> list[tuple[str, str, str]]:
    found = []
    for variable, _ in sorted(command.secrets):
        given = settings.secrets.get(variable)
        secret, key = given.split("/") if given is not None else (name, variable)
        found.append((variable, secret, key))
    return found


def _own_secrets(order: StartOrder, settings: KubernetesSettings) -> dict[str, str]:
    files: dict[str, str] = {}
    for command in order.commands:
        for variable, path in command.secrets:
            if variable not in settings.secrets and files.setdefault(variable, path) != path:
                raise DeployError(f"nodes disagree on the file of {variable}", kind="settings")
    return files


def _read_secret(variable: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_SECRET_BYTES + 1)
    except OSError as error:
        raise DeployError(
            f"the file of {variable} cannot be read: {error.strerror}",
            kind="settings",
            hint=f"write it, or name a Secret for {variable} in the target's settings",
        ) from error
    if len(content) > _SECRET_BYTES:
        raise DeployError(f"the file of {variable} is over 64 KiB, no secret is", kind="settings")
    return content


def _expand(word: str) -> str:
    """Return a word of a command; Kubernetes puts variables for $(NAME), so what looks like one is escaped.

    The port is left to a variable, so that whoever runs the pod may choose another.
    """
    return word.replace("$(", "$$(").replace("{port}", "$(ATOLL_PORT)")


def _check(order: StartOrder) -> None:
    if not order.commands:
        raise DeployError(f"{order.labels.instance} has no node to start", kind="settings")
    for command in order.commands:
        if not command.argv:
            raise DeployError(f"{command.node} has nothing to run", kind="settings")
        names = [variable for variable, _ in (*command.env, *command.secrets)]
        wrong = next((n for n in names if VARIABLE.fullmatch(n) is None), None)
        if wrong is not None:
            raise InputError(f"{wrong!r} is no name of an environment variable", field="env")
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise InputError(f"{twice} is given twice to {command.node}", field="env")
