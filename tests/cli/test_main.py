from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import typer

from atoll import __version__
from atoll.cli import main as cli
from atoll.core.errors import InputError

HEAVY = ("torch", "numba", "ortools", "scipy", "pandas", "matplotlib", "numpy", "pydantic")


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Replaces the table of verbs by a single verb, `act`, that calls the given function."""

    def install(action: Callable[[], None]) -> None:
        module = ModuleType("atoll_test_verb")
        module.app = typer.Typer()  # type: ignore[attr-defined]
        module.app.command()(action)
        monkeypatch.setitem(sys.modules, "atoll_test_verb", module)

    monkeypatch.setattr(cli, "VERBS", (cli.Verb("act", "atoll_test_verb", "Act."),))
    # typer builds the group anew for every run, so the patched table is the one it sees.
    return install


Verb = Callable[[Callable[[], None]], None]


def test_success_is_zero(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(lambda: print("done"))  # noqa: T201
    assert cli.run(["act"]) == 0
    assert capsys.readouterr().out == "done\n"


def test_atoll_errors_are_one_line_and_their_exit_code(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> None:
        raise InputError("bad\nvalue", path="fleet.yaml", line=3, hint="better")

    verb(action)
    assert cli.run(["act"]) == InputError.exit_code == 3
    captured = capsys.readouterr()
    assert captured.err == "error: fleet.yaml:3: bad value (fix: better)\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EADDRINUSE, "x"), "error: address already in use (fix: stop what listens"),
        (PermissionError(errno.EACCES, "x", "/a/b"), "error: /a/b: permission denied (fix: have"),
        (OSError(errno.ENOSPC, "x", "/a/b"), "error: /a/b: no space left on device (fix: free"),
        (OSError(errno.EMFILE, "x"), "error: too many open files (fix: allow more"),
    ],
)
def test_what_the_system_refuses_is_no_bug(
    verb: Verb, capsys: pytest.CaptureFixture[str], error: OSError, said: str
) -> None:
    def action() -> None:
        raise error

    verb(action)
    assert cli.run(["act"]) == InputError.exit_code
    line = capsys.readouterr().err
    assert line.startswith(said)
    assert "bug" not in line


def test_debug_adds_the_traceback(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> None:
        raise InputError("bad")

    verb(action)
    assert cli.run(["--debug", "act"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("error: bad\n")


def test_surprises_are_one_line_and_seventy(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> None:
        raise ZeroDivisionError("one\nby zero")

    verb(action)
    assert cli.run(["act"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("error: ZeroDivisionError: one by zero (")
    assert "--debug" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (typer.Exit(9), 9),
        (SystemExit(4), 4),
        (SystemExit(None), 0),
        (SystemExit("words"), 1),
    ],
)
def test_other_ways_to_end(verb: Verb, raised: BaseException, code: int) -> None:
    def action() -> None:
        raise raised

    verb(action)
    assert cli.run(["act"]) == code


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ack"], "Did you mean 'act'?"),
        (["zzz"], "No such command 'zzz'"),
        (["act", "--frob"], "No such option: --frob"),
        (["--frob"], "No such option: --frob"),
        (["act", "more"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_is_one_line_and_two(
    verb: Verb, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    verb(lambda: None)
    assert cli.run(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert "--help" in err
    assert err.count("\n") == 1


def test_a_verb_whose_module_is_absent_is_listed_but_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "VERBS", (cli.Verb("ghost", "atoll.cli.ghost", "Not there."),))
    assert cli.run(["--help"]) == 0
    assert "Not there." in capsys.readouterr().out
    assert cli.run(["ghost"]) == 2
    assert "'ghost' is not part of this installation" in capsys.readouterr().err


def test_a_missing_package_inside_a_verb_is_not_mistaken_for_a_missing_verb(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str], capsys: pytest.CaptureFixture[str]
) -> None:
    module = os.path.join(tmp_path, "atoll_broken_verb.py")
    with open(module, "w", encoding="utf-8") as stream:
        stream.write("import package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli, "VERBS", (cli.Verb("broken", "atoll_broken_verb", ""),))
    assert cli.run(["broken"]) == 70
    assert "package_that_is_not_there" in capsys.readouterr().err


def test_completion_options_belong_to_the_program_only(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(lambda: None)
    assert cli.run(["act", "--help"]) == 0
    assert "--install-completion" not in capsys.readouterr().out


def test_no_arguments_show_the_help_and_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "Usage: atoll" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"atoll {__version__}\n"


def test_every_verb_is_listed_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    out = capsys.readouterr().out
    places = [out.index(verb.help) for verb in cli.VERBS]
    assert places == sorted(places)


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)


def test_module_runs_like_the_script() -> None:
    for module in ("atoll", "atoll.cli.main"):
        done = python("-m", module, "--version")
        assert (done.returncode, done.stdout) == (0, f"atoll {__version__}\n")


SHOW_LOADED = "\nprint('LOADED', *sys.modules, file=sys.stderr)\n"
OUR_HELP = f"import sys\nfrom atoll.cli.main import run\nassert run(['--help']) == 0{SHOW_LOADED}"
# The least that can be asked of the same library: a program of one command that shows its help.
MIN_HELP = f"""
import sys, typer
app = typer.Typer()
app.command()(lambda: None)
try:
    app(["--help"])
except SystemExit:
    pass
{SHOW_LOADED}"""


def loaded_by(script: str) -> set[str]:
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.partition("LOADED ")[2].split())


def test_help_loads_nothing_but_what_shows_help() -> None:
    """What makes `atoll --help` answer at once."""
    loaded = loaded_by(OUR_HELP)
    assert [name for name in loaded if name.partition(".")[0] in HEAVY] == []
    assert [verb.module for verb in cli.VERBS if verb.module in loaded] == []
    more = loaded - loaded_by(MIN_HELP)
    assert "atoll.cli.main" in more
    assert [name for name in more if name.partition(".")[0] != "atoll"] == []
    assert len(more) <= 8


def test_importing_atoll_loads_nothing_heavy() -> None:
    done = python("-c", "import sys, atoll; print(*sys.modules)")
    assert [name for name in done.stdout.split() if name.partition(".")[0] in HEAVY] == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (["--help"], ["doctor"], ["catalog", "models", "--json"])
        ),
    ],
    ids=" ".join,
)
def test_a_full_disk_behind_stdout_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "atoll", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == cli.EXIT_NO_OUTPUT
    assert done.stderr.startswith("error: cannot write to standard output: no space left")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="descriptors are inherited differently elsewhere")
@pytest.mark.parametrize(
    ("redirect", "said"), [(">&-", "it is closed"), ("1</dev/null", "bad file descriptor")]
)
def test_a_closed_stdout_is_one_line(redirect: str, said: str) -> None:
    command = ["sh", "-c", f'"$0" -m atoll --version {redirect}', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == cli.EXIT_NO_OUTPUT
    assert done.stderr == (
        f"error: cannot write to standard output: {said} (fix: send it somewhere else)\n"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("redirect", [">/dev/full 2>&1", ">/dev/full 2>&-", ">&- 2>&-"])
def test_nobody_left_to_tell_still_fails(redirect: str) -> None:
    command = ["sh", "-c", f'"$0" -m atoll --version {redirect}', sys.executable]
    assert subprocess.run(command, check=False).returncode == cli.EXIT_NO_OUTPUT


def test_other_errors_of_the_system_are_still_surprises(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> None:
        open("/no/such/file")  # noqa: SIM115

    verb(action)
    assert cli.run(["act"]) == 70
    assert "No such file" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="pipes close differently elsewhere")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        pytest.param(["doctor"], marks=pytest.mark.slow),
        pytest.param(["doctor", "--json"], marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_leaves_early_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # nobody will ever read
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "atoll", *arguments],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == ""
    assert done.returncode == cli.EXIT_BROKEN_PIPE
