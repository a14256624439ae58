"""A fleet of an any-to-any model, brought up and operated here: its file, its processes, what it leaves.

Its parts are small, so that they start in a moment: eyes, ears and mind whose answers tell every byte that
came in, and a real voice. Machines are processes of this one (`--pretend`), and how much a part carries is
the fleet file's to say: so a mix decides how many executors of which kind the plan wants.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.control.operation.control_loop import PlanInForce
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.operated import look_at_targets
from atoll.deploy.target import InstanceStatus
from atoll.runtime.executor.store import SHARED_MEMORY
from atoll.runtime.http.http_client import fetch
from benchmarks.report import ROOT
from tests.e2e.operated_site import Site, processes_of
from tests.e2e.small_parts import HERE
from tests.slow.processes import find_marked
from tests.slow.tasks.task_leftovers import ProcessWatch

MODEL = "assistant"
RATE_PER_S = 2.0
WORD_S = 0.04
CLASSES = {"chat": "text", "vision": "image+text", "spoken": "audio -> audio"}
"""The class of each kind of request (`tests.slow.tasks.task_clients.KINDS`)."""
_EXECUTOR = b"atoll.deploy.commands.executor_node"
_FLEET = """\
name: lab
services:
  {model}:
    model: smollm2-assistant
    rate: {rate:g}/s
    ttft: 4s
    tpot: 400ms
    paths: [[vision, audio, llm, speech]]
    classes:
      text: {{share: {chat}%, input: 40, output: 24}}
      image+text: {{share: {vision}%, input: 40, output: 24, images: {{count: 1, size: 640x480}}}}
      audio -> audio: {{share: {spoken}%, input: 40, output: 24, audio: 2s, speech: 6s, ahead: 1s}}
    rates:
      vision: {{CORE: {{image: 1/s}}}}
      audio: {{CORE: {{audio_s: 2/s}}}}
      llm: {{CORE: {{token: 150/s}}}}
      speech: {{CORE: {{speech_s: 6/s}}}}
pool:
  owned:
    here: {{"CORE:1": {{count: 16, usd_per_hour: $0.05/h}}}}
catalog:
  gpus:
    CORE: {{like: T4, bandwidth: 20GB/s, fp16_tflops: 2, source: "small parts that wait"}}
"""
_PARTS = f"""\
services:
  {MODEL}:
    parts:
      vision: ["{HERE}:SmallEye"]
      audio: ["{HERE}:SmallEar", "{HERE}:SmallScribe"]
      llm: {{"{HERE}:SmallMind": {{word_s: {WORD_S}}}}}
      speech: [hibari]
    tasks:
      chat: "atoll.tasks.library.assistant:SpeakingAssistant"
      transcriptions: "atoll.tasks.library.transcription:Transcription"
      speech: "atoll.tasks.library.speech:Speech"
    options:
      hear_encoder: "{HERE}:SmallEar"
      hear_decoder: "{HERE}:SmallScribe"
      see: "{HERE}:SmallEye"
      think: "{HERE}:SmallMind"
"""


@dataclass(frozen=True, slots=True)
class ClassMix:
    """Shares of the classes of requests, in percent."""

    chat: int
    vision: int
    spoken: int

    def share(self, kind: str) -> float:
        """Return the share of a kind of request."""
        return float(getattr(self, kind)) / 100.0

    def fleet_file(self) -> str:
        """Return the fleet file of a fleet whose requests mix so."""
        mix = {"chat": self.chat, "vision": self.vision, "spoken": self.spoken}
        return _FLEET.format(model=MODEL, rate=RATE_PER_S, **mix)


MIXES = (ClassMix(70, 20, 10), ClassMix(20, 70, 10), ClassMix(20, 20, 60), ClassMix(34, 33, 33))


class LiveFleet:
    """A fleet in a folder, operated by processes of its own; `url` is its gateway's once it is up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Short, since sockets lie below it; of its own, since what is left there is counted.
        self._runtime = folder / "r"
        self._runtime.mkdir(mode=0o700)
        known = os.environ.get("PYTHONPATH", "")
        self.site = Site(
            folder,
            PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), known))),
            XDG_RUNTIME_DIR=str(self._runtime),
            OMP_NUM_THREADS="1",
        )
        self.home = FleetHome(folder / "state" / "fleets" / "lab")
        self.url = ""
        self._watch = ProcessWatch()
        self._stores: set[Path] = set()
        (folder / "parts.yaml").write_text(_PARTS)

    def bring_up(self, mix: ClassMix) -> None:
        """Bring it up for a mix, and wait until all of it serves."""
        self.use(mix)
        up = ("up", "lab.yaml", "--pretend", "--yes", "--port", "0", "--json")
        came = self.site.run(*up, "--parts", "parts.yaml", patience_s=900.0)
        self.url = json.loads(came.splitlines()[-1])["url"]

    def use(self, mix: ClassMix) -> None:
        """Have the fleet file say another mix; who operates the fleet reads it again."""
        path = self.folder / "lab.yaml"
        draft = path.with_suffix(".new")
        draft.write_text(mix.fleet_file())
        draft.replace(path)

    def operated(self) -> contextlib.AbstractContextManager[object]:
        """Operate it until left."""
        return self.site.running("operate", "lab.yaml", "--every", "15min", "--look", "1s", "--yes")

    def record(self) -> FleetRecord:
        """Return how it is operated."""
        found = self.home.read()
        assert found is not None
        return found

    def plan(self) -> PlanInForce | None:
        """Return the plan in force."""
        return self.home.read_plan()

    def statuses(self) -> dict[str, InstanceStatus]:
        """Return what stands of it, by name; what has failed or gone is left out."""
        (look,) = look_at_targets(self.home, self.record())
        return {
            status.labels.instance: status
            for status in look.statuses
            if status.state not in ("failed", "gone")
        }

    def is_settled(self) -> bool:
        """Return whether all of the plan in force serves, and nothing else stands."""
        found = self.plan()
        wanted = set() if found is None else {one.id for one in found.plan.instances}
        standing = self.statuses()
        ready = {name for name, status in standing.items() if status.state == "ready"}
        return bool(wanted) and ready == wanted == standing.keys()

    # Processes

    def executors(self) -> dict[str, tuple[int, str]]:
        """Return the process of every executor and the address of its pages."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                environ = path.with_name("environ").read_bytes()
                if _EXECUTOR in words[:3] and os.fsencode(self._runtime) in environ:
                    name, port = (_option(words, option) for option in (b"--name", b"--port"))
                    found[name] = int(path.parent.name), f"http://127.0.0.1:{port}"
        return found

    def graph_servers(self) -> dict[str, tuple[int, str]]:
        """Return the process of every graph server that runs and its address."""
        at = self.record().entrance
        return {
            graph.name: (graph.process.pid, f"http://127.0.0.1:{graph.port}")
            for graph in (() if at is None else at.graphs)
            if graph.is_alive
        }

    def kill(self, pid: int) -> bool:
        """Kill a process with SIGKILL; False where it was gone."""
        self.look()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    # What is left

    def look(self) -> None:
        """Take note of all processes and stores that there are now."""
        self._watch.look(self._pids())
        self._stores |= self._open_stores()

    async def count_arrays(self) -> int:
        """Return how many arrays are held, and requests run: 0 once nobody asks and leases are over."""
        found = 0
        for _, url in self.executors().values():
            _, body = await fetch(f"{url}/atoll/v1/status", timeout_s=10.0)
            found += int(json.loads(body)["handles"])
        for _, url in self.graph_servers().values():
            _, body = await fetch(f"{url}/atoll/v1/status", timeout_s=10.0)
            said = json.loads(body)
            found += int(said["running"]) + (said["stored_bytes"] > 0)
        return found

    def take_down(self) -> None:
        """End all of it."""
        self.look()
        self.site.run("down", "lab", "--yes")

    def leftovers(self) -> list[str]:
        """Return what is left of it: processes, arrays in shared memory, folders of processes."""
        left = [f"process {pid}" for pid in self._watch.survivors()]
        left += [f"process: {line}" for line in processes_of(self.folder)]
        left += [f"shared memory: {path}" for path in sorted(self._stores) if path.exists()]
        return left + [f"folder: {path}" for path in sorted(self._homes())]

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its processes, as of the last look at each."""
        return self._watch.total_cpu_s

    def _homes(self) -> Iterator[Path]:
        yield from self._runtime.glob("**/run-*")

    def _open_stores(self) -> set[Path]:
        """Return the stores that its processes hold."""
        found = set()
        for pid in self._pids():
            with contextlib.suppress(OSError):
                names = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
                found |= {store for name in names if (store := store_of(name)) is not None}
        return found

    def _pids(self) -> list[int]:
        return find_marked("XDG_RUNTIME_DIR", self._runtime)


def store_of(opened: str) -> Path | None:
    """Return the store that an open file or folder lies in, though it may be deleted; None for others."""
    within = opened.removesuffix(" (deleted)").removeprefix(f"{SHARED_MEMORY}/")
    name, *_ = within.split("/")
    return SHARED_MEMORY / name if name.startswith("atoll") else None


def _option(words: list[bytes], name: bytes) -> str:
    return words[words.index(name) + 1].decode()
