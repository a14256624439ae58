"""Options of a server's command that say a launch: one table of an engine writes them and reads them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.core.errors import InputError
from atoll.engines.engine import ServedModel
from atoll.engines.limits import EngineLaunch, Speculation


@dataclass(frozen=True, slots=True)
class ValueOption:
    """An option with a value. `words` are the engine's names of values, where it has its own.

    What is not among `words` is left out: the engine has nothing alike. `before` goes with it.
    """

    name: str
    words: Mapping[str, str] | None = None
    before: tuple[str, ...] = ()

    def write(self, value: object) -> list[str]:
        """Return the words that say a value."""
        word = repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
        return [*self.before, self.name, word if self.words is None else self.words[word]]

    def read(self, options: dict[str, tuple[str, ...]]) -> object:
        """Take the value out of options; None: it is not said."""
        found = options.pop(self.name, None)
        for each in self.before:
            options.pop(each, None)
        if found is None:
            return None
        word = " ".join(found)
        own = {word: value for value, word in (self.words or {}).items()}
        return own.get(word, word)

    def settle(self, value: object) -> object:
        """Return the value that a server is started with."""
        return value if self.words is None or value in self.words else None


@dataclass(frozen=True, slots=True)
class SwitchOption:
    """A value that is said by a word of its own; `default` is what a command without any of them means."""

    words: Mapping[object, str] = field(default_factory=dict)
    default: object = None

    def write(self, value: object) -> list[str]:
        """Return the word that says a value, if it has one."""
        return [self.words[value]] if value in self.words else []

    def read(self, options: dict[str, tuple[str, ...]]) -> object:
        """Take the value out of options."""
        said = [value for value, word in self.words.items() if options.pop(word, None) is not None]
        return said[-1] if said else self.default

    def settle(self, value: object) -> object:
        """Return the value that a server is started with."""
        return self.default if value is None else value


class GuessOption:
    """How an engine is told to decode speculatively; what is accepted is a fact of requests, and not said."""

    def write(self, value: object) -> list[str]:
        """Return the words that say it."""
        assert isinstance(value, Speculation)
        return self.words(value, *ServedModel(value.model or "", ()).repository)

    def words(self, guess: Speculation, model: str, revision: str | None) -> list[str]:
        """Return the words for a model's name and its revision."""
        raise NotImplementedError

    def read(self, options: dict[str, tuple[str, ...]]) -> object:
        """Take it out of options; None: it is not said."""
        raise NotImplementedError

    def settle(self, value: object) -> object:
        """Return it as a server is started with it."""
        if not isinstance(value, Speculation):
            return None
        name, revision = ServedModel(value.model or "", ()).repository
        source = ServedModel.source_of(name, None if revision is None else (revision,)) or None
        return value.model_copy(update={"acceptance": (), "model": source})


LaunchOptions = Mapping[str, ValueOption | SwitchOption | GuessOption]
"""Options of an engine by the field of a launch that they say, in the order of the command."""


def write_launch(table: LaunchOptions, launch: EngineLaunch) -> tuple[str, ...]:
    """Return the words of a command that say a launch."""
    words: list[str] = []
    for name, option in table.items():
        value = option.settle(getattr(launch, name))
        if value is not None:
            words += option.write(value)
    return tuple(words)


def settle_launch(table: LaunchOptions, launch: EngineLaunch) -> EngineLaunch:
    """Return a launch without what a command does not say, and with what one means that says nothing."""
    return EngineLaunch.model_validate(
        {name: option.settle(getattr(launch, name)) for name, option in table.items()}
    )


def read_launch(table: LaunchOptions, options: dict[str, tuple[str, ...]]) -> EngineLaunch:
    """Take a launch out of the options of a command; one that is no limit is refused."""
    return EngineLaunch.model_validate({name: each.read(options) for name, each in table.items()})


def split_options(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the options of a command with the words behind each."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            found[name] = ()
        elif not name:
            raise InputError(f"{word!r} is no option of a server", field="command")
        else:
            found[name] += (word,)
    return found


def prompts_alone(launch: EngineLaunch) -> bool:
    """Return whether no decoding shares the steps of prompts, so that the engine may make them long."""
    return launch.handover in ("prefill", "prefill-push")


def take_number(options: dict[str, tuple[str, ...]], name: str) -> int:
    """Take a whole number out of options; 1 where it is not said."""
    return int("".join(options.pop(name, ("1",))))


def refuse_rest(options: Iterable[str]) -> None:
    """Raise InputError if a command has options that no launch says."""
    for name in options:
        raise InputError(f"{name} is no option that plans set", field="command")
