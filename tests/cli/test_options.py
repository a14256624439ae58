"""Options are written down once: the command, its help and what is checked follow from a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from atoll.cli import main as cli
from atoll.cli.gateway import GatewayCommandSettings, _overrules
from atoll.cli.join import JoinSettings
from atoll.cli.options import VerbSettings, flag, verb
from atoll.core.errors import InputError
from atoll.core.quantities import Duration
from atoll.runtime.gateway.settings import GatewayFile
from atoll.runtime.join.join_options import JoinOptions


class Brew(VerbSettings):
    kind: Literal["tea", "coffee"] = Field(
        "tea", description="tea or coffee.", json_schema_extra={"env": "BREW_KIND"}
    )
    cups: int = Field(1, ge=1, description="How many.")
    steep: Duration = Field(180.0, gt=0, description="How long: 3min.")
    extras: dict[str, str] = Field(
        default_factory=dict,
        description="THING=AMOUNT.",
        json_schema_extra={"flag": "--extra", "metavar": "THING=AMOUNT", "panel": "Taste"},
    )
    guests: tuple[str, ...] = Field(
        (), description="Who comes.", json_schema_extra={"argument": True}
    )
    hot: bool = Field(True, description="Boil it.", json_schema_extra={"flag": "--hot/--cold"})
    recipe: Path | None = Field(None, description="A file.", json_schema_extra={"file": True})
    secret: str = "said only in a file"


def brew(
    *arguments: str, env: dict[str, str] | None = None
) -> tuple[Brew | None, str, Exception | None]:
    app, told = typer.Typer(), []

    @verb(app, Brew)
    def brew(options: Brew) -> None:
        """Make something to drink."""
        told.append(options)

    result = CliRunner().invoke(app, list(arguments), env=env, terminal_width=120)
    error = result.exception if isinstance(result.exception, InputError) else None
    return told[0] if told else None, re.sub(r"\x1b\[[0-9;]*m", "", result.output), error


def test_without_options_everything_has_its_default() -> None:
    assert brew()[0] == Brew()


def test_every_kind_of_option_is_read() -> None:
    told, _, _ = brew(
        *("--kind", "coffee", "--cups", "3", "--steep", "500ms", "--cold"),
        *("--extra", "milk=1dl", "--extra", "sugar=2", "ann", "bob"),
    )
    assert told is not None
    assert (told.kind, told.cups, told.steep, told.hot) == ("coffee", 3, 0.5, False)
    assert told.extras == {"milk": "1dl", "sugar": "2"}
    assert told.guests == ("ann", "bob")


def test_the_command_line_wins_over_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("kind: tea\ncups: 4\nsteep: 1min\nsecret: x\nextras: {milk: some, ice: no}\n")
    env = {"BREW_KIND": "coffee", "CUPS": "9", "cups": "9", "BREW_CUPS": "9"}
    given = ("--recipe", str(file), "--steep", "2s", "--extra", "milk=none")
    told, _, _ = brew(*given, env=env)
    assert told is not None
    assert (told.kind, told.cups, told.steep, told.secret) == ("coffee", 4, 2.0, "x")
    # A mapping that is given replaces the file's, it does not add to it.
    assert told.extras == {"milk": "none"}
    told, _, _ = brew(*given, "--kind", "tea", env=env)
    assert told is not None
    assert told.kind == "tea"


def test_what_equals_the_default_still_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("cups: 4\nhot: false\n")
    told, _, _ = brew("--recipe", str(file), "--cups", "1", "--hot")
    assert told is not None
    assert (told.cups, told.hot) == (1, True)


def test_an_error_says_where_the_option_stood(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("cups: 0\n")

    def message(*arguments: str, env: dict[str, str] | None = None) -> str:
        return str(brew(*arguments, env=env)[2])

    assert message("--cups", "0").startswith("--cups: ")
    assert message("--steep", "long").startswith("--steep: ")
    assert "fix: write THING=AMOUNT" in message("--extra", "milk")
    assert message("--extra", "milk").startswith("--extra: ")
    assert message(env={"BREW_KIND": "soup"}) == message("--kind", "soup")
    assert message("--recipe", str(file)).startswith(f"{file}: cups: ")
    file.write_text("- cups\n")
    assert "mapping" in message("--recipe", str(file))
    file.write_text("cupz: 1\n")
    assert "cupz" in message("--recipe", str(file))


def test_without_a_command_line_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREW_KIND", "soup")
    with pytest.raises(InputError, match=r"^\$BREW_KIND: "):
        Brew.read({})
    monkeypatch.setenv("BREW_KIND", "")
    assert Brew.read({}).kind == "tea"


def test_help_comes_from_the_model() -> None:
    _, text, _ = brew("--help")
    words = " ".join(text.split())
    assert "Make something to drink." in words
    for name, info in Brew.model_fields.items():
        assert (name == "secret") == (info.description is None)
        if info.description is not None and name != "guests":
            assert info.description in words
            assert flag(name, info) in words
    assert "[env var: BREW_KIND]" in words
    assert "[default: tea]" in words
    assert "Taste" in words
    assert "secret" not in words


def test_every_option_of_a_node_is_offered_with_help() -> None:
    (verb_,) = (verb for verb in cli.VERBS if verb.name == "join")
    offered = {param.name for param in cli.load(verb_).params}
    assert set(JoinOptions.model_fields) - offered == {"spot_url"}
    assert offered - set(JoinOptions.model_fields) == {"config", "engine_log", "log"}


def test_a_node_made_in_code_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_REGION", "moon")
    assert JoinOptions().region == ""
    assert JoinSettings.read({}).region == "moon"
    assert JoinSettings.read({"region": "earth"}).region == "earth"


def test_a_gateway_takes_from_its_file_what_is_not_given(tmp_path: Path) -> None:
    def overrules(*options: tuple[str, object], **file: object) -> dict[str, object]:
        return _overrules(GatewayCommandSettings.read(dict(options)), GatewayFile.parse(file))

    usual = overrules()
    assert (usual["policy"], usual["affinity"]) == ("learned", True)
    assert "direct" not in usual
    said = overrules(policy="p2c", affinity=False, direct=False, queue_s=1.0, aliases={"a": "m"})
    assert said.keys() == {"aliases", "attempts", "deadlines"}
    both = overrules(
        ("affinity", True), ("aliases", {"b": "n"}), affinity=False, aliases={"a": "m"}
    )
    assert both["affinity"] is True
    assert both["aliases"] == {"a": "m", "b": "n"}
