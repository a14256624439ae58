"""Requests to the head of a Ray cluster: its job and state APIs, JSON over HTTP.

Nothing of Ray is needed here, so that versions of Ray and Python need not be the cluster's, and a cluster
that is gone is a request that failed.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from atoll.core.errors import AtollError, shorten
from atoll.core.files import read_text_limited
from atoll.deploy.target import DeployError

Json = dict[str, Any]
_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_TOKEN_BYTES = 2**16
_MAX_RECORDS = 10_000
"""The most that Ray's state API returns at a time."""
_MAX_SAID = 300


class RayClient(Protocol):
    """What is asked of a cluster."""

    def nodes(self) -> Sequence[Json]:
        """Return the machines, dead ones for a while included."""
        ...

    def groups(self) -> Sequence[Json]:
        """Return the placement groups."""
        ...

    def actors(self) -> Sequence[Json]:
        """Return the actors that live."""
        ...

    def jobs(self) -> Sequence[Json]:
        """Return the jobs that were submitted, ended ones included."""
        ...

    def submit(self, job: Json) -> None:
        """Submit a job; DeployError of kind `settings` where its id is taken."""
        ...

    def stop(self, job: str) -> None:
        """Have a job end: SIGTERM to its driver; nothing if it has ended."""
        ...

    def forget(self, job: str) -> None:
        """Remove what the cluster knows of a job that has ended."""
        ...

    def job_log(self, job: str) -> str:
        """Return what a job's driver wrote; "" if it has not begun."""
        ...

    def tail(self, node: str, file: str, lines: int) -> str:
        """Return the last lines of a file among a machine's logs."""
        ...

    def upload(self, name: str, package: bytes) -> str:
        """Put a package of files into the cluster and return what jobs call it."""
        ...


class HttpRayClient:
    """The head's dashboard."""

    def __init__(
        self, address: str, *, deadline_s: float = 30.0, token_file: str | None = None
    ) -> None:
        self._address, self._deadline_s, self._token_file = address, deadline_s, token_file

    def nodes(self) -> Sequence[Json]:
        """Return the machines, dead ones for a while included."""
        return self._state("nodes")

    def groups(self) -> Sequence[Json]:
        """Return the placement groups."""
        return self._state("placement_groups")

    def actors(self) -> Sequence[Json]:
        """Return the actors that live."""
        return self._state(
            "actors", filter_keys="state", filter_predicates="=", filter_values="ALIVE"
        )

    def jobs(self) -> Sequence[Json]:
        """Return the jobs that were submitted, ended ones included."""
        found = self._json("GET", "/api/jobs/")
        if not isinstance(found, list):
            raise self._odd("/api/jobs/")
        return [job for job in found if job.get("type") == "SUBMISSION"]

    def submit(self, job: Json) -> None:
        """Submit a job."""
        self._json("POST", "/api/jobs/", json.dumps(job).encode())

    def stop(self, job: str) -> None:
        """Have a job end: SIGTERM to its driver; nothing if it has ended."""
        self._ask("POST", f"/api/jobs/{_quote(job)}/stop", b"", missing_ok=True)

    def forget(self, job: str) -> None:
        """Remove what the cluster knows of a job that has ended."""
        self._ask("DELETE", f"/api/jobs/{_quote(job)}", missing_ok=True)

    def job_log(self, job: str) -> str:
        """Return what a job's driver wrote; "" if it has not begun."""
        answer = self._ask("GET", f"/api/jobs/{_quote(job)}/logs", missing_ok=True)
        return "" if not answer else str(json.loads(answer).get("logs") or "")

    def tail(self, node: str, file: str, lines: int) -> str:
        """Return the last lines of a file among a machine's logs."""
        query = urllib.parse.urlencode({"node_id": node, "filename": file, "lines": lines})
        return self._ask("GET", f"/api/v0/logs/file?{query}").decode("utf-8", "replace")

    def upload(self, name: str, package: bytes) -> str:
        """Put a package of files into the cluster and return what jobs call it."""
        self._ask("PUT", f"/api/packages/gcs/{_quote(name)}", package)
        return f"gcs://{name}"

    def _state(self, what: str, **filters: str) -> Sequence[Json]:
        query = urllib.parse.urlencode({"detail": 1, "limit": _MAX_RECORDS, **filters})
        path = f"/api/v0/{what}?{query}"
        answer = self._json("GET", path)
        try:
            found = answer["data"]["result"]["result"]
        except (KeyError, TypeError) as error:
            raise self._odd(path) from error
        return list(found)

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        try:
            return json.loads(self._ask(method, path, body))
        except ValueError as error:
            raise self._odd(path) from error

    def _ask(
        self, method: str, path: str, body: bytes | None = None, *, missing_ok: bool = False
    ) -> bytes:
        request = urllib.request.Request(
            self._address + path, data=body, method=method, headers=self._headers()
        )
        try:
            # The scheme is checked by the settings.
            with urllib.request.urlopen(request, timeout=self._deadline_s) as answer:
                return bytes(answer.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404 and missing_ok:
                    return b""
                raise _refusal(error.code, error.read(_MAX_ANSWER_BYTES), method, path) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            said = getattr(reason, "strerror", None) or str(reason)
            raise DeployError(
                f"Ray does not answer at {self._address}: {said.lower()}",
                kind="unreachable",
                hint="name its dashboard: --ray-address http://HEAD:8265",
            ) from error

    def _headers(self) -> Mapping[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._token_file is not None:
            try:
                path = Path(self._token_file).expanduser()
                token = read_text_limited(path, _MAX_TOKEN_BYTES).strip()
            except AtollError as error:
                raise DeployError(
                    f"cannot read {self._token_file}: {error.message}",
                    kind="settings",
                    hint="token_file holds the token of the cluster",
                ) from error
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _odd(self, path: str) -> DeployError:
        return DeployError(
            f"what answers at {self._address}{path.partition('?')[0]} is no Ray with a dashboard",
            kind="unreachable",
            hint="the head needs ray[default]; name its dashboard, not port 6379 or 10001",
        )


def _refusal(code: int, body: bytes, method: str, path: str) -> DeployError:
    """What the head said against a request, as one line: it sends whole tracebacks."""
    lines = [line.strip() for line in body.decode("utf-8", "replace").splitlines() if line.strip()]
    said = shorten(lines[-1], _MAX_SAID) if lines else "no word"
    if code in (401, 403):
        return DeployError(
            f"Ray refuses access ({code}): {said}",
            kind="settings",
            hint="set token_file to a file with the cluster's token",
        )
    where = path.partition("?")[0]
    return DeployError(
        f"Ray refuses {method} {where} ({code}): {said}",
        kind="settings" if code < 500 else "unreachable",
        hint="the head needs ray[default]" if code == 404 else None,
    )


def _quote(word: str) -> str:
    return urllib.parse.quote(word, safe="")
