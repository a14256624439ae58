"""A node of the check of churn: a member of the fabric with an engine inside, and no port open."""

from __future__ import annotations

import argparse

import uvloop

from atoll.fabric.identity.access import Access
from atoll.fabric.registry.records import Metadata, NodeService, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.tunnel.tunnel_server import TunnelServer
from tests.slow.churn.churn_engine import MODEL, Engine


async def serve(token: str, kind: str, width: int, step_s: float) -> None:
    """Join, say so on stdout, and serve for ever."""
    metadata = Metadata(
        name="node",
        provider="",
        role="worker",
        engine=kind,
        services=(NodeService(model=MODEL, precision="bf16", context=4096),),
        usd_per_mtoken_out=1.0,
    )
    engine = Engine(width)
    fabric = await Fabric.connect(Access.open(token), metadata)
    answerer = TunnelServer(fabric, engine.handle)
    await fabric.announce(SessionState.SERVING)
    print("ready", fabric.sid, flush=True)
    try:
        await engine.run(step_s)
    finally:
        await answerer.close()
        await fabric.close()


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("token", help="of the fabric; @FILE to read it")
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=100.0)
    options = parser.parse_args()
    uvloop.run(serve(options.token, options.kind, options.width, options.step_ms / 1e3))


if __name__ == "__main__":
    main()
