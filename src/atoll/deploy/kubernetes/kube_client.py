"""The few things asked of a Kubernetes API, over whatever carries a request there.

Refusals become one line with what to do. Answers that a caller is meant to act on are values: None for what
is not there, or for a write that somebody else's was faster than.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from atoll.core.errors import shorten
from atoll.deploy.kubernetes.labels import DOMAIN, MANAGER
from atoll.deploy.kubernetes.worker_group import API, KIND
from atoll.deploy.target import DeployError, FailureKind

Json = dict[str, Any]

_PATHS = {
    "ConfigMap": ("/api/v1", "configmaps", True),
    "Event": ("/api/v1", "events", True),
    "Fleet": (f"/apis/{DOMAIN}/v1alpha1", "fleets", True),
    KIND: (f"/apis/{API}", "leaderworkersets", True),
    "Job": ("/apis/batch/v1", "jobs", True),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases", True),
    "Node": ("/api/v1", "nodes", False),
    "NodePool": ("/apis/karpenter.sh/v1", "nodepools", False),
    "Pod": ("/api/v1", "pods", True),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets", True),
    "Secret": ("/api/v1", "secrets", True),
    "Service": ("/api/v1", "services", True),
    "StatefulSet": ("/apis/apps/v1", "statefulsets", True),
}
"""Where a kind is found, and whether it is in a namespace."""
PAGE_SIZE = 500
MAX_REASON_CHARACTERS = 300
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"


class HttpAnswer(NamedTuple):
    """A status and what was said with it."""

    status: int
    body: bytes


class KubeTransport(Protocol):
    """Carries a request to an API server and returns the answer; raises DeployError if none comes."""

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: bytes | None = None,
        content_type: str = _JSON,
    ) -> HttpAnswer:
        """Ask, and return the answer whatever its status."""
        ...


class KubeClient:
    """The objects of one namespace."""

    def __init__(self, transport: KubeTransport, namespace: str) -> None:
        self._transport = transport
        self.namespace = namespace

    def apply(self, manifest: Json) -> Json:
        """Apply an object server-side: fields left out since the last time go, those of others stay."""
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        # Strict: a field that the server does not know is an error, not a silence.
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        body = json.dumps(manifest).encode()
        answer = self._transport.ask("PATCH", path, query=query, body=body, content_type=_APPLY)
        return _read(answer, f"apply {_title(manifest)}")

    def apply_status(self, manifest: Json) -> Json:
        """Apply the status of an object that has one of its own."""
        path = f"{self._path(manifest['kind'], manifest['metadata']['name'])}/status"
        # What it says is ours alone: whoever wrote it before was an operator, too.
        query = {"fieldManager": f"{MANAGER}-status", "force": "true"}
        body = json.dumps(manifest).encode()
        answer = self._transport.ask("PATCH", path, query=query, body=body, content_type=_APPLY)
        return _read(answer, f"write the status of {_title(manifest)}")

    def get(self, kind: str, name: str) -> Json | None:
        """Return an object, None where there is none."""
        answer = self._transport.ask("GET", self._path(kind, name), query={})
        return None if answer.status == 404 else _read(answer, f"read {kind} {name}")

    def select(
        self, kind: str, *, labels: str = "", fields: str = "", everywhere: bool = False
    ) -> list[Json]:
        """Return the objects that a selector fits, page by page."""
        query = {"limit": str(PAGE_SIZE)}
        query |= {"labelSelector": labels} if labels else {}
        query |= {"fieldSelector": fields} if fields else {}
        found: list[Json] = []
        while True:
            answer = self._transport.ask(
                "GET", self._path(kind, everywhere=everywhere), query=query
            )
            page = _read(answer, f"list {kind}s")
            found += page.get("items") or ()
            more = page.get("metadata", {}).get("continue")
            if not more:
                return found
            query = {**query, "continue": more}

    def select_if_allowed(self, kind: str, *, everywhere: bool = False) -> list[Json] | None:
        """Return all objects of a kind, None where this user may not see them or there is no such kind."""
        path = self._path(kind, everywhere=everywhere)
        if self._transport.ask("GET", path, query={"limit": "1"}).status in (403, 404):
            return None
        return self.select(kind, everywhere=everywhere)

    def has(self, kind: str) -> bool:
        """Return whether the cluster has a kind of objects: somebody may have installed it."""
        return self._transport.ask("GET", _PATHS[kind][0], query={}).status == 200

    def delete(
        self, kind: str, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> None:
        """Ask that an object end after what it owns; nothing where there is none, or another of its name."""
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions"}
        # A pod owns nothing; for it this would only mean one more to wait for.
        options["propagationPolicy"] = "Background" if kind == "Pod" else "Foreground"
        options |= {"preconditions": {"uid": uid}} if uid is not None else {}
        options |= {"gracePeriodSeconds": grace_s} if grace_s is not None else {}
        path = self._path(kind, name)
        answer = self._transport.ask("DELETE", path, query={}, body=json.dumps(options).encode())
        if answer.status not in (404, 409):
            _read(answer, f"delete {kind} {name}")

    def create(self, manifest: Json) -> Json | None:
        """Make an object, None where there is one of its name."""
        path = self._path(manifest["kind"])
        query = {"fieldManager": MANAGER}
        answer = self._transport.ask("POST", path, query=query, body=json.dumps(manifest).encode())
        return None if answer.status == 409 else _read(answer, f"create {_title(manifest)}")

    def replace(self, manifest: Json) -> Json | None:
        """Write an object over the version it was read at, None where it has changed since."""
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        query = {"fieldManager": MANAGER}
        answer = self._transport.ask("PUT", path, query=query, body=json.dumps(manifest).encode())
        return None if answer.status in (404, 409) else _read(answer, f"write {_title(manifest)}")

    def logs(self, pod: str, lines: int) -> str:
        """Return the last lines a pod wrote, nothing for one that has not started."""
        query = {"tailLines": str(lines), "limitBytes": str(1 << 20)}
        answer = self._transport.ask("GET", f"{self._path('Pod', pod)}/log", query=query)
        if answer.status in (400, 404):
            return ""
        if answer.status >= 300:
            _read(answer, f"read the log of {pod}")
        return answer.body.decode(errors="replace")

    def _path(self, kind: str, name: str = "", *, everywhere: bool = False) -> str:
        group, plural, spaced = _PATHS[kind]
        space = f"/namespaces/{self.namespace}" if spaced and not everywhere else ""
        return f"{group}{space}/{plural}" + (f"/{quote(name, safe='')}" if name else "")


def _title(manifest: Json) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _read(answer: HttpAnswer, what: str) -> Json:
    try:
        said = json.loads(answer.body)
    except ValueError:
        said = None
    if answer.status < 300 and isinstance(said, dict):
        return said
    raise _refusal(answer.status, said if isinstance(said, dict) else {}, what)


def _refusal(status: int, said: Json, what: str) -> DeployError:
    """Return what a refusal means; a Status says it with a code, and a text for people."""
    text = shorten(str(said.get("message") or f"HTTP {status}"), MAX_REASON_CHARACTERS)
    kind: FailureKind = "settings"
    hint: str | None = None
    if status == 401:
        hint = "log in again: the credentials of the kubeconfig are not (or no longer) accepted"
    elif status == 403 and "exceeded quota" in text:
        # A quota is refused with the code of a missing right; only the text tells them apart.
        kind, hint = "quota", "ask for a larger quota in this namespace, or free some of it"
    elif status == 403:
        hint = "give this user the Role in deploy/kubernetes/base/rbac.yaml"
    elif status == 404:
        hint = "make the namespace, or name another in the target's settings"
    elif status == 409:
        hint = "somebody else set these fields; take them back, or delete the object"
    elif status in (400, 422) or (status == 500 and "field not declared in schema" in text):
        # To an apply with an unknown field the server answers that it failed itself.
        hint = "check the target's settings against what the API server says"
    elif status == 429 or status >= 500:
        kind, hint = "unreachable", "try again later"
    return DeployError(f"Kubernetes refuses to {what}: {text}", kind=kind, hint=hint)
