"""What is planned runs, for a few of the fleets that `benchmarks.runnable` looks at."""

from __future__ import annotations

import pytest

from atoll.catalog import Catalog
from atoll.plan.files.fleet_file import parse_fleet
from benchmarks.planning.runnable import PlannedCommand, ask_parsers, look_at
from benchmarks.planning.runnable_fleets import FLEETS
from tools import own_parsers
from tools.own_parsers import ReadCommand
from tools.real_engines import UnavailableError

LONG = ("V100 machines alone", "gpt-oss on A10G", "MI300X boxes")
FEW = ("phases apart asked for", "a MacBook alone", "a Mac Studio beside a 4090")


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_every_instance_has_an_engine_a_command_and_room(name: str) -> None:
    found = look_at(parse_fleet(FLEETS[name]), Catalog.default())
    assert found.instances > 0
    assert found.without_command == []
    assert found.over_memory == []
    assert found.differs == []
    assert found.served == 1.0
    assert "-" not in found.run_by
    assert len({each.instance for each in found.commands}) == found.instances
    for each in found.commands:
        server = each.words[:2] == ("vllm", "serve") or each.words[0] == "llama-server"
        assert server or "--order" in each.words
        assert not any("@" in word for word in each.words if "--order" not in each.words)


def test_what_an_engines_own_parser_does_not_take_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(engine: str, commands: list[tuple[str, ...]]) -> list[ReadCommand]:
        if engine == "sglang":
            raise UnavailableError("there is no driver here")
        assert commands == [("vllm", "a"), ("vllm", "b"), ("vllm", "c")]
        return [ReadCommand(1, 4096, 2048), ReadCommand(2, 4096, 2048), ReadCommand(refusal="no")]

    monkeypatch.setattr(own_parsers, "read_commands", read)
    wanted = ReadCommand(1, 4096, 2048)
    asked = [PlannedCommand(word, "vllm", ("vllm", word), wanted) for word in "abc"]
    asked += [
        PlannedCommand("d", "sglang", ("python3",), wanted),
        PlannedCommand("e", "atoll", ("python3", "--order", "{}"), ReadCommand(1)),
    ]
    refused, skipped = ask_parsers(asked)
    assert [line.partition(":")[0] for line in refused] == ["e", "b", "c"]
    assert skipped == {"sglang": "1 commands: there is no driver here"}
