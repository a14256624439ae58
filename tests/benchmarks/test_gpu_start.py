"""What `benchmarks.gpu_start` reads out of vLLM's log, and how it times a server."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from atoll.runtime.http.listen_address import free_ports
from benchmarks.hardware import gpu_start
from benchmarks.hardware.gpu_start import (
    COLUMNS,
    PHASES,
    LogLine,
    launch_words,
    read_kept,
    read_said,
    read_starts,
    show,
    split_phases,
    time_start,
)

COLD = """
 9.5 (EngineCore_0 pid=1) INFO [gpu_model_runner.py:5038] Starting to load model model-8b...
21.0 (EngineCore_0 pid=1) INFO [default_loader.py:398] Loading weights took 10.25 seconds
22.0 (EngineCore_0 pid=1) INFO [gpu_model_runner.py:5133] Model loading took 14.99 GiB memory and 12.1 seconds
30.0 (EngineCore_0 pid=1) INFO [backends.py:1149] Dynamo bytecode transform time: 7.10 s
72.0 (EngineCore_0 pid=1) INFO [monitor.py:48] torch.compile took 49.50 s in total
80.0 (EngineCore_0 pid=1) INFO [monitor.py:81] Initial profiling/warmup run took 7.90 s
81.0 (EngineCore_0 pid=1) INFO [gpu_worker.py:467] Available KV cache memory: 110.0 GiB
81.5 (EngineCore_0 pid=1) INFO [kv_cache_utils.py:1733] GPU KV cache size: 900,000 tokens
95.0 (EngineCore_0 pid=1) INFO [gpu_model_runner.py:6457] Graph capturing finished in 12 secs, took 0.60 GiB
96.0 (EngineCore_0 pid=1) INFO [core.py:303] init engine (profile, create kv cache, warmup model) took 74.00 s
"""
KEPT = """
 9.5 INFO [gpu_model_runner.py:5038] Starting to load model model-8b...
12.0 INFO [gpu_model_runner.py:5133] Model loading took 14.99 GiB memory and 2.1 seconds
14.0 INFO [decorators.py:312] Directly load AOT compilation from path /kept/vllm/model
20.0 INFO [gpu_worker.py:467] Available KV cache memory: 110.0 GiB
"""


def lines_of(text: str) -> list[LogLine]:
    pairs = (line.split(maxsplit=1) for line in text.strip().splitlines())
    return [LogLine(float(at_s), said) for at_s, said in pairs]


def test_phases_add_up_to_the_whole_start() -> None:
    found = split_phases(lines_of(COLD), 100.0)
    expected = (9.5, 12.5, 50.0, 9.0, 14.0, 1.0, 4.0)
    assert found == pytest.approx(dict(zip(PHASES, expected, strict=True)))
    kept = split_phases(lines_of(KEPT), 30.0)
    assert (kept["compile"], kept["profile"], kept["graphs"], kept["ready"]) == (2.0, 6.0, 0.0, 10)
    assert sum(kept.values()) == 30.0
    assert split_phases([], 5.0)["ready"] == 5.0
    # Lines of two processes that came in another order.
    swapped = [LogLine(3.0, "Model loading took"), LogLine(4.0, "Starting to load model")]
    assert split_phases(swapped, 6.0) == dict.fromkeys(PHASES, 0.0) | {"process": 4.0, "ready": 2.0}


def test_what_vllm_says_itself_is_kept_beside() -> None:
    said = {"said_weights_s": 10.25, "said_compile_s": 49.5, "said_graphs_s": 12.0}
    assert read_said(lines_of(COLD)) == said | {"said_engine_s": 74.0}
    assert read_said(lines_of(KEPT)) == {}


def test_graphs_of_an_earlier_start_are_loaded_or_refused() -> None:
    assert read_kept(lines_of(COLD)) == ""
    assert read_kept(lines_of(KEPT)) == "loaded"
    again = LogLine(3.0, "Compiling model again due to a load failure from /kept/model, reason: x")
    assert read_kept([again, *lines_of(COLD)]) == "refused"


def test_a_server_is_timed_until_it_answers_and_ended(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = (
        "import http.server as h\n"
        "print('Starting to load model x', flush=True)\n"
        "class P(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        f"h.HTTPServer(('127.0.0.1', {port}), P).serve_forever()\n"
    )
    log = tmp_path / "log"
    ready_s, lines = time_start([sys.executable, "-c", server], port, log)
    assert lines[0].text == "Starting to load model x"
    assert lines[0].at_s > 0.0 < ready_s
    assert "Starting to load model x" in log.read_text()
    assert not gpu_start._answers(port)
    with pytest.raises(SystemExit, match="did not come up"):
        time_start([sys.executable, "-c", "pass"], port, log)


def test_the_command_is_that_of_atoll_with_kept_compilations(tmp_path: Path) -> None:
    words = launch_words(tmp_path / "model", 8123, tmp_path / "kept")
    assert "atoll.runtime.endpoints.compile_cache" in words
    assert words[words.index("--") + 1 :][:2] == ["vllm", "serve"]
    # The same folder for all starts: the port is no part of its name.
    assert words[4:7] == launch_words(tmp_path / "model", 9, tmp_path / "kept")[4:7]


def test_rows_are_read_back_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu_start.csv"
    for loader, start, text, ready_s in (
        ("dummy", "cold", COLD, 100.0),
        ("dummy", "kept", KEPT, 30.0),
        ("auto", "kept", KEPT, 40.0),
    ):
        phases = {f"{k}_s": v for k, v in split_phases(lines_of(text), ready_s).items()}
        row = {"model": "m", "load_format": loader, "start": start, "total_s": ready_s, **phases}
        gpu_start._append(path, row)
    with path.open() as stream:
        assert tuple(next(csv.reader(stream))) == COLUMNS
    show(list(read_starts(path)))
    last = capsys.readouterr().out.splitlines()[-1]
    for said in ('"cold_s": 100.0', '"kept_s": 30.0', '"weights_auto_s": 2.5'):
        assert said in last
    show(list(read_starts(tmp_path / "none.csv")))
    assert '"cold_s": null' in capsys.readouterr().out.splitlines()[-1]
