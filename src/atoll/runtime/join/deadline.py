"""When this node ends: what the user says, Slurm's time limit, a cloud's spot notice.

All times are Unix seconds. A deadline only ever comes nearer, except that a batch system may grant
more time, which is read anew now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Literal

from atoll.core.errors import InputError
from atoll.core.units import parse_duration
from atoll.runtime.http.http_client import FetchError, request

Cloud = Literal["aws", "gcp", "azure"]
CLOUDS: Mapping[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
"""Where each cloud's machines ask about themselves."""
LAST_S = 5.0
"""How long before its end a node leaves by itself."""
_LOOK_S = 1.0
_BATCH_EVERY_S = 600.0
# GCP does not say when the machine goes: this is how long it gives.
_GCP_NOTICE_S = 30.0
_SCONTROL_END = re.compile(r"\bEndTime=(\S+)")
_COMMAND_S = 10.0
Run = Callable[[tuple[str, ...]], Awaitable[str | None]]
"""Runs a command and returns what it printed, None if it failed."""


def parse_ends(text: str, now_s: float) -> float:
    """Read "in how long" (2h, 90min) or "at what time" (2025-07-01T18:00, with or without zone)."""
    with contextlib.suppress(InputError):
        return now_s + parse_duration(text)
    with contextlib.suppress(ValueError):
        # Without a zone it is the machine's own time.
        return datetime.fromisoformat(text).timestamp()
    raise InputError(
        f"cannot read {text!r} as a time",
        field="--ends",
        hint="write 2h, 90min or 2025-07-01T18:00",
    )


async def slurm_end_s(environment: Mapping[str, str], run: Run | None = None) -> float | None:
    """Return when the Slurm job that this process belongs to will be ended, None if that is unknown."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return None
    end_text = environment.get("SLURM_JOB_END_TIME", "")
    # At the start, what the job's environment says will do; later only Slurm knows of time that it granted.
    if run is None:
        if end_text.isdigit():
            return float(end_text)
        run = run_command
    for command in (("squeue", "-h", "-j", job, "-o", "%e"), ("scontrol", "show", "job", job)):
        printed = await run(command)
        end_s = _slurm_time(printed) if printed else None
        if end_s is not None:
            return end_s
    return float(end_text) if end_text.isdigit() else None


def _slurm_time(text: str) -> float | None:
    match = _SCONTROL_END.search(text)
    word = match[1] if match else text.strip().partition("\n")[0]
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError:
        return None


async def run_command(arguments: tuple[str, ...]) -> str | None:
    """Run a command for at most ten seconds."""
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(_COMMAND_S):
            printed, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    return printed.decode("utf-8", "replace") if process.returncode == 0 else None


@dataclass(slots=True)
class SpotNotices:
    """Asks a cloud whether it will take this machine back. `url` is where its metadata are."""

    cloud: Cloud
    url: str = ""
    every_s: float = 5.0
    timeout_s: float = 2.0

    async def end_s(self, now_s: float) -> float | None:
        """Return when the machine will be taken back; None: not for now, or the cloud did not say."""
        base = self.url or CLOUDS[self.cloud]
        read = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[self.cloud]
        try:
            return await read(base, now_s)
        except (FetchError, ValueError, KeyError, TypeError, AttributeError):
            return None

    async def wait(self) -> float:
        """Ask until there is a notice, and return it."""
        while True:
            end_s = await self.end_s(time.time())
            if end_s is not None:
                return end_s
            await asyncio.sleep(self.every_s)

    async def _aws(self, base: str, now_s: float) -> float | None:
        del now_s
        token = await request(
            f"{base}/latest/api/token",
            method="PUT",
            headers={"x-aws-ec2-metadata-token-ttl-seconds": "60"},
            timeout_s=self.timeout_s,
        )
        headers = {"x-aws-ec2-metadata-token": token.body.decode("ascii").strip()}
        if token.status != 200 or not headers["x-aws-ec2-metadata-token"].isprintable():
            headers = {}
        answer = await request(
            f"{base}/latest/meta-data/spot/instance-action",
            headers=headers,
            timeout_s=self.timeout_s,
        )
        if answer.status != 200:
            return None
        return datetime.fromisoformat(json.loads(answer.body)["time"]).timestamp()

    async def _gcp(self, base: str, now_s: float) -> float | None:
        answer = await request(
            f"{base}/computeMetadata/v1/instance/preempted",
            headers={"metadata-flavor": "Google"},
            timeout_s=self.timeout_s,
        )
        preempted = answer.status == 200 and answer.body.strip().upper() == b"TRUE"
        return now_s + _GCP_NOTICE_S if preempted else None

    async def _azure(self, base: str, now_s: float) -> float | None:
        answer = await request(
            f"{base}/metadata/scheduledevents?api-version=2020-07-01",
            headers={"metadata": "true"},
            timeout_s=self.timeout_s,
        )
        if answer.status != 200:
            return None
        ends = [
            parsedate_to_datetime(event["NotBefore"]).timestamp() if event["NotBefore"] else now_s
            for event in json.loads(answer.body)["Events"]
            if event["EventType"] in ("Preempt", "Terminate")
        ]
        return min(ends, default=None)


@dataclass(slots=True)
class NodeDeadline:
    """The nearest of all ends that are known."""

    asked_s: float | None = None
    """As the user said."""
    batch_s: float | None = None
    """As the batch system says; may become earlier or later."""
    noticed_s: float | None = None
    """As a signal or a cloud said; only becomes earlier."""

    @property
    def ends_s(self) -> float | None:
        """When this node ends as far as is known."""
        known = [t for t in (self.asked_s, self.batch_s, self.noticed_s) if t is not None]
        return min(known, default=None)

    def notice(self, ends_s: float) -> None:
        """Take word that the end is near."""
        self.noticed_s = ends_s if self.noticed_s is None else min(self.noticed_s, ends_s)

    async def watch(self, environment: Mapping[str, str], on_change: Callable[[], None]) -> None:
        """Return when the time is up; meanwhile ask the batch system now and then whether it has moved."""
        asked_s = time.monotonic()
        while True:
            ends_s = self.ends_s
            left_s = float("inf") if ends_s is None else ends_s - time.time()
            if left_s <= LAST_S:
                return
            # A notice may come at any time.
            await asyncio.sleep(min(_LOOK_S, left_s - LAST_S))
            if self.batch_s is not None and time.monotonic() - asked_s > _BATCH_EVERY_S:
                asked_s = time.monotonic()
                end_s = await slurm_end_s(environment, run_command)
                if end_s is not None and end_s != self.batch_s:
                    self.batch_s = end_s
                    on_change()
