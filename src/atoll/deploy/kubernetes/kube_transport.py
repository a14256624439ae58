"""The way to a real API server: the official client's configuration and connection pool.

Only what loads a kubeconfig (with its exec plugins), a pod's own account and TLS is taken from it; requests
are ours, so that any version of the package will do.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from atoll.core.errors import MissingDependencyError, shorten
from atoll.deploy.kubernetes.kube_client import HttpAnswer
from atoll.deploy.target import DeployError

_CONNECT_S = 10.0
_READ_S = 30.0
_MAX_BYTES = 1 << 27
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class ClusterTransport:
    """Requests to the cluster that a kubeconfig names, or to the one this process runs in."""

    def __init__(self, kubeconfig: str | None = None, context: str | None = None) -> None:
        self._configuration = _load(kubeconfig, context)
        self._client: Any = _import("kubernetes.client").ApiClient(self._configuration)
        if not self._configuration.verify_ssl:
            # The kubeconfig says so; once for every request would say nothing more.
            urllib3 = _import("urllib3")
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> HttpAnswer:
        """Ask, and return the answer whatever its status; an answer without end is cut off."""
        urllib3 = _import("urllib3")

        # Read anew every time: tokens of plugins and of pods expire.
        headers = {"Accept": "application/json"} | self._credentials()
        if body is not None:
            headers["Content-Type"] = content_type
        host = self._configuration.host.rstrip("/")
        try:
            response = self._client.rest_client.pool_manager.request(
                method,
                f"{host}{path}" + (f"?{urlencode(query)}" if query else ""),
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=_READ_S),
                # A write that was cut off may have been heard; whoever asked asks again.
                retries=False,
                preload_content=False,
            )
            with response:
                content = response.read(_MAX_BYTES + 1)
                response.drain_conn()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise DeployError(
                f"the Kubernetes API at {shorten(host, 100)} does not answer: {_cause(error)}",
                kind="unreachable",
                hint="check the server's address in the kubeconfig and the way there",
            ) from error
        if len(content) > _MAX_BYTES:
            raise DeployError("the Kubernetes API's answer has no end", kind="unreachable")
        return HttpAnswer(response.status, content)

    def close(self) -> None:
        """Let go of all connections."""
        self._client.rest_client.pool_manager.clear()

    def _credentials(self) -> dict[str, str]:
        token = self._configuration.auth_settings().get("BearerToken")
        return {"Authorization": token["value"]} if token and token["value"] else {}


def _load(kubeconfig: str | None, context: str | None) -> Any:
    config = _import("kubernetes.config")
    loaded = _import("kubernetes.client").Configuration()
    named = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if named is None and _ACCOUNT.exists():
            config.load_incluster_config(client_configuration=loaded)
        else:
            config.load_kube_config(named, context=context, client_configuration=loaded)
    # The package and the plugins it runs raise what they like; none of it is worth a traceback.
    except Exception as error:
        where = named or "~/.kube/config"
        raise DeployError(
            f"no cluster is known from {shorten(where, 100)}: {shorten(_cause(error), 200)}",
            kind="settings",
            hint="set KUBECONFIG to a file with the context to use, or name one in the target's settings",
        ) from error
    return loaded


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            "kubernetes", "kubernetes", needed_for="the target kubernetes"
        ) from error


def _cause(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()).rpartition("object at ")[2] or type(error).__name__
