"""Jobs for tests of the planner, which its workers load by their names."""

from __future__ import annotations

import os
import sys
import time

from atoll.core.errors import InputError
from atoll.planner.worker import Report, Said


def count(arguments: Said, report: Report) -> Said:
    for at in range(arguments["to"]):
        report({"at": at})
    sys.stdout.write("what libraries say is no answer\n")
    return {"sum": sum(range(arguments["to"])), "process": os.getpid()}


def refuse(arguments: Said, report: Report) -> Said:
    raise InputError("no such thing", field="thing", hint="name another")


def fail(arguments: Said, report: Report) -> Said:
    raise ZeroDivisionError


def die(arguments: Said, report: Report) -> Said:
    os._exit(1)


def wait(arguments: Said, report: Report) -> Said:
    report({"process": os.getpid()})
    time.sleep(1000.0)
    return {}


def swell(arguments: Said, report: Report) -> Said:
    # More than a worker may have; pages that nobody writes to take no memory.
    return {"bytes": len(bytearray(9 * 2**30)), "process": os.getpid()}


JOBS = {job.__name__: job for job in (count, refuse, fail, die, wait, swell)}
