"""Running Slurm's commands: argument lists, a deadline, and no more output than asked for."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from atoll.deploy.target import DeployError

MAX_BYTES = 128 * 2**20
"""Older versions of squeue --json list every job of the cluster, some 4 kB each."""
_MAX_ERROR_BYTES = 64 * 2**10
_CHUNK = 2**16
_OWN_SETTINGS = ("SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_")
"""Variables by which a user's defaults would change what is asked or how it is answered."""


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    """Output of a command; `timed_out` when it was ended at its deadline."""

    code: int
    out: str
    err: str
    timed_out: bool = False


class SlurmRunner(Protocol):
    """Runs a command of Slurm; `DeployError` only where it cannot be run at all."""

    def run(self, argv: Sequence[str], *, deadline_s: float) -> SlurmAnswer:
        """Run a command to its end or its deadline."""
        ...


class ProcessRunner:
    """Runs Slurm's commands as processes, without a shell and without the user's own defaults for them."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        kept = {k: v for k, v in given.items() if not k.startswith(_OWN_SETTINGS)}
        self._environment = {**kept, "LC_ALL": "C"}

    def run(self, argv: Sequence[str], *, deadline_s: float) -> SlurmAnswer:
        """Run a command to its end or its deadline; too much output is an error."""
        until_s = time.monotonic() + deadline_s
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
            )
        except OSError as error:
            raise DeployError(
                f"cannot run {argv[0]}: {(error.strerror or str(error)).lower()}",
                kind="settings",
                hint="run this where Slurm's commands are installed: a login node",
            ) from error
        with process:
            try:
                out, err, ended = _read_both(process, until_s, argv[0])
            finally:
                # With everything read it has ended or is about to; otherwise it must not go on.
                try:
                    process.wait(max(0.0, until_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
        return SlurmAnswer(
            process.returncode,
            out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
            timed_out=not ended or process.returncode == -9,
        )


def _read_both(
    process: subprocess.Popen[bytes], until_s: float, name: str
) -> tuple[bytes, bytes, bool]:
    """Return what is on both streams and whether they ended before the deadline."""
    assert process.stdout is not None
    assert process.stderr is not None
    buffers: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    limits = {process.stdout: MAX_BYTES, process.stderr: _MAX_ERROR_BYTES}
    ended = True
    with selectors.DefaultSelector() as selector:
        for stream in buffers:
            selector.register(stream, selectors.EVENT_READ, stream)
        while selector.get_map():
            left_s = until_s - time.monotonic()
            ready = selector.select(left_s) if left_s > 0 else []
            if not ready:
                process.kill()
                ended = False
                break
            for key, _ in ready:
                stream = key.data
                chunk = os.read(stream.fileno(), _CHUNK)
                if not chunk:
                    selector.unregister(stream)
                elif len(buffers[stream]) + len(chunk) <= limits[stream]:
                    buffers[stream] += chunk
                elif stream is process.stdout:
                    process.kill()
                    raise DeployError(
                        f"{name} wrote more than {MAX_BYTES // 2**20} MiB", kind="unreachable"
                    )
    return bytes(buffers[process.stdout]), bytes(buffers[process.stderr]), ended
