"""`atoll demo`: plan, simulate, serve, kill a node in the middle of an answer, change a plan under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.serving import fetch_models, local_fleet, need_engine, need_fabric, need_serving
from atoll.core.errors import AtollError, MissingDependencyError, UsageError
from atoll.core.files import check_target
from atoll.plan.files.read import read_plan
from atoll.report.terminal import console

if TYPE_CHECKING:
    from atoll.runtime.local.build import LocalModel
    from atoll.runtime.local.fleet import LocalFleet

app = typer.Typer(add_completion=False)
_QUESTION = "Write a short story about a lighthouse keeper."
_TOKENS = 72
_LONG_TOKENS = 160
"""Of an answer that takes longer than an instance needs to start, where cores are free."""
_KILL_AFTER = 24
# Planning takes a second; a busy machine may take longer, and should show the same.
_PATIENCE = "10min"
_DASHBOARD_S = 20.0


class DemoError(AtollError):
    """The demonstration did not show what it should have."""


@app.command()
def demo(
    examples: Annotated[
        Path | None, typer.Option("--examples", help="Folder with the example fleets.")
    ] = None,
    question: Annotated[str | None, typer.Option("--question", help="What to ask.")] = None,
    speech: Annotated[
        bool, typer.Option("--speech", help="Only the spoken exchange, with a picture.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="A picture to ask about. Default: a circle.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Where the spoken answer is written, as a WAV file.")
    ] = Path("answer.wav"),
) -> None:
    """Show the whole story on this machine: no GPU and no account needed.

    Plans three models on rented GPUs and simulates the plan; then cuts a small model over four processes,
    asks it a question, kills one of them in the middle of the answer, and compares. Then a controller keeps
    a fleet of that model: demand doubles in the middle of an answer, and a replica comes. Last, a question is
    spoken, heard, thought about with a picture and answered aloud, over several processes; one is killed.
    """
    need_serving()
    need_engine()
    check_target(out)
    if speech:
        _speech_only(_examples(examples), question, picture, out)
        return
    question = question or _QUESTION
    from atoll.engine.weights.sources import DEFAULT_MODEL, DEFAULT_NAME
    from atoll.runtime.http.loop import run
    from atoll.runtime.local.weights import WeightSource

    begun_s = time.monotonic()
    folder = _examples(examples)
    _say(f"0. Weights: {DEFAULT_NAME}, fetched and converted once")
    models = fetch_models({"smollm2": WeightSource(DEFAULT_MODEL)})
    run(_show(folder, models, question, out, begun_s))


def _speech_only(folder: Path, question: str | None, picture: Path | None, out: Path) -> None:
    from atoll.cli.demo_speech import QUESTION, need_speech, show_speech
    from atoll.runtime.http.loop import run

    need_speech()
    run(show_speech(folder, _say, question=question or QUESTION, picture=picture, out=out))


def _examples(chosen: Path | None) -> Path:
    """Return the folder to take the fleets from: the given one, or where those of Atoll are."""
    from atoll.plan.files.examples import find_example

    folder = chosen or find_example("quickstart").parent
    for name in ("quickstart.yaml", "demo-plan.json"):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} has no {name}", hint="leave --examples out")
    return folder


def _say(text: str) -> None:
    console().print(text, soft_wrap=True)
    sys.stdout.flush()


async def _show(
    folder: Path, models: dict[str, LocalModel], question: str, out: Path, begun_s: float
) -> None:
    from atoll.deploy.commands.stage import NURSERY_VARIABLE
    from atoll.runtime.local.state import new_home, remove_home
    from atoll.runtime.supervise.forker import Nursery

    home = new_home()
    socket = str(home / "nursery")
    # Loading torch takes a while; it does so while the plans are made.
    loading = asyncio.create_task(Nursery.share([str(m.folder) for m in models.values()], socket))
    try:
        await _plan_and_simulate(folder / "quickstart.yaml")
        await loading
        answer = await _serve(folder / "demo-plan.json", models, question, socket)
        os.environ[NURSERY_VARIABLE] = socket
        await _change(models["smollm2"], home, question, answer)
    finally:
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError, AtollError):
            await (await loading).close()
        remove_home(home)
    await _speak(folder, out)
    _say(f"\nAll of it took {time.monotonic() - begun_s:.0f} s.")
    _say("Next: `atoll serve PLAN --stand-in` tries any plan of yours with these weights.")


async def _speak(folder: Path, out: Path) -> None:
    """Show the spoken exchange, where its packages are."""
    from atoll.cli.demo_speech import need_speech, show_speech

    try:
        need_speech()
    except MissingDependencyError as error:
        _say(f"\n8. Speech and pictures\n   skipped: {error}")
        return
    await show_speech(folder, _say, out=out, first=8)


async def _serve(path: Path, models: dict[str, LocalModel], question: str, socket: str) -> str:
    """Serve a plan, kill one of its processes, and return the undisturbed answer."""
    from atoll.runtime.local.build import LocalOptions
    from atoll.runtime.supervise.forker import Nursery

    _say("\n3. A plan for just that small model on four small machines (of the example demo-local)")
    plan = read_plan(path)
    for instance in plan.instances:
        _say(f"   {instance.id}: {instance.describe()}")
    with local_fleet(
        plan,
        models,
        LocalOptions(),
        host="127.0.0.1",
        port=0,
        log=None,
        on_progress=lambda _name, _state, _reason: None,
    ) as fleet:
        fleet.agent.nursery = Nursery.connect(socket)
        _say("\n4. Serve: every machine a process that holds only its layers, a gateway in front")
        await fleet.start()
        shown = await _show_dashboard(fleet)
        try:
            return await _ask_and_kill(fleet, question)
        finally:
            if shown is not None:
                await _end(shown)
            await fleet.stop(5.0)


async def _show_dashboard(fleet: LocalFleet) -> asyncio.subprocess.Process | None:
    """Start the dashboard beside the fleet and say where it is; the demonstration goes on without it."""
    state = fleet.state()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll", "dashboard", "--json", "--no-desk", "--with-parent"),
        *("--port", "0", "--gateway", state.url, "--admin-socket", state.admin_socket),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_DASHBOARD_S):
            link = json.loads(await process.stdout.readline())["link"]
    except (TimeoutError, ValueError, KeyError):
        await _end(process)
        return None
    _say(f"   dashboard, while this is served: {link}")
    return process


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(5.0):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _change(model: LocalModel, home: Path, question: str, expected: str) -> None:
    """Keep a fleet with a controller; demand doubles in the middle of an answer."""
    _say("\n7. Operate: a controller keeps a fleet of that model, a gateway finds what it starts")
    try:
        need_fabric()
    except MissingDependencyError as error:
        _say(f"   skipped: {error}")
        return
    from atoll.cli.demo_change import operate_here

    async with operate_here("smollm2", model, home) as fleet:
        await fleet.settle(1, lambda line: _say(f"   {line}"))
        _say("   1 instance serves. Ask, and double the demand in the middle of the answer:")
        shown, count = "", 0
        coming: asyncio.Task[None] | None = None
        sys.stdout.write("   ")
        async with contextlib.aclosing(_stream(fleet.url, question, _LONG_TOKENS)) as answer:
            async for text in answer:
                count += 1
                shown += text
                sys.stdout.write(text.replace("\n", "\n   "))
                sys.stdout.flush()
                if count == _KILL_AFTER:
                    fleet.ask_for(2.0)
                    coming = asyncio.create_task(fleet.settle(2, _interrupt))
                if coming is not None and coming.done() and len(shown) > len(expected):
                    break  # it has gone on for long enough
        sys.stdout.write("\n")
        if coming is None:
            raise DemoError("the answer was too short", hint="ask another question")
        await coming
        if not shown.startswith(expected):
            raise DemoError("the answer differs from the one before")
        _say(
            "\n   2 instances serve; the answer went on, letter by letter the same. Ask both at once:"
        )
        both = await asyncio.gather(*(_collect(fleet.url, question, _KILL_AFTER) for _ in range(2)))
        if not all(text and expected.startswith(text) for text in both):
            raise DemoError("two instances answer differently")
        _say(f"   {fleet.describe_shares()}: the same answer twice.")


def _interrupt(line: str) -> None:
    """Say something in the middle of an answer."""
    sys.stdout.write(f"\n   >>> {line} <<<\n   ")
    sys.stdout.flush()


async def _collect(url: str, question: str, most: int = _TOKENS) -> str:
    return "".join([text async for text in _stream(url, question, most)])


async def _plan_and_simulate(fleet: Path) -> None:
    _say(
        "\n1. Plan: three models on rented GPUs, as cheap as capacity for half of all requests can be"
    )
    plan = ("plan", str(fleet), "--deadline", _PATIENCE)
    # Both at once: neither keeps two cores busy by itself.
    planned, verified = await asyncio.gather(
        _atoll(*plan, "--capacity-only", "--compare"), _atoll(*plan)
    )
    for line in planned:
        _say(f"   {line}")
    _say("\n2. Plan again so that 95 % of requests keep their promises, in simulation")
    first = next(at for at, line in enumerate(verified) if line.startswith(f"{fleet.stem}:"))
    kept = [line for line in verified[:first] if " keeps its promises for " in line]
    for line in (*kept, *verified[first:]):
        _say(f"   {line}")


async def _atoll(*arguments: str) -> list[str]:
    """Run a command of Atoll in a process of its own and return its lines."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if process.returncode:
        raise DemoError(f"atoll {arguments[0]} failed: {err.decode(errors='replace')[-300:]}")
    return [line.rstrip() for line in out.decode().splitlines() if line.strip()]


async def _ask_and_kill(fleet: LocalFleet, question: str) -> str:
    endpoint = fleet.endpoints[0].endpoint
    for process, _, start, end in endpoint.held:
        _say(
            f"   process {fleet.agent.processes[process].pid}: layers {start} to {end - 1} ({process})"
        )
    _say(f"   {fleet.url}/v1 answers")
    _say(f"\n5. Ask, undisturbed: {question}")
    expected = await _collect(fleet.url, question)
    _say(_indent(expected))
    _say("\n6. Ask again, and kill a process in the middle of the answer (SIGKILL)")
    shown, count, killed = "", 0, ""
    sys.stdout.write("   ")
    async for text in _stream(fleet.url, question):
        count += 1
        shown += text
        sys.stdout.write(text.replace("\n", "\n   "))
        sys.stdout.flush()
        if count == _KILL_AFTER:
            killed = await _busy_sibling(fleet)
            pid = fleet.agent.processes[killed].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            sys.stdout.write(f"\n   >>> killed process {pid} ({killed}) <<<\n   ")
    sys.stdout.write("\n")
    if shown != expected:
        raise DemoError("the answer differs from the undisturbed one")
    if not killed:
        raise DemoError("the answer was too short to kill anything", hint="ask another question")
    _say(
        "\n   The answer went on over the other machine of that stage, which rebuilt what it needed:"
        "\n   letter by letter the same as undisturbed."
    )
    await fleet.agent.ready([killed])
    _say(f"   {killed} runs again, as process {fleet.agent.processes[killed].pid}.")
    return expected


async def _busy_sibling(fleet: LocalFleet) -> str:
    """Return a node that works on a request and has a sibling with the same layers."""
    from atoll.runtime.http.client import fetch

    endpoint = fleet.endpoints[0].endpoint
    _, body = await fetch(f"{endpoint.backend.url}/atoll/v1/status")
    nodes: list[dict[str, Any]] = json.loads(body)["nodes"]
    ranges = [(node["start"], node["end"]) for node in nodes]
    twins = [n for n in nodes if ranges.count((n["start"], n["end"])) > 1]
    if not twins:
        raise DemoError("no two machines hold the same layers", hint="use the example demo-plan")
    return str(max(twins, key=lambda n: (n["stats"] or {}).get("running", 0))["name"])


async def _stream(url: str, question: str, most: int = _TOKENS) -> AsyncGenerator[str, None]:
    """Yield the pieces of an answer as they come."""
    from atoll.runtime.http.client import stream_lines

    chat = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": most,
        "temperature": 0,
        "stream": True,
    }
    lines = stream_lines(f"{url}/v1/chat/completions", body=chat)
    async with contextlib.aclosing(lines):
        async for line in lines:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if text.startswith("data: "):
                event = json.loads(text.removeprefix("data: "))
                if "error" in event:
                    raise DemoError(f"the stream broke: {event['error']['message']}")
                for choice in event["choices"]:
                    if content := choice["delta"].get("content"):
                        yield content
    raise DemoError("the stream ended early")


def _indent(text: str) -> str:
    return "   " + text.replace("\n", "\n   ")
