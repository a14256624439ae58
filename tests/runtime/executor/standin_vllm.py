#!/usr/bin/env python
"""Stands in for the program `vllm`: `serve MODEL --port N ...`, on loopback, for whoever has the key.

It answers with tokens that count on from the length of the prompt, and ends before it serves where MODEL
has a file `broken`.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = os.environ["VLLM_API_KEY"]
LONGEST = 48


class Pages(BaseHTTPRequestHandler):
    """The two pages that are asked for."""

    def do_GET(self) -> None:
        """Name the model."""
        if self._allowed():
            self._send({"data": [{"id": "llm", "max_model_len": LONGEST}]})

    def do_POST(self) -> None:
        """Stream an answer."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._allowed():
            return
        self.send_response(200)
        self.end_headers()
        first, many = len(asked["prompt"]), asked["max_tokens"]
        for at in range(many):
            end = "length" if at == many - 1 else None
            choice = {"text": "", "token_ids": [first + at], "finish_reason": end}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _allowed(self) -> bool:
        if self.headers.get("authorization") == f"Bearer {KEY}":
            return True
        self.send_error(401)
        return False

    def _send(self, body: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def main() -> None:
    """Serve, or say what is wrong."""
    words = sys.argv
    if words[1] != "serve" or "--enable-prompt-embeds" not in words:
        sys.exit("not as vLLM is started")
    if Path(words[2], "broken").exists():
        sys.exit("ValueError: no such architecture")
    port = int(words[words.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Pages).serve_forever()


if __name__ == "__main__":
    main()
