"""How fast tensors go from one executor to another: `python -m benchmarks.any_to_any.tensor_wires`.

A store with a door (`ExecutorServer`) has a tensor of 1 MiB and one of 64 MiB; a client in another process
fetches each again and again, over TCP (checksums, chunks of 1 MiB, back-pressure), by NIXL where it is
installed, and through the fabric's tunnel over a hub (sealed, with credits). All on loopback, and between
network namespaces: there TCP and NIXL over a pair of virtual links, then with ports of the bridge that let
nobody but the hub through, so that the tunnel is the only way and `atoll.deploy.commands.reach` has to find
it. NIXL's UCX is told to use TCP alone: between machines without RDMA it has nothing else. Namespaces need
root; without them they are skipped. Times are medians, by the clock; `cpu_s_per_gb` counts both processes,
not the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from atoll.deploy.commands.meeting import FabricMeeting, MemberAddress, open_meeting
from atoll.deploy.commands.reach import TunnelEnd, reach
from atoll.fabric.identity.authority import Authority
from atoll.runtime.executor.executor_client import Dial, ExecutorClient
from atoll.runtime.executor.executor_server import ExecutorServer
from atoll.runtime.executor.nixl_wire import NixlMode, open_wire
from atoll.runtime.executor.store import ArrayStore
from atoll.runtime.http.program import run
from atoll.tasks.values import Handle
from benchmarks.report import Figure, finish, options
from tests.e2e.sites import Site, sites

SIZES = {"1mb": 2**20, "64mb": 64 * 2**20}
_TIMES = {"1mb": 40, "64mb": 5}
_QUICK_TIMES = {"1mb": 10, "64mb": 2}
_TOKEN = "tensor-wires-0123456789"  # noqa: S105
_STORE_BYTES = 256 * 2**20
_READY_S = 120.0
_LEASE_S = 3600.0


async def _far(address: str, folder: Path, nixl: NixlMode) -> None:
    """Keep tensors until standard input ends; say where they are."""
    place, _ = await open_meeting("wires", "far")
    assert isinstance(place, FabricMeeting)
    store = ArrayStore(folder, _STORE_BYTES, owner="far")
    wire = open_wire(nixl, "far", address)
    server = ExecutorServer("far", _TOKEN, store, wire=wire)
    host, port = await server.start(address, 0)
    own = MemberAddress(host=host, ports=(port, port))
    await place.enter("far", own)
    end = TunnelEnd(place, own)
    rng = np.random.default_rng(0)
    handles = {
        name: store.put(np.frombuffer(rng.bytes(size), np.uint8), "near", _LEASE_S)
        for name, size in SIZES.items()
    }
    said = {
        name: msgspec.to_builtins(replace(handle, host="elsewhere", path=""))
        for name, handle in handles.items()
    }
    print(json.dumps({"address": store.address, "handles": said}), flush=True)
    begun_s = time.process_time()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    busy_s = time.process_time() - begun_s
    await end.close()
    await server.close()
    await place.leave()
    store.close()
    if wire is not None:
        wire.close()
    print(json.dumps({"cpu_s": busy_s}), flush=True)


async def _near(way: str, said: dict[str, Any], times: dict[str, int]) -> None:
    """Fetch, and say how long each time took."""
    place, _ = await open_meeting("wires", "near")
    assert isinstance(place, FabricMeeting)
    host, _, port = said["address"].rpartition(":")
    end = TunnelEnd(place, MemberAddress(host="127.0.0.1", ports=(1, 1)))
    async with asyncio.timeout(_READY_S):
        while place.session_at(host, int(port)) is None:
            await asyncio.sleep(0.05)
    ways: dict[str, Dial] = {
        "tcp": asyncio.open_connection,
        "nixl": asyncio.open_connection,
        "tunnel": end.dial,
        "only": reach(end.dial),
    }
    wire = open_wire("always" if way == "nixl" else "never", "near", host)
    client = ExecutorClient(
        said["address"], _TOKEN, "near", connect_s=20.0, dial=ways[way], wire=wire
    )
    await client.connect()
    found: dict[str, list[float]] = {}
    busy_s = time.process_time()
    for name, size in SIZES.items():
        handle = msgspec.convert(said["handles"][name], Handle)
        for _ in range(times[name] + 1):
            began_s = time.perf_counter()
            array = await client.fetch(handle)
            found.setdefault(name, []).append(time.perf_counter() - began_s)
            assert array.nbytes == size
    busy_s = time.process_time() - busy_s
    await client.close()
    await end.close()
    await place.leave()
    if wire is not None:
        wire.close()
    print(json.dumps({"seconds": found, "cpu_s": busy_s}), flush=True)


@contextlib.contextmanager
def _process(
    site: Site, folder: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    environment = os.environ | {
        "ATOLL_FABRIC": f"@{folder / 'node.token'}",
        "ATOLL_ADDRESS": site.address,
        "UCX_TLS": "tcp",
    }
    command = site.command([sys.executable, "-m", *arguments])
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        process.kill()
        process.wait()


def _read(said: IO[str], what: str) -> dict[str, Any]:
    line = said.readline()
    if not line:
        raise RuntimeError(f"{what} ended without a word")
    found: dict[str, Any] = json.loads(line)
    return found


def _measure(way: str, machines: Sequence[Site], times: dict[str, int]) -> dict[str, float]:
    """Return milliseconds by size, bytes a second, and CPU seconds per GB of one way."""
    me = "benchmarks.any_to_any.tensor_wires"
    hub, far, near = machines
    with tempfile.TemporaryDirectory(prefix="wires-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        at = f"{hub.address}:{port}"
        authority = Authority.create(folder / "f", "wires", [at])
        (folder / "node.token").write_text(authority.issue("node", "wires", "worker").pack())
        token = f"@{folder / 'f' / 'hub-h0.token'}"
        stack.enter_context(_process(hub, folder, "atoll", "hub", token, f"--listen={at}"))
        _, far_out = far_process = stack.enter_context(
            _process(
                *(far, folder, me, "--role", "far", far.address, str(folder / "store")),
                "always" if way == "nixl" else "never",
            )
        )
        said = _read(far_out, "the far end")
        near_in = json.dumps({"way": way, "said": said, "times": times})
        _, near_out = stack.enter_context(_process(near, folder, me, "--role", "near", near_in))
        found = _read(near_out, "the near end")
        assert far_process[0].stdin is not None
        far_process[0].stdin.write("\n")
        far_process[0].stdin.flush()
        cpu_s = found["cpu_s"] + _read(far_out, "the far end")["cpu_s"]
    # The first of each is a warm-up.
    medians = {size: statistics.median(found["seconds"][size][1:]) for size in SIZES}
    moved = sum(SIZES[size] * len(found["seconds"][size]) for size in SIZES)
    return {
        **{f"ms_{size}": round(1e3 * seconds, 2) for size, seconds in medians.items()},
        "bytes_per_s": round(SIZES["64mb"] / medians["64mb"]),
        "cpu_s_per_gb": round(cpu_s / (moved / 1e9), 2),
    }


def measure_wires(times: dict[str, int]) -> tuple[dict[str, dict[str, float]], str]:
    """Return the figures of every way, and why some were skipped ("": none was)."""
    local = [Site(name, f"127.0.{n}.1") for n, name in enumerate(("hub", "far", "near"), 1)]
    direct = ("tcp", "nixl") if find_spec("nixl") else ("tcp",)
    skipped = "" if "nixl" in direct else "NIXL is not installed"
    found = {way: _measure(way, local, times) for way in (*direct, "tunnel")}
    with sites("hub", "far", "near") as made:
        apart = [made[name] for name in ("hub", "far", "near")]
        if apart[0].namespace is None:
            return found, "no network namespaces can be made here"
        for way in direct:
            found[f"{way}_namespaces"] = _measure(way, apart, times)
        for site in apart[1:]:
            # As `tests.e2e.sites` names its links: ports that reach the hub's alone.
            _, tag, number = str(site.namespace).split("-")
            words = ["bridge", "link", "set", "dev", f"ao{tag}{number}", "isolated", "on"]
            subprocess.run(words, check=True)
        found["tunnel_namespaces"] = _measure("only", apart, times)
    return found, skipped


def main() -> None:
    """Print a table, then one line of JSON; with --role run one end."""
    if sys.argv[1:2] == ["--role"]:
        if sys.argv[2] == "far":
            run(
                _far(
                    sys.argv[3], Path(sys.argv[4]), "always" if sys.argv[5] == "always" else "never"
                )
            )
        else:
            run(_near(**json.loads(sys.argv[3])))
        return
    quick = options("How fast tensors go from one executor to another.").quick
    found, skipped = measure_wires(_QUICK_TIMES if quick else _TIMES)
    print(f"{'':<20}{'ms of 1 MiB':>14}{'ms of 64 MiB':>14}{'MB/s':>9}{'CPU s/GB':>10}")
    for way, row in found.items():
        print(
            f"{way:<20}{row['ms_1mb']:>14.2f}{row['ms_64mb']:>14.1f}"
            f"{row['bytes_per_s'] / 1e6:>9.0f}{row['cpu_s_per_gb']:>10.2f}"
        )
    if skipped:
        print(f"skipped: {skipped}")
    figures = [
        Figure(f"{way}_{name}", value) for way, row in found.items() for name, value in row.items()
    ]
    finish(figures, skipped=skipped, load_average=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    main()
