"""A vision-language checkpoint served from the command line, its tower and its llm in separate processes."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'engine'")
pytest.importorskip("PIL", reason="needs the extra 'components'")

from tests.components.checkpoints import picture, write_checkpoint
from tests.components.vl_answers import generate

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
FLEET = """
services:
  look:
    model: qwen2.5-vl-7b
    rate: 0.5/s
    ttft: 8s
    tpot: 200ms
    paths: [[vision, llm]]
    classes:
      text: {share: 50%, input: 100, output: 50}
      image+text: {share: 50%, input: 100, output: 50, images: {count: 1, size: 640x480}}
pool:
  owned:
    nodes: {"T4:1": 1, "A100-80:1": 1}
"""
PARTS = """
services:
  look:
    parts:
      vision: {{transformers-vision: {{model: {folder}}}}}
      llm: {{transformers-chat: {{model: {folder}}}}}
"""
CONTENT = ["What is ", picture(16, 24, 1), " beside ", picture(40, 16, 2), "?"]


def ask(url: str, content: list[Any]) -> tuple[str, str]:
    """Return the answer to a message of texts and pictures, and the way it took."""
    from PIL import Image

    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            file = io.BytesIO()
            Image.fromarray(part).save(file, "png")
            url_ = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url_}})
    body = {
        "model": "look",
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": 24,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
        return said, answer.headers["x-atoll-path"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_planned_parts_answer_as_the_whole_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    model = write_checkpoint(folder, family)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "parts.yaml").write_text(PARTS.format(folder=folder))
    serving = [
        *(sys.executable, "-m", "atoll", "serve", str(tmp_path / "fleet.yaml")),
        *("--parts", str(tmp_path / "parts.yaml"), "--json", "--port", "0"),
    ]
    # Sockets need short paths.
    with tempfile.TemporaryDirectory(prefix="a") as short:
        process = subprocess.Popen(
            serving,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"XDG_RUNTIME_DIR": short},
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            try:
                line = process.stdout.readline()
                assert line, process.stderr.read()
                said, path = ask(json.loads(line)["url"], CONTENT)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    tokens = generate(model, folder, CONTENT, 24)
    expected = AutoTokenizer.from_pretrained(folder).decode(tokens, skip_special_tokens=True)
    assert said == expected
    assert "vision" in path
    assert "llm" in path
