"""The `atoll` command: finds the verb, runs it, turns errors into one line and an exit code.

Every module under `cli` is loaded only when its verb is called, so `atoll --help` costs no more
than typer itself. A verb is one line in `VERBS` and a module with a `typer.Typer` called `app`.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from atoll.core.errors import AtollError, InputError, InternalError, UsageError
from atoll.core.version import __version__
from atoll.core.waiting import listening

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_NO_OUTPUT = 74
# What a full disk, a lost terminal or a stream opened for reading answer to a write. Files of
# Atoll's own are written by `core.files`, whose errors arrive here as InputError.
_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


_REFUSALS = {
    errno.EACCES: "have its owner let you, or use another",
    errno.EPERM: "have its owner let you, or use another",
    errno.EROFS: "use a place that can be written to",
    errno.ENOSPC: "free some space, or use another place",
    errno.EDQUOT: "free some space, or use another place",
    errno.EMFILE: "allow more open files: ulimit -n 65536",
    errno.ENFILE: "close some programs: the system has too many open files",
    errno.EADDRINUSE: "stop what listens there, or name another port",
    errno.EADDRNOTAVAIL: "name an address of this machine, such as 127.0.0.1",
}
"""Refusals of the operating system that are no fault of Atoll's, and what helps."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A command that lives in a module of its own, described without loading it."""

    name: str
    module: str
    help: str


VERBS: tuple[Verb, ...] = (
    Verb("init", "atoll.cli.init", "Write a fleet file to start from."),
    Verb("plan", "atoll.cli.plan", "Find the cheapest fleet that keeps every promise."),
    Verb("simulate", "atoll.cli.simulate", "Run a plan under a workload: would it hold?"),
    Verb("explain", "atoll.cli.explain", "Say what binds a plan, and what would help."),
    Verb("pareto", "atoll.cli.pareto", "Show what a dollar buys: latency, energy, carbon."),
    Verb("templates", "atoll.cli.templates", "List the best layouts of a model over mixed nodes."),
    Verb("validate", "atoll.cli.validate", "Check that a plan keeps what it says."),
    Verb("diff", "atoll.cli.diff", "Show what changes from one plan to another."),
    Verb("import", "atoll.cli.import_", "Turn other systems' cluster files into fleet files."),
    Verb("catalog", "atoll.cli.catalog", "Look up GPUs, nodes, models, prices and links."),
    Verb("perf", "atoll.cli.perf", "Predict how fast a model runs on a node."),
    Verb("trace", "atoll.cli.trace", "Describe, generate and convert workloads."),
    Verb("tasks", "atoll.cli.tasks", "Show any-to-any tasks: their components and what flows."),
    Verb("serve", "atoll.cli.serve", "Bring a plan up on this machine, behind one address."),
    Verb("up", "atoll.cli.up", "Bring a fleet up wherever its machines are, and change it."),
    Verb("operate", "atoll.cli.operate", "Keep a fleet right while the world moves."),
    Verb("operator", "atoll.cli.operator", "Keep the Fleets of a Kubernetes namespace."),
    Verb("deploy", "atoll.cli.deploy", "Deploy, change or remove a model of an operated fleet."),
    Verb("down", "atoll.cli.down", "Drain and end a fleet."),
    Verb("history", "atoll.cli.history", "Show what was decided about a fleet, and why."),
    Verb("logs", "atoll.cli.logs", "Show what an instance says."),
    Verb("fabric", "atoll.cli.fabric", "Make a fabric, let members in, put them out."),
    Verb("hub", "atoll.cli.hub", "Run the meeting point of a fabric."),
    Verb("gateway", "atoll.cli.gateway", "Serve every model of a fabric behind one address."),
    Verb("dashboard", "atoll.cli.dashboard", "Show and run it all in a browser."),
    Verb("join", "atoll.cli.join", "Offer this machine, or an engine on it, to a fabric."),
    Verb("nodes", "atoll.cli.nodes", "Show who is in a fabric, and who has what."),
    Verb("assign", "atoll.cli.assign", "Have a node that waits serve a model."),
    Verb("status", "atoll.cli.status", "Show how fleets stand: instances, cost, what is wrong."),
    Verb("keys", "atoll.cli.keys", "Make, list and revoke the API keys of a gateway."),
    Verb("usage", "atoll.cli.usage", "Show what keys used, and what it cost."),
    Verb("profile", "atoll.cli.profile", "Measure how fast this machine runs a model."),
    Verb(
        "demo", "atoll.cli.demo", "Plan, simulate, serve, kill a node: the whole story in a minute."
    ),
    Verb("doctor", "atoll.cli.doctor", "Check what is installed and what is missing."),
)


@dataclass(slots=True)
class GlobalOptions:
    """Values of the global options; the context object of every command (`ctx.obj`)."""

    debug: bool = False


class LazyGroup(TyperGroup):
    """A group that lists its verbs from a table and imports a verb's module when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._verbs = {verb.name: verb for verb in VERBS}
        for verb in VERBS:
            # Stands in for the real command in listings, completion and "did you mean".
            self.commands[verb.name] = TyperCommand(name=verb.name, help=verb.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command to run, loading it first if it is one of the verbs."""
        verb = self._verbs.get(args[0]) if args else None
        if verb is not None:
            self.commands[verb.name] = load(verb)
        return super().resolve_command(ctx, args)


def load(verb: Verb) -> Any:
    """Import the verb's module and return its command."""
    try:
        module = importlib.import_module(verb.module)
    except ModuleNotFoundError as error:
        # The module is there, and something that it needs is not.
        if error.name != verb.module:
            raise
        raise UsageError(f"'{verb.name}' is not part of this installation of Atoll") from error
    command: Any = typer.main.get_command(module.app)
    command.name = verb.name
    # Completion is installed once, for the whole program, not once per verb.
    completion = ("install_completion", "show_completion")
    command.params = [param for param in command.params if param.name not in completion]
    return command


app = typer.Typer(
    name="atoll",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, show_default=False, help="Log more; -vv logs everything."
        ),
    ] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Turn a pile of different GPUs into one service for many models."""
    options = ctx.ensure_object(GlobalOptions)
    options.debug = debug
    if verbose:
        import logging

        logging.basicConfig(
            level=logging.INFO if verbose == 1 else logging.DEBUG,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are printed to stderr as one line."""
    if getattr(sys, "stdout", None) is None:  # how Python starts when descriptor 1 is closed
        return _no_output("it is closed")
    options = GlobalOptions()
    try:
        with listening(_tell_once()):
            code = app(args=args, prog_name="atoll", standalone_mode=False, obj=options)
        # Here, so that a reader that has gone, or a full disk, is still noticed.
        sys.stdout.flush()
    except BrokenPipeError:
        return _pipe_closed()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # how typer and rich report one
            return _pipe_closed()
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return EXIT_INTERRUPTED
    except typer.TyperException as error:
        return _report_misuse(error)
    except AtollError as error:
        if options.debug:
            _print_traceback()
        _say(f"error: {error}")
        return error.exit_code
    except Exception as error:  # noqa: BLE001  the last line of defence
        if options.debug:
            _print_traceback()
        return _report_unforeseen(error)
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Entry point of the `atoll` script."""
    sys.exit(run())


def _tell_once() -> Callable[[str], None]:
    """Return a function that writes each line once, to whoever sits before the terminal and waits."""
    told_lines: set[str] = set()

    def tell(line: str) -> None:
        if (
            line not in told_lines
            and getattr(sys, "stderr", None) is not None
            and sys.stderr.isatty()
        ):
            told_lines.add(line)
            _say(f"{line} ...")

    return tell


def _say(line: str) -> None:
    if getattr(sys, "stderr", None) is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:  # nobody is left to tell
        _drop_unwritable()


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


def _report_misuse(error: typer.TyperException) -> int:
    text = error.format_message().strip()
    if type(error).__name__ == "NoArgsIsHelpError":
        # The message is the help text itself, or empty when typer has printed it already.
        if text:
            _say(text)
        return error.exit_code
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "atoll"
    _say(f"error: {' '.join(text.split())} (see '{path} --help')")
    return error.exit_code


def _pipe_closed() -> int:
    # The reader (`| head`) has enough.
    _drop_unwritable()
    return EXIT_BROKEN_PIPE


def _no_output(reason: str) -> int:
    _drop_unwritable()
    _say(f"error: cannot write to standard output: {reason} (fix: send it somewhere else)")
    return EXIT_NO_OUTPUT


def _report_unforeseen(error: Exception) -> int:
    """Say what nobody handled: what the system refused, or a bug."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS:
        return _no_output(os.strerror(error.errno).lower())
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        place = f"{error.filename}: " if isinstance(error.filename, str) else ""
        reason = os.strerror(error.errno).lower()
        _say(f"error: {place}{reason} (fix: {_REFUSALS[error.errno]})")
        return InputError.exit_code
    what = " ".join(f"{type(error).__name__}: {error}".split())
    _say(f"error: {what} (a bug in Atoll; run with --debug: atoll --debug ...)")
    return InternalError.exit_code


def _drop_unwritable() -> None:
    # Python flushes stdout and stderr once more on the way out, which must not fail again.
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(sink, stream.fileno())
    os.close(sink)


if __name__ == "__main__":
    main()
