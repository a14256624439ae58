"""A real vLLM server on cores under an executor's component: vectors in prompts, going on, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.components.base import Done, Setup
from atoll.engine.engine_errors import EngineError
from atoll.runtime.executor.vllm_chat import VllmChat
from tests.real.fleet import READY_S
from tools.real_engines import UnavailableError, find_engine

pytestmark = [pytest.mark.slow, pytest.mark.engine]
TOKENS = 16
ROWS = 5


def test_answers_about_vectors_are_those_of_transformers(tmp_path: Path) -> None:
    """Greedy tokens over random vectors between texts, whole and gone on with; a killed server fails them."""
    pytest.importorskip("torch", reason="needs the extra 'engine'")
    from tests.tiny_model import write_tiny_model

    try:
        real = find_engine("vllm", build=True)
    except UnavailableError as error:
        pytest.skip(f"vLLM cannot run here: {error}")
    # On cores, vLLM has attention for heads of 64.
    folder = write_tiny_model(tmp_path / "tiny", width=256)
    program = str(Path(real.python).with_name("vllm"))
    options = {"model": str(folder), "program": program, "log": str(tmp_path / "vllm.log")}
    limits = {"max_batch": 4, "max_length": 512, "ready_s": READY_S}
    component = VllmChat.load(Setup(options=options | limits))
    asyncio.run(_try(component, folder))


async def _try(component: VllmChat, folder: Path) -> None:
    rows = np.random.default_rng(0).normal(scale=0.3, size=(ROWS, 256)).astype(np.float32)
    content = [
        {"type": "text", "text": "look at"},
        {"type": "embeds", "embeds": rows},
        {"type": "text", "text": "and say"},
    ]
    asked = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "temperature": 0.0,
    }
    await component.start()
    server = component.engine._server
    try:
        several = await asyncio.gather(*(_tokens(component.stream(asked)) for _ in range(3)))
        assert several[0] == several[1] == several[2] == _expected(component, folder, rows)
        known = several[0][: TOKENS // 2]
        resume = {"text": component.engine.codec.decode(known), "token_ids": known}
        assert (
            await _tokens(component.stream(asked | {"resume": resume})) == several[0][len(known) :]
        )
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        assert server._ended is not None
        await asyncio.wait_for(asyncio.shield(server._ended), 60.0)
        with pytest.raises(EngineError):
            await _tokens(component.stream(asked))
    finally:
        await component.close()
    assert server.has_ended


async def _tokens(stream: AsyncIterator[Any]) -> list[int]:
    found: list[int] = []
    async for piece in stream:
        if isinstance(piece, Done):
            assert piece.value["completion_tokens"] >= len(found)
        else:
            found += piece["token_ids"]
    return found


def _expected(component: VllmChat, folder: Path, rows: np.ndarray[Any, Any]) -> list[int]:
    """Return what transformers answers to the same vectors."""
    import torch
    import transformers

    codec = component.engine.codec
    prompt = codec.render_chat([{"role": "user", "content": "look at|and say"}])
    before, after = (codec.encode(text, special=False) for text in prompt.split("|"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    table = model.get_input_embeddings()
    with torch.inference_mode():
        embeds = torch.cat(
            [table(torch.tensor(before)), torch.from_numpy(rows), table(torch.tensor(after))]
        )
        given = {"inputs_embeds": embeds[None], "do_sample": False, "max_new_tokens": TOKENS}
        tokens: list[int] = model.generate(**given)[0].tolist()
    return tokens
