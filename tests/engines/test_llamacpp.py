"""llama.cpp's server against our own reading of the same file: prompts equal, probabilities close."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import AtollError
from atoll.engines.engine import EngineLayout, ServedModel, ServerHost
from atoll.engines.limits import EngineLaunch
from atoll.engines.llamacpp import ENGINE as LLAMACPP
from atoll.runtime.endpoints.endpoint import gguf_file
from atoll.runtime.http.listen_address import free_ports
from tests.runtime.serving.test_instance import get, post

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LAUNCH = EngineLaunch(max_num_seqs=3, max_model_len=1024, max_num_batched_tokens=256)
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    for package in ("torch", "transformers", "xllamacpp"):
        pytest.importorskip(package, reason="needs the extras 'engine' and 'llamacpp'")
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    try:
        return resolve(DEFAULT_MODEL)
    except AtollError as error:
        pytest.skip(f"the model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def llamacpp(folder: Path) -> Iterator[str]:
    from atoll.engine.weights.sources import DEFAULT_MODEL

    port = free_ports(1)[0]
    served = ServedModel(str(gguf_file(LLAMACPP, DEFAULT_MODEL)), ("m",), LAUNCH)
    layout, host = EngineLayout("m", 1, 1, 1, (30,)), ServerHost(str(port), sys.executable, 1)
    command = LLAMACPP.command(layout, served, host).arguments
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(150):
            try:
                get(f"{url}/health")
                break
            except urllib.error.URLError:
                assert process.poll() is None
                time.sleep(0.2)
        yield url
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_it_runs_with_what_it_was_told(llamacpp: str) -> None:
    _, text = get(f"{llamacpp}/props")
    props = json.loads(text)
    assert props["total_slots"] == LAUNCH.max_num_seqs
    assert props["default_generation_settings"]["n_ctx"] == LAUNCH.max_model_len


def asked(url: str, path: str, **body: object) -> Any:
    status, answer = post(url, body, path)
    assert status == 200, answer
    return json.loads(answer)


def test_prompts_are_the_same_tokens(llamacpp: str, folder: Path) -> None:
    from atoll.engine.text import TextCodec

    text = asked(llamacpp, "/apply-template", messages=CHAT)["prompt"]
    found = asked(llamacpp, "/tokenize", content=text, add_special=True, parse_special=True)
    assert found["tokens"] == TextCodec(folder).chat(CHAT)


def test_probabilities_are_close(llamacpp: str, folder: Path) -> None:
    import torch
    import transformers

    from atoll.engine.text import TextCodec

    prompt = TextCodec(folder).chat(CHAT)
    answer = asked(llamacpp, "/completion", prompt=prompt, n_predict=1, temperature=0, n_probs=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    for entry in answer["completion_probabilities"][0]["top_logprobs"]:
        # llama.cpp rounds activations to 8 bit.
        assert entry["logprob"] == pytest.approx(float(wanted[entry["id"]]), abs=0.5)
