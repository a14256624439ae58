"""Machines for a test: network namespaces joined by a bridge, or addresses of the loopback interface.

In a namespace a site has its own loopback, so that nothing outside can reach what listens there; it
reaches others only by dialling out. Where namespaces cannot be made, sites are addresses 127.0.x.1.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """Where processes run: a prefix for their commands and an address others may dial."""

    name: str
    address: str
    namespace: str | None = None

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs `arguments` at this site."""
        if self.namespace is None:
            return list(arguments)
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def listeners(self) -> list[str]:
        """Return what listens at this site for the outside, as `address:port`; loopback is left out."""
        found: list[str] = []
        text = subprocess.run(
            self.command(["cat", "/proc/net/tcp", "/proc/net/tcp6"]),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for line in text.splitlines():
            fields = line.split()
            if len(fields) < 4 or fields[3] != "0A":
                continue
            address, _, port = fields[1].partition(":")
            loopback = address.endswith("7F") or address == "0" * 24 + "01000000"
            if not loopback:
                found.append(f"{address}:{int(port, 16)}")
        return found


@contextlib.contextmanager
def sites(*names: str) -> Iterator[dict[str, Site]]:
    """Make sites that can reach each other, and remove them."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not _namespaces_work():
        yield {n: Site(n, f"127.0.{i + 1}.1") for i, n in enumerate(names)}
        return
    tag = secrets.token_hex(2)
    bridge = f"atoll{tag}"
    made: dict[str, Site] = {}
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", "10.214.77.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            namespace, outer, inner = f"atoll-{tag}-{i}", f"ao{tag}{i}", f"ai{tag}{i}"
            _ip("netns", "add", namespace)
            site = Site(name, f"10.214.77.{i + 10}", namespace)
            made[name] = site
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
            _ip("link", "set", outer, "master", bridge, "up")
            for words in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{site.address}/24", "dev", inner),
                ("link", "set", inner, "up"),
            ):
                subprocess.run(site.command(["ip", *words]), check=True, capture_output=True)
        yield made
    finally:
        for site in made.values():
            subprocess.run(["ip", "netns", "del", str(site.namespace)], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)


def _namespaces_work() -> bool:
    name = f"atoll-try-{secrets.token_hex(2)}"
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    if tried.returncode != 0:
        return False
    subprocess.run(["ip", "netns", "del", name], check=False)
    return True


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
