"""Lease of a fleet's controller: one acts at a time, in a term that grows with every new holder.

Whoever holds the lease renews it before it ends. Another controller takes it over when it has, with a larger
term; targets refuse orders of an older one, so a controller that slept through its own end does no harm.
The lease is a file (`FileLease`), or a Lease object where a target is a Kubernetes cluster (`ClusterLease`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from pydantic import Field

from atoll.control.operation.targets import PoolTarget
from atoll.core.errors import AtollError, InputError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer

_MAX_BYTES = 4096


class LeaseHeldError(AtollError):
    """Another controller acts."""


class SupersededError(LeaseHeldError):
    """A target follows a later controller: this one must not act any more, whatever its lease says."""


class Lease(Frozen):
    """Who acts, until when (seconds of Unix time), and in which term."""

    holder: str = Field(min_length=1, max_length=200)
    term: int = Field(ge=1)
    ends_s: float


class LeaseTaker(Protocol):
    """Something that lets one controller act at a time."""

    def take(self, holder: str, now_s: float, valid_s: float) -> Lease:
        """Take or renew the lease, or raise."""
        ...


class FileLease:
    """A lease that controllers on machines with a common folder agree on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def take(self, holder: str, now_s: float, valid_s: float) -> Lease:
        """Take or renew the lease; raises `LeaseHeldError` while another has it.

        Renewed in time the term stays. After its end it is a new one, also for the same holder: another may
        have acted in between.
        """
        with self._locked():
            known = self.read()
            if known is not None and known.holder != holder and now_s < known.ends_s:
                left_s = known.ends_s - now_s
                raise LeaseHeldError(
                    f"{known.holder} operates this fleet (term {known.term})",
                    hint=f"stop it first, or wait {left_s:.0f} s after it has died",
                )
            renewed = known is not None and known.holder == holder and now_s < known.ends_s
            last = 0 if known is None else known.term
            lease = Lease(holder=holder, term=last if renewed else last + 1, ends_s=now_s + valid_s)
            atomic_write(self.path, lease.to_json() + "\n")
            return lease

    def release(self, lease: Lease, now_s: float) -> None:
        """Give the lease back, so that nobody has to wait for its end; nothing if another has it by now."""
        with self._locked():
            known = self.read()
            if known is not None and (known.holder, known.term) == (lease.holder, lease.term):
                # The term is remembered: the next one must be larger.
                ended = known.model_copy(update={"ends_s": now_s})
                atomic_write(self.path, ended.to_json() + "\n")

    def read(self) -> Lease | None:
        """Return the lease that was written last, ended or not."""
        if not self.path.exists():
            return None
        text = read_text_limited(self.path, _MAX_BYTES)
        try:
            return Lease.model_validate_json(text)
        except ValueError as error:
            raise InputError(
                "not a lease", path=self.path, hint="move it away if no controller runs"
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # A file beside it, since the lease itself is replaced with every write.
        lock = self.path.with_name(self.path.name + ".lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


@contextlib.contextmanager
def keep_lease(
    lease: LeaseTaker, holder: str, clock: Callable[[], float], valid_s: float
) -> Iterator[None]:
    """Renew a lease from a thread of its own while something takes long: planning, or a slow target.

    Where it cannot be renewed that ends silently: whoever acts next takes it again, and is refused then.
    """
    over = threading.Event()

    def renew() -> None:
        while not over.wait(valid_s / 3):
            try:
                lease.take(holder, clock(), valid_s)
            except AtollError:
                return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def find_cluster(targets: Iterable[PoolTarget]) -> KubernetesDeployer | None:
    """Return the cluster among a fleet's targets, None if there is none."""
    found = (target.target for target in targets)
    return next((each for each in found if isinstance(each, KubernetesDeployer)), None)


class ClusterLease:
    """The Lease of a fleet in a Kubernetes cluster: controllers anywhere agree on it."""

    def __init__(self, target: KubernetesDeployer, fleet: str) -> None:
        self._target, self._fleet = target, fleet
        self._holder: str | None = None

    def take(self, holder: str, now_s: float, valid_s: float) -> Lease:
        """Take or renew the lease, or raise."""
        term = self._target.lease(self._fleet, holder, int(valid_s)).acquire(now_s)
        if term is None:
            raise LeaseHeldError(
                "another controller operates this fleet, says its Lease in the cluster",
                hint=f"stop it first, or wait {valid_s:.0f} s after it has died",
            )
        self._holder = holder
        self._target.hold_evictions(self._fleet, now_s)
        return Lease(holder=holder, term=term, ends_s=now_s + valid_s)

    def give_back(self, now_s: float) -> None:
        """Let the next one act at once."""
        del now_s
        if self._holder is not None:
            self._target.hold_evictions(self._fleet, None)
            self._target.lease(self._fleet, self._holder).release()
