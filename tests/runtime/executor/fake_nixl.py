"""Agents that read each other's memory as NIXL's do, within this process; each may be told to fail."""

from __future__ import annotations

import ctypes
from typing import Any


class FakeAgent:
    """An agent of NIXL.

    fault: "raise", "error" (the transfer ends as one), "never" (it does not end), "stuck" (nor can it be
    released), "other" (it brings other bytes).
    """

    def __init__(self, name: str, fault: str = "") -> None:
        self.name = name
        self.fault = fault
        self.known: set[str] = set()
        self.registered: list[tuple[int, int]] = []
        self.reads = 0
        self.released = 0

    def register_memory(self, reg_list: Any, mem_type: str) -> None:
        assert mem_type == "DRAM"
        self.registered += [(address, nbytes) for address, nbytes, _, _ in reg_list]

    def get_agent_metadata(self) -> bytes:
        return repr((self.name, self.registered)).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = metadata.decode().split("'")[1]
        assert name not in self.known
        self.known.add(name)
        return name.encode()

    def remove_remote_agent(self, agent: str) -> None:
        self.known.remove(agent)

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        assert mem_type == "DRAM"
        return descs

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str
    ) -> Any:
        assert operation == "READ"
        assert remote_agent in self.known
        (to, nbytes, _), (source, length, _) = local_descs[0], remote_descs[0]
        assert nbytes == length
        assert any(at <= to and to + nbytes <= at + size for at, size in self.registered)
        return to, source, nbytes

    def transfer(self, handle: Any) -> str:
        self.reads += 1
        if self.fault == "raise":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return "ERR" if self.fault == "error" else "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if self.fault in ("never", "stuck"):
            return "PROC"
        to, source, nbytes = handle
        ctypes.memmove(to, source, nbytes)
        if self.fault == "other":
            ctypes.memset(to, 7, 1)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        if self.fault == "stuck":
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.released += 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}
