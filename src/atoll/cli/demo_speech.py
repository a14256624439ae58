"""A spoken exchange: a question is spoken, heard, thought about with a picture, and answered aloud."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.api.demo.asking import (
    SOUND_RATE_HZ,
    DemoError,
    ask_aloud,
    draw_circle,
    speak,
    transcribe,
)
from atoll.cli.operating import TerminalListener
from atoll.cli.serving_loop import plan_for_serving
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras
from atoll.core.files import atomic_write

if TYPE_CHECKING:
    from atoll.api.served_plan import ServedPlan

EXAMPLE = "assistant"
QUESTION = "What do you see in the picture?"
_KILL_AFTER = 3
"""Pieces of an answer after which an executor is killed."""
_PLAN_S = 600.0


def need_speech() -> None:
    """Say what to install where a package of the spoken exchange is missing."""
    require_extras("serve", "engine", "components")


async def show_speech(
    folder: Path,
    say: Callable[[str], None],
    *,
    question: str = QUESTION,
    picture: Path | None = None,
    out: Path = Path("answer.wav"),
    first: int = 1,
) -> None:
    """Plan an assistant of small parts, bring it up, ask it aloud, kill an executor, and compare.

    `first` is the number of the first step that is told. The answer is written to `out`.
    """
    from atoll.api.demo.serving_beside import serve_beside
    from atoll.api.fleet import Fleet

    image = _read_picture(picture)
    path = folder / f"{EXAMPLE}.yaml"
    fleet = Fleet.load(path)
    say(f"\n{first}. Speech and pictures: a plan for an assistant of small parts ({path.name})")
    plan = await asyncio.to_thread(plan_for_serving, fleet, _PLAN_S)
    for instance in plan.instances:
        say(f"   {instance.id}: {instance.describe()}")
    say(
        f"\n{first + 1}. Serve: every executor a process, a graph server that runs the task, a gateway"
    )
    async with serve_beside(plan, TerminalListener(yes=True)) as served:
        (service,) = fleet.problem.services
        await _exchange(served, service.name, question, image, out, say, first + 2)


async def _exchange(
    served: ServedPlan,
    model: str,
    question: str,
    image: bytes,
    out: Path,
    say: Callable[[str], None],
    step: int,
) -> None:
    from atoll.runtime.media.wav import wav_header

    url = served.url
    for process, pid in served.processes.items():
        say(f"   process {pid}: {process}")
    say(f"   {url}/v1 answers")
    say(f'\n{step}. Speak the question: "{question}" (POST /v1/audio/speech)')
    spoken = await speak(url, model, question)
    asked = out.with_name(f"{out.stem}-question.wav")
    atomic_write(asked, spoken)
    heard = await transcribe(url, model, spoken)
    say(f'   {len(spoken) / 2 / SOUND_RATE_HZ:.1f} s of sound in {asked}; the ears hear: "{heard}"')
    say(f"\n{step + 1}. Ask aloud, with a picture; the answer is written and spoken as it comes")
    answer = await ask_aloud(url, model, spoken, image)
    say(f"   {answer.text}")
    atomic_write(out, wav_header(SOUND_RATE_HZ, len(answer.sound)) + answer.sound)
    say(
        f"   first text after {answer.first_text_s or 0:.2f} s, first sound after "
        f"{answer.first_sound_s or 0:.2f} s; {answer.seconds:.1f} s of speech in {out}"
    )
    say(f"   went over {answer.path}")
    if not answer.text or not answer.sound:
        raise DemoError("the answer has no text or no sound")
    say(f"\n{step + 2}. Ask again, and kill an executor in the middle of the answer (SIGKILL)")
    victim = _choose_victim(answer.path)

    def kill() -> None:
        pid = served.processes[victim]
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        say(f"   >>> killed process {pid} ({victim}) <<<")

    again = await ask_aloud(url, model, spoken, image, kill, _KILL_AFTER)
    if (again.text, again.sound) != (answer.text, answer.sound):
        raise DemoError("the answer differs from the undisturbed one")
    say("   The answer went on: letter by letter and sample by sample the same as undisturbed.")
    await served.wait_ready(victim)
    say(f"   {victim} runs again, as process {served.processes[victim]}.")


def _choose_victim(path: str) -> str:
    """Return the executor that thinks: its loss in the middle of an answer hurts most."""
    executors = dict(pair.split("=", 1) for pair in path.split(";") if "=" in pair)
    for part in ("llm", *executors):
        if part in executors:
            return executors[part].split(",")[0]
    raise DemoError(f"the answer does not say which executors it went over: {path!r}")


def _read_picture(path: Path | None) -> bytes:
    """Return the picture to ask about: a file, or one that is drawn here."""
    if path is None:
        return draw_circle()
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {(error.strerror or 'no file').lower()}", field="--picture"
        ) from error
