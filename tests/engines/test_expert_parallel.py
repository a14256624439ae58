"""Experts spread over GPUs: the commands of engines that do it, read back, and those that do not by name."""

from __future__ import annotations

import pytest

from atoll.core.errors import InputError
from atoll.engines.engine import Engine, EngineLayout, ServedModel, ServerHost
from atoll.engines.limits import EngineLaunch, EngineLimits
from atoll.engines.llamacpp import ENGINE as LLAMACPP
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.stage import ENGINE as STAGE
from atoll.engines.vllm import ENGINE as VLLM

HOST = ServerHost("8000", "python3")


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
@pytest.mark.parametrize(("tp", "copies"), [(8, 1), (2, 4), (1, 8)])
@pytest.mark.parametrize("sequences", [None, 64])
def test_a_command_is_read_back(
    engine: Engine, tp: int, copies: int, sequences: int | None
) -> None:
    launch = EngineLaunch(expert_parallel=True, max_num_seqs=sequences)
    layout = EngineLayout("one", 1, tp, copies, (48,))
    command = engine.command(layout, ServedModel("hf://org/moe", ("chat",), launch), HOST)
    parsed = engine.parse(command)
    assert (parsed.tp, parsed.copies) == (tp, copies)
    assert parsed.served.launch == engine.settle(launch)
    again = ServedModel("hf://org/moe", ("chat",), parsed.served.launch)
    assert engine.command(layout, again, HOST) == command


def test_options_are_those_of_the_engines() -> None:
    launch = EngineLaunch(expert_parallel=True, max_num_seqs=64, max_num_batched_tokens=2048)
    layout = EngineLayout("one", 1, 2, 4, (48,))
    served = ServedModel("org/moe", ("chat",), launch)
    vllm = " ".join(VLLM.command(layout, served, HOST).arguments)
    assert "--tensor-parallel-size 2" in vllm
    assert "--data-parallel-size 4" in vllm
    assert "--enable-expert-parallel" in vllm
    assert "--max-num-seqs 64" in vllm
    sglang = " ".join(SGLANG.command(layout, served, HOST).arguments)
    # It counts GPUs, sequences and tokens of all ranks, and deals them out.
    assert "--tp 8" in sglang
    assert "--ep-size 8 --dp-size 4 --enable-dp-attention" in sglang
    assert "--max-running-requests 256" in sglang
    assert "--chunked-prefill-size 8192" in sglang


@pytest.mark.parametrize("engine", [STAGE, LLAMACPP], ids=lambda engine: engine.name)
def test_engines_that_cannot_are_named(engine: Engine) -> None:
    limits = EngineLimits(expert_parallel=True)
    said = f"{engine.title} does not spread experts over GPUs"
    assert engine.refuses_launch(limits) == said
    with pytest.raises(InputError, match=said):
        engine.check_layout(EngineLayout("one", 1, 1, 1, (48,)), limits)


def test_without_it_commands_are_as_before() -> None:
    layout = EngineLayout("one", 1, 2, 4, (48,))
    for engine in (VLLM, SGLANG):
        plain, told = (
            engine.command(layout, ServedModel("org/moe", ("chat",), launch), HOST)
            for launch in (EngineLaunch(), EngineLaunch(expert_parallel=False))
        )
        assert plain == told
        assert not {"--enable-expert-parallel", "--ep-size"} & set(plain.arguments)
