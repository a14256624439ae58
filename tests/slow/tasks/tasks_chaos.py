"""Seeded kills of executors of an any-to-any model: no client may see any of them.

Two executors each hear and see, think, and speak, behind a graph server and a gateway, all as `atoll serve`
starts them. Clients ask all the time: text, pictures, spoken questions answered aloud, transcriptions,
speech. Again and again executors are killed (SIGKILL): any one; one that a stream is just coming from; both
of a kind, so that requests must wait; the one that made the inputs of a stream and then the one it comes
from, so that inputs must be made again. Every answer is compared with the one to the same request before
the first kill: letter by letter, byte by byte. At the end nothing may be left: no array, no process, no
folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable

from atoll.api.demo.asking import draw_circle
from atoll.core.listener import Listener
from atoll.plan.plan import Plan
from atoll.runtime.graph_server.graph_config import GraphService
from atoll.runtime.local.local_endpoints import LocalOptions
from atoll.runtime.local.serving import fetch_components, local_fleet
from atoll.runtime.task_fleet.deployment import PlacedExecutor, TaskDeployment
from atoll.runtime.task_fleet.parts import TASKS, tasks_over
from atoll.runtime.task_fleet.task_endpoint import store_folder
from benchmarks.report import Figure
from tests.e2e.operated_site import processes_of
from tests.e2e.small_parts import HERE
from tests.slow.tasks.checked_clients import show_requests
from tests.slow.tasks.task_clients import (
    KINDS,
    AskError,
    ClientOrder,
    HeardReply,
    ask,
    chat_order,
    picture_part,
    sound_part,
    speech_order,
    transcription_order,
)
from tests.slow.tasks.task_leftovers import ProcessWatch
from tests.slow.tasks.task_strikes import ChaosOutcome, TaskChaos
from tests.slow.verdict import conclude, percentile_s

MODEL = "assistant"
CLIENTS = 4
_EARS = ("silero-vad", "moonshine-encoder", "moonshine-decoder", "smollm2-vision")
_COPIES = 2


def deployment() -> TaskDeployment:
    """Return two executors of each kind, with one thread each."""
    kinds = {"ears": _EARS, "mind": ("smollm2",), "mouth": ("hibari",)}
    service = GraphService(
        name=MODEL,
        tasks=tasks_over([name for names in kinds.values() for name in names]),
        options={"voice_activity": True},
    )
    executors = tuple(
        PlacedExecutor(id=f"{kind}-{copy}", components={name: {} for name in names}, threads=1)
        for kind, names in kinds.items()
        for copy in range(_COPIES)
    )
    return TaskDeployment((service,), executors)


def small_deployment() -> TaskDeployment:
    """Return the same with a real voice and else small parts, which are back in a moment."""
    ear, scribe, eye, mind = (f"{HERE}:Small{name}" for name in ("Ear", "Scribe", "Eye", "Mind"))
    service = GraphService(
        name=MODEL,
        tasks={name: TASKS[name] for name in ("chat", "transcriptions", "speech")},
        options={"hear_encoder": ear, "hear_decoder": scribe, "see": eye, "think": mind},
    )
    kinds: dict[str, dict[str, dict[str, float]]] = {
        "ears": {ear: {}, scribe: {}, eye: {}},
        "mind": {mind: {"word_s": 0.05}},
        "mouth": {"hibari": {}},
    }
    executors = tuple(
        PlacedExecutor(id=f"{kind}-{copy}", components=components, threads=1)
        for kind, components in kinds.items()
        for copy in range(_COPIES)
    )
    # Executors are processes of their own, which must find these parts.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    return TaskDeployment((service,), executors)


async def make_orders(url: str) -> list[ClientOrder]:
    """Return what clients ask; the model speaks the questions that it will hear."""
    questions = ("What is the capital of France?", "Tell me a story about the picture.")
    spoken = []
    for text in questions:
        reply = HeardReply()
        await ask(url, speech_order(text, MODEL, text), reply)
        spoken.append(bytes(reply.sound))
    red, blue = draw_circle((220, 30, 30)), draw_circle((30, 30, 220))
    look = {"type": "text", "text": "Write a long story about what you see."}
    return [
        chat_order("chat-sea", MODEL, "chat", "Tell me three things about the sea.", 40),
        chat_order("chat-two", MODEL, "chat", "Count from one to ten in words.", 32),
        chat_order("vision-red", MODEL, "vision", [picture_part(red), look], 40),
        chat_order("vision-blue", MODEL, "vision", [picture_part(blue), look], 40),
        chat_order("spoken-france", MODEL, "spoken", [sound_part(spoken[0])], 40, aloud=True),
        chat_order(
            "spoken-red",
            MODEL,
            "spoken",
            [picture_part(red), sound_part(spoken[1])],
            40,
            aloud=True,
        ),
        transcription_order("transcription-france", MODEL, spoken[0]),
        transcription_order("transcription-picture", MODEL, spoken[1]),
        speech_order("speech-short", MODEL, "Good morning. The tide is low today."),
        speech_order(
            "speech-long",
            MODEL,
            "The first ship left at dawn. The second one waited for the wind. "
            "Nobody saw the third. All of them came home before the winter.",
        ),
    ]


async def chaos(
    tasks: TaskDeployment,
    make: Callable[[str], Awaitable[list[ClientOrder]]],
    *,
    kills: int,
    seed: int,
    clients: int = CLIENTS,
    tell: Callable[[str], None] = lambda _text: None,
) -> ChaosOutcome:
    """Serve a deployment here, strike it so many times while clients ask, and count what is left of it."""
    began_s = time.monotonic()
    plan = Plan(
        problem_hash="", problem_name="chaos", usd_per_hour=0, status="feasible", solver="hand"
    )
    watch = ProcessWatch()
    with local_fleet(
        plan,
        {},
        LocalOptions(),
        host="127.0.0.1",
        port=0,
        log=None,
        on_progress=lambda _name, _state, _reason: None,
        tasks=tasks,
    ) as fleet:
        home, store = fleet.home.folder, store_folder(fleet.home)
        await fleet.start()
        try:
            run = TaskChaos(fleet, await make(fleet.url), seed, clients, watch, tell)
            try:
                await run.run(kills)
                await run.count_left()
            except AskError as error:
                run.outcome.errors += 1
                run.outcome.notes.append(str(error))
        finally:
            watch.look()
            await fleet.stop(10.0)
    outcome = run.outcome
    left = [f"process {pid}" for pid in watch.survivors()]
    left += [f"process: {line}" for line in processes_of(home)]
    left += [folder.name for folder in (home, store) if folder.exists()]
    outcome.orphans = len(left)
    outcome.notes += [f"left: {each}" for each in left]
    outcome.wall_s = time.monotonic() - began_s
    own = resource.getrusage(resource.RUSAGE_SELF)
    outcome.cpu_s = watch.total_cpu_s + own.ru_utime + own.ru_stime
    return outcome


def show(outcome: ChaosOutcome) -> None:
    """Print what happened, and the figures."""
    show_requests(outcome)
    print(f"{'killed':14s} {'times':>6s}")
    for name, times in sorted(outcome.kills.items()):
        print(f"{name:14s} {times:6d}")
    for way, times in sorted(outcome.ways.items()):
        print(f"  as {way:9s} {times:6d}")
    print(
        f"{outcome.failovers} invocations went elsewhere, {outcome.remakes} inputs were lost with their "
        f"executor; {outcome.arrays_at_end} arrays held at the end, free after {outcome.free_after_s:.1f} s"
    )
    for note in outcome.notes[:20]:
        print(f"  {note}")
    all_s = [seconds for each in outcome.took_s.values() for seconds in each]
    names = ("errors", "wrong_answers", "leaked_handles", "orphans")
    conclude(
        [
            Figure("kills", outcome.kills.total()),
            *(Figure(name, getattr(outcome, name), 0) for name in names),
            Figure("requests", outcome.requests.total()),
            Figure("seconds_p50", percentile_s(all_s, 50)),
            Figure("seconds_p99", percentile_s(all_s, 99)),
            Figure("gap_s_p50", percentile_s(outcome.gaps_s, 50)),
            Figure("gap_s_p99", percentile_s(outcome.gaps_s, 99)),
            Figure("gap_s_max", percentile_s(outcome.gaps_s, 100)),
            Figure("back_s_p50", percentile_s(outcome.back_s, 50), None, "kill until ready again"),
            Figure("back_s_max", percentile_s(outcome.back_s, 100)),
            Figure("failovers", outcome.failovers),
        ],
        remakes=outcome.remakes,
        calm_differences=outcome.calm_differences,
        killed=dict(sorted(outcome.kills.items())),
        ways=dict(sorted(outcome.ways.items())),
        kinds={kind: outcome.requests[kind] for kind in KINDS},
        wall_s=round(outcome.wall_s, 1),
        cpu_s=round(outcome.cpu_s, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=None, help="how many (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="ten kills")
    parser.add_argument("--small", action="store_true", help="ten kills of small parts")
    chosen = parser.parse_args()
    kills = chosen.kills or (10 if chosen.quick or chosen.small else 100)
    tasks = small_deployment() if chosen.small else deployment()
    fetch_components(tasks, Listener())

    def tell(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    show(asyncio.run(chaos(tasks, make_orders, kills=kills, seed=chosen.seed, tell=tell)))


if __name__ == "__main__":
    main()
