"""Answers that were worked out before, and reports: kept for a while, in memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from atoll.planner.jobs import JobMessage, JobRunner
from atoll.planner.worker import NamedJob, Said, name_of

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """The last few of something, by name; `max_letters` bounds what they are together."""

    def __init__(self, most: int, max_letters: int = 256 * 2**20) -> None:
        self._most, self._max_letters = most, max_letters
        self._kept: OrderedDict[str, tuple[_T, int]] = OrderedDict()

    def get(self, name: str) -> _T | None:
        """Return what is kept under a name, which is then the newest."""
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def put(self, name: str, value: _T, letters: int) -> None:
        """Keep something; the oldest go where there is no room."""
        self._kept[name] = (value, letters)
        self._kept.move_to_end(name)
        while len(self._kept) > self._most or (
            len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > self._max_letters
        ):
            self._kept.popitem(last=False)


class Answers:
    """Results of jobs by question, and the reports that came with them."""

    def __init__(self) -> None:
        self._said: Recent[Said] = Recent(32)
        self.reports: Recent[str] = Recent(10)

    def find(self, key: str) -> Said | None:
        """Return what was answered before; without its report, if that is gone, it is no answer."""
        said = self._said.get(key)
        if said is None or ("report" in said and self.reports.get(said["report"]) is None):
            return None
        return said

    def keep(self, key: str, said: Said) -> Said:
        """Keep an answer; its page (`html`) becomes a report of its own, which the answer then names."""
        html = said.get("html")
        if isinstance(html, str):
            name = f"r-{secrets.token_hex(8)}"
            self.reports.put(name, html, len(html))
            said = {**{k: v for k, v in said.items() if k != "html"}, "report": name}
        self._said.put(key, said, len(json.dumps(said)))
        return said


class AnsweringRunner(JobRunner):
    """Runs jobs of another runner, and answers at once what was asked before.

    `on_result` is told what a job says, and returns what of it is the answer. What is not known waits for
    `before`: the worker that works on that has what others would have to find out anew.
    """

    def __init__(
        self,
        runner: JobRunner,
        answers: Answers,
        key: str,
        on_result: Callable[[Said], Said] = lambda said: said,
        before: asyncio.Task[None] | None = None,
    ) -> None:
        self._before = before
        self._runner, self._answers, self._key = runner, answers, key
        self._on_result = on_result

    async def messages(self, job: NamedJob, arguments: Said) -> AsyncGenerator[JobMessage, None]:
        """Run a job; see `JobRunner.messages`."""
        known = self._answers.find(self._key)
        if known is not None:
            yield JobMessage("result", known)
            return
        if self._before is not None and not self._before.done():
            yield JobMessage("progress", {"text": "planning the fleet as it is", "share": None})
            await asyncio.wait({self._before})
        async with contextlib.aclosing(self._runner.messages(job, arguments)) as messages:
            async for message in messages:
                if message.event == "result":
                    said = self._answers.keep(self._key, self._on_result(message.said))
                    message = JobMessage("result", said)
                yield message


def key_of(job: NamedJob, arguments: Said, stat: Callable[[str], os.stat_result] = os.stat) -> str:
    """Return what tells one question from another: what is asked, and the state of files it is about."""
    marks: list[object] = [name_of(job), arguments]
    for path in (arguments.get("place", {}).get("path"), arguments.get("trace_path")):
        if path is not None:
            with contextlib.suppress(OSError):
                found = stat(path)
                marks.append([found.st_mtime_ns, found.st_size, found.st_ino])
    return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()
