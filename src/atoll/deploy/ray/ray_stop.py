"""Ends the nodes of a job now, as a job of its own: `python -m atoll.deploy.ray.ray_stop JOB NODE ...`.

A job that is told to stop drains first; it ends when none of its nodes is left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from atoll.core.errors import AtollError
from atoll.deploy.ray.ray_job import load_ray
from atoll.deploy.ray.ray_package import name_actor


def main(arguments: Sequence[str]) -> int:
    """Kill the actors that are there, and with them what they run."""
    job, *nodes = arguments
    try:
        ray = load_ray()
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    for node in nodes:
        try:
            ray.kill(ray.get_actor(name_actor(job, node)))
        except ValueError:  # it has ended, or never began
            continue
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
