"""Show the dashboard on a gateway and a planner that are not there, to look at its pages.

    python -m tests.dashboard.play [--port 8090] [--static DIR] [--no-gateway] [--no-planner] [--no-keys]

Files of pages are read anew for every request. Keys to log in with: atoll-root (admin), atoll-notebook
(member), atoll-finance (viewer).
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from atoll.cli.console_inside import load_api
from atoll.dashboard.links import LoginLinks
from atoll.dashboard.server import Dashboard, DashboardSettings
from atoll.dashboard.services import ServiceAddress, ServiceDirectory
from atoll.dashboard.static import FOLDER
from atoll.runtime.http.program import close_when_told, run
from tests.dashboard.fakes import FakeDesk, FakeGateway


async def play(options: argparse.Namespace) -> None:
    gateway, planner = FakeGateway(keys_needed=not options.no_keys), FakeDesk()
    await gateway.start()
    services = ServiceDirectory(
        None if options.no_gateway else ServiceAddress(gateway.url, token=gateway.token),
        None if options.no_planner else planner,
    )
    settings = DashboardSettings(port=options.port, static=options.static, follow_static=True)
    with tempfile.TemporaryDirectory() as folder:
        links = LoginLinks(Path(folder))
        dashboard = Dashboard(settings, services, links, load_api)
        host, port = await dashboard.start()
        for _ in range(options.links):
            sys.stdout.write(f"http://{host}:{port}/#token={links.make()}\n")
        sys.stdout.write("or log in with atoll-root, atoll-notebook or atoll-finance\n")
        sys.stdout.flush()

        async def close() -> None:
            await dashboard.close()
            await gateway.close()

        await close_when_told(close)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--static", type=Path, default=FOLDER)
    parser.add_argument("--no-gateway", action="store_true")
    parser.add_argument("--no-planner", action="store_true")
    parser.add_argument("--no-keys", action="store_true", help="the gateway asks for no keys")
    parser.add_argument(
        "--links", type=int, default=3, help="how many links to print; each logs in once"
    )
    logging.basicConfig(level=logging.INFO)
    run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
