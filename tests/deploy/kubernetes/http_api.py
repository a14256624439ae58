"""The API of this process behind a socket, for the official client's way in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.deploy.kubernetes.tiny_api import TinyApi

TOKEN = "right"


@contextmanager
def serve_api(api: TinyApi) -> Iterator[str]:
    """Serve an API on loopback; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_words: object, **_more: object) -> None:
            pass

        def _serve(self) -> None:
            url = urlsplit(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size) if size else None
            kind = self.headers.get("Content-Type") or "application/json"
            status, content = 401, b'{"kind": "Status", "message": "Unauthorized"}'
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                query = dict(parse_qsl(url.query))
                status, content = api.ask(
                    self.command, url.path, query=query, body=body, content_type=kind
                )
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_kubeconfig(path: Path, server: str, user: dict[str, Any]) -> None:
    """Write a kubeconfig of one cluster and one user."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content))
    path.chmod(0o600)
