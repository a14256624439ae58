"""What a fleet's gateway is told when it is started, and when the fleet is brought up again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.control.operation import entrance
from atoll.control.operation.entrance import EntranceSettings, open_entrance
from atoll.control.operation.fleet_home import Daemon, FleetHome
from atoll.control.operation.graph_entrance import write_graph_config
from atoll.core.errors import InputError
from atoll.deploy.local.daemon import ProcessId, process_start
from atoll.runtime.gateway.standalone import read_config, read_settings
from atoll.runtime.task_fleet.parts import stand_in_parts


def test_settings_of_the_gateway_are_kept_where_it_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    ended: list[Daemon | None] = []

    def spawn(
        words: list[str],
        log: Path,
        said: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Daemon:
        started.append(list(words))
        process = ProcessId(pid=os.getpid(), start=process_start(os.getpid()) or "")
        return Daemon(process=process, log=str(log))

    monkeypatch.setattr(entrance, "_spawn", spawn)
    monkeypatch.setattr(entrance, "_await_hub", lambda *_: None)
    ready = {"url": "http://127.0.0.1:1", "admin_socket": "s"}
    monkeypatch.setattr(entrance, "_await_gateway", lambda *_: ready)
    home = FleetHome(tmp_path)
    given = tmp_path / "given.yaml"
    given.write_text("deadlines: {first_token_s: 300}\n")
    settings = EntranceSettings(port=0, given=read_settings(given, ["https://app.example"]))
    known = open_entrance(home, "lab", settings)
    gateway = next(words for words in started if "gateway" in words[:2])
    path = Path(gateway[gateway.index("--config") + 1])
    read = read_config(path)
    assert read.deadlines.first_token_s == 300.0
    assert read.cors is not None
    assert read.cors.origins == ("https://app.example",)
    assert path.stat().st_mode & 0o077 == 0
    # Brought up again without them they stay; others replace them, under the gateway that runs.
    open_entrance(home, "lab", EntranceSettings(port=0), known)
    assert read_config(path) == read
    again = EntranceSettings(port=0, given={"attempts": 9})
    open_entrance(home, "lab", again, known)
    assert json.loads(path.read_text()) == {"attempts": 9}
    assert len(started) == 2
    # Graph servers for any-to-any services, told to the gateway, and ended with them.
    write_graph_config(home, {"look": stand_in_parts(Catalog.default().model("qwen2.5-vl-7b"))})
    known = open_entrance(home, "lab", again, known)
    backends = read_config(path).backends
    for graph, words, backend in zip(known.graphs, started[-2:], backends, strict=True):
        assert words[0] == "atoll.deploy.commands.graph_node"
        assert words[words.index("--name") + 1] == graph.name == backend.id
        assert words[words.index("--port") + 1] == str(graph.port)
        assert (backend.models, backend.kind) == (("look",), "tasks")
        assert backend.url == f"http://127.0.0.1:{graph.port}"
        assert "qwen2.5-vl-7b" in backend.metadata["stand_in"]
    assert open_entrance(home, "lab", again, known) == known
    assert len(started) == 4
    monkeypatch.setattr(entrance, "end_daemon", ended.append)
    write_graph_config(home, {})
    without = open_entrance(home, "lab", EntranceSettings(port=0), known)
    assert without.graphs == ()
    assert ended == [*known.graphs]
    assert json.loads(path.read_text()) == {"attempts": 9}


@pytest.mark.parametrize(
    ("text", "field"),
    [("port: 1", "port"), ("backends: []", "backends"), ("deadlines: {soon_s: 1}", "soon_s")],
)
def test_settings_that_are_not_for_others_are_refused(
    tmp_path: Path, text: str, field: str
) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=field):
        read_settings(path)
    with pytest.raises(InputError, match="origin"):
        read_settings(None, ["app.example/page"])
