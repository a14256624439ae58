"""`atoll demo`: plan, simulate, serve, kill a node in the middle of an answer, change a plan under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.api.demo.asking import DemoError, stream_text
from atoll.cli.operating import TerminalListener
from atoll.core.errors import (
    AtollError,
    MissingDependencyError,
    UnknownNameError,
    UsageError,
)
from atoll.core.extras import require_extras
from atoll.core.files import check_target
from atoll.report.terminal import console

if TYPE_CHECKING:
    from atoll.api.served_plan import ServedPlan
    from atoll.runtime.local.fleet_state import FleetState
    from atoll.runtime.local.local_endpoints import LocalModel

app = typer.Typer(add_completion=False)
_QUESTION = "Write a short story about a lighthouse keeper."
SERVICE = "smollm2"
_TOKENS = 72
_LONG_TOKENS = 160
"""Of an answer that takes longer than an instance needs to start, where cores are free."""
_KILL_AFTER = 24
# Planning takes a second; a busy machine may take longer, and should show the same.
_PATIENCE = "10min"
_DASHBOARD_S = 20.0
_DEVICES = ("auto", "cpu")


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
    device: Annotated[
        str, typer.Option("--device", help="auto (a GPU that is here, else cores), or cpu.")
    ] = "auto",
) -> None:
    """Show the whole story on this machine: no GPU and no account needed.

    Plans three models on rented GPUs and simulates the plan; then cuts a small model over four processes,
    asks it a question, kills one of them in the middle of the answer, and compares. Then a controller keeps
    a fleet of that model: demand doubles in the middle of an answer, and a replica comes. Last, a question is
    spoken, heard, thought about with a picture and answered aloud, over several processes; one is killed.
    """
    require_extras("serve", "engine")
    check_target(out)
    if device not in _DEVICES:
        raise UnknownNameError("device", device, _DEVICES, field="device")
    if speech:
        _speech_only(_examples(examples), question, picture, out)
        return
    question = question or _QUESTION
    from atoll.engine.weights.sources import DEFAULT_MODEL, DEFAULT_NAME
    from atoll.runtime.http.program import run
    from atoll.runtime.local.serving import fetch_models
    from atoll.runtime.local.weights import WeightSource

    begun_s = time.monotonic()
    folder = _examples(examples)
    _say(f"0. Weights: {DEFAULT_NAME}, fetched and converted once")
    models = fetch_models({SERVICE: WeightSource(DEFAULT_MODEL)}, TerminalListener(yes=True))
    run(_show(folder, models, question, out, begun_s, device))


def _speech_only(folder: Path, question: str | None, picture: Path | None, out: Path) -> None:
    from atoll.cli.demo_speech import QUESTION, need_speech, show_speech
    from atoll.runtime.http.program import run

    need_speech()
    run(show_speech(folder, _say, question=question or QUESTION, picture=picture, out=out))


def _examples(chosen: Path | None) -> Path:
    """Return the folder to take the fleets from: the given one, or where those of Atoll are."""
    from atoll.plan.files.examples import find_example

    folder = chosen or find_example("quickstart").parent
    for name in ("quickstart.yaml", "demo-local.yaml", "demo-plan.json"):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} has no {name}", hint="leave --examples out")
    return folder


def _say(text: str) -> None:
    console().print(text, soft_wrap=True)
    sys.stdout.flush()


async def _show(
    folder: Path,
    models: dict[str, LocalModel],
    question: str,
    out: Path,
    begun_s: float,
    device: str,
) -> None:
    from atoll.deploy.commands.stage_node import FORK_SERVER_VARIABLE
    from atoll.runtime.local.fleet_state import new_home, remove_home
    from atoll.runtime.supervise.fork_client import ForkServer

    home = new_home()
    socket = str(home / "fork_server")
    # Loading torch takes a while; for the replicas of the last step it is done while plans are made.
    loading = asyncio.create_task(
        ForkServer.share([str(m.folder) for m in models.values()], socket)
    )
    try:
        await _plan_and_simulate(folder / "quickstart.yaml")
        await loading
        answer = await _serve(folder, question, device)
        os.environ[FORK_SERVER_VARIABLE] = socket
        await _change(models[SERVICE], home, question, answer)
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


async def _serve(folder: Path, question: str, device: str) -> str | None:
    """Serve a plan, kill one of its processes, and return the undisturbed answer; None: it is a GPU's."""
    from atoll.api.demo.serving_beside import serve_beside
    from atoll.api.demo.shared_gpu import describe_device, share_gpu
    from atoll.api.fleet import Fleet
    from atoll.deploy.local.local_placement import LocalGpus

    _say("\n3. A plan for just that small model on four small machines (of the example demo-local)")
    plan = Fleet.load(folder / "demo-local.yaml").load_plan(folder / "demo-plan.json")
    for instance in plan.instances:
        _say(f"   {instance.id}: {instance.describe()}")
    _say("\n4. Serve: every machine a process that holds only its layers, a gateway in front")
    gpus = LocalGpus() if device == "cpu" else LocalGpus.find()
    async with serve_beside(share_gpu(plan, gpus.machines)) as served:
        runners = served.state.instances
        _say(f"   {describe_device(runners)}")
        shown = await _show_dashboard(served.state)
        try:
            answer = await _ask_and_kill(served, question)
            return None if any(one.gpus for one in runners) else answer
        finally:
            if shown is not None:
                await _end(shown)


async def _show_dashboard(state: FleetState) -> asyncio.subprocess.Process | None:
    """Start the dashboard beside the fleet and say where it is; the demonstration goes on without it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll", "dashboard", "--json", "--no-planner", "--with-parent"),
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


async def _change(model: LocalModel, home: Path, question: str, known: str | None) -> None:
    """Keep a fleet with a controller, on cores; demand doubles in the middle of an answer.

    `known` is the answer as cores give it; without, it is asked for first.
    """
    _say("\n7. Operate: a controller keeps a fleet of that model, a gateway finds what it starts")
    try:
        require_extras("fabric")
    except MissingDependencyError as error:
        _say(f"   skipped: {error}")
        return
    from atoll.api.demo.controlled_fleet import operate_here

    async with operate_here(SERVICE, model, home) as fleet:
        await fleet.settle(1, lambda line: _say(f"   {line}"))
        # A GPU rounds otherwise than cores, and a token may hang on it.
        expected = await _collect(fleet.url, question) if known is None else known
        _say("   1 instance serves. Ask, and double the demand in the middle of the answer:")
        shown, count = "", 0
        coming: asyncio.Task[None] | None = None
        sys.stdout.write("   ")
        pieces = stream_text(fleet.url, SERVICE, question, _LONG_TOKENS)
        async with contextlib.aclosing(pieces) as answer:
            async for text in answer:
                count += 1
                shown += _show_piece(text)
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


async def _collect(url: str, question: str, max_tokens: int = _TOKENS) -> str:
    return "".join([text async for text in stream_text(url, SERVICE, question, max_tokens)])


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


async def _ask_and_kill(served: ServedPlan, question: str) -> str:
    url = served.url
    for node in served.state.endpoints[0].nodes:
        pid = served.processes[node.process]
        _say(f"   process {pid}: layers {node.start} to {node.end - 1} ({node.process})")
    _say(f"   {url}/v1 answers")
    _say(f"\n5. Ask, undisturbed: {question}")
    expected = await _collect(url, question)
    _say("   " + expected.replace("\n", "\n   "))
    _say("\n6. Ask again, and kill a process in the middle of the answer (SIGKILL)")
    shown, count, killed = "", 0, ""
    sys.stdout.write("   ")
    async for text in stream_text(url, SERVICE, question, _TOKENS):
        count += 1
        shown += _show_piece(text)
        if count == _KILL_AFTER:
            killed = await _busy_sibling(served.state.endpoints[0].url)
            pid = served.processes[killed]
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            _interrupt(f"killed process {pid} ({killed})")
    sys.stdout.write("\n")
    if shown != expected:
        raise DemoError("the answer differs from the undisturbed one")
    if not killed:
        raise DemoError("the answer was too short to kill anything", hint="ask another question")
    _say(
        "\n   The answer went on over the other machine of that stage, which rebuilt what it needed:"
        "\n   letter by letter the same as undisturbed."
    )
    await served.wait_ready(killed)
    _say(f"   {killed} runs again, as process {served.processes[killed]}.")
    return expected


def _show_piece(text: str) -> str:
    """Show a piece of an answer as it comes, and return it."""
    sys.stdout.write(text.replace("\n", "\n   "))
    sys.stdout.flush()
    return text


async def _busy_sibling(instance_url: str) -> str:
    """Return a node that works on a request and has a sibling with the same layers."""
    from atoll.runtime.http.http_client import fetch

    _, body = await fetch(f"{instance_url}/atoll/v1/status")
    nodes: list[dict[str, Any]] = json.loads(body)["nodes"]
    ranges = [(node["start"], node["end"]) for node in nodes]
    twins = [n for n in nodes if ranges.count((n["start"], n["end"])) > 1]
    if not twins:
        raise DemoError("no two machines hold the same layers", hint="use the example demo-plan")
    return str(max(twins, key=lambda n: (n["stats"] or {}).get("running", 0))["name"])
