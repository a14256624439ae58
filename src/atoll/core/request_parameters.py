"""Parameters of requests that generate text, each declared once.

A parameter is one field of `RequestParameters`: its type and range, and in `ParameterUse` how it travels.
Every surface takes its fields from there:

- gateway: checks it at the entrance (what it does not check passes unread) and forwards the body as it came
- responses, messages: the dialects of OpenAI and Anthropic, which are translated into a chat request
- graph: the graph server, which answers by a task of several components
- component: components that chat, among them the client of other OpenAI servers
- instance: the server of the stage engine, which reads parameters beside those of the gateway

What reaches the stage engine becomes `SamplingParams`, further down. To add a parameter: a field here (for
the stage engine a field of `SamplingParams`, too, and its effect in `engine/token_sampling.py`), and a row
in the table of `docs/reference/gateway.md`. The test of this module checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct
from pydantic import Field

from atoll.core.frozen import Frozen

Surface = Literal["gateway", "responses", "messages", "graph", "component", "instance"]

MAX_INT32 = 2**31 - 1
MAX_SEED = 2**63
"""Seeds of the engine lie below; those of clients wrap around."""
GREEDY_BELOW = 1e-5
"""Temperatures that are taken for 0."""

NonNegative = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Fallbacks = Annotated[list[Name], Meta(max_length=64)] | None
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, Meta(max_length=4096)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=64)] | None
Bias = dict[Annotated[str, Meta(max_length=32)], Annotated[float, Meta(ge=-100.0, le=100.0)]]
TokenIds = Annotated[list[NonNegative], Meta(max_length=1024)]


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """How a parameter travels.

    responses, messages: its name in that dialect, None: refused as unknown. A name other than chat's ("a.b":
    within an object) is a field that the dialect's request declares itself.
    graph: "taken", "neutral" (known, but only values that change nothing are taken), "ignored", None: refused
    as unknown. component: whether components that chat take it. types: where a surface checks it otherwise.
    neutral: values that change nothing. default: the value of components and of the engine where the client
    gives none. task_default: the same for tasks of the library, None: they do not hand it on.
    convert: the engine's value for a client's, None: no option of the engine by itself.
    """

    gateway: bool = False
    responses: str | None = None
    messages: str | None = None
    graph: Literal["taken", "neutral", "ignored"] | None = None
    component: bool = False
    instance: bool = False
    types: Mapping[Surface, Any] = field(default_factory=dict)
    neutral: tuple[Any, ...] = ()
    default: Any = None
    task_default: Any = None
    convert: Callable[[Any], Any] | None = None


def _wrap_seed(seed: int) -> int:
    return seed % MAX_SEED


def _count_top(top_k: int) -> int:
    """Return 0, the engine's word for all tokens, also for -1, which is vLLM's."""
    return max(0, top_k)


def _share_or_all(top_p: float) -> float:
    return float(top_p) or 1.0


class RequestParameters(Struct, kw_only=True):
    """All parameters. No request has this type: `parameters_at` makes the base of each surface's."""

    models: Annotated[
        Fallbacks,
        ParameterUse(gateway=True, responses="models", messages="models", graph="ignored"),
    ] = None
    """Models that may serve instead, best first."""
    user: Annotated[
        str | None,
        ParameterUse(gateway=True, responses="user", messages="metadata.user_id", graph="ignored"),
    ] = None
    n: Annotated[
        Choices | None,
        ParameterUse(
            gateway=True, graph="neutral", neutral=(1,), types={"graph": NonNegative | None}
        ),
    ] = None
    max_tokens: Annotated[
        NonNegative | None,
        ParameterUse(
            gateway=True,
            responses="max_output_tokens",
            messages="max_tokens",
            graph="taken",
            component=True,
            # Anthropic's clients must say it.
            types={
                "messages": Positive,
                "graph": Positive | None,
                "component": Positive | None,
            },
            task_default=256,
        ),
    ] = None
    temperature: Annotated[
        Temperature | None,
        ParameterUse(
            gateway=True,
            responses="temperature",
            messages="temperature",
            graph="taken",
            component=True,
            default=1.0,
            task_default=1.0,
            convert=float,
        ),
    ] = None
    top_p: Annotated[
        Share | None,
        ParameterUse(
            gateway=True,
            responses="top_p",
            messages="top_p",
            graph="taken",
            component=True,
            default=1.0,
            task_default=1.0,
            convert=_share_or_all,
        ),
    ] = None
    seed: Annotated[
        Seed | None,
        ParameterUse(
            gateway=True,
            responses="seed",
            messages="seed",
            graph="taken",
            component=True,
            task_default=0,
            convert=_wrap_seed,
        ),
    ] = None
    stop: Annotated[
        Stop,
        ParameterUse(
            gateway=True,
            responses="stop",
            messages="stop_sequences",
            graph="taken",
            component=True,
            neutral=((),),
            default=(),
            task_default=(),
        ),
    ] = None
    presence_penalty: Annotated[
        Penalty | None,
        ParameterUse(
            gateway=True,
            responses="presence_penalty",
            messages="presence_penalty",
            graph="neutral",
            component=True,
            neutral=(0,),
            default=0.0,
            convert=float,
        ),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None,
        ParameterUse(
            gateway=True,
            responses="frequency_penalty",
            messages="frequency_penalty",
            graph="neutral",
            component=True,
            neutral=(0,),
            default=0.0,
            convert=float,
        ),
    ] = None
    logit_bias: Annotated[
        Annotated[Bias, Meta(max_length=4096)] | None,
        ParameterUse(
            gateway=True,
            graph="neutral",
            neutral=({},),
            types={"graph": dict[str, float] | None},
        ),
    ] = None
    stop_token_ids: Annotated[
        TokenIds | None, ParameterUse(gateway=True, default=(), convert=tuple)
    ] = None
    """Of vLLM and others."""
    # Of vLLM. Dialects leave the range to the engine that gets them.
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None,
        ParameterUse(
            responses="top_k",
            messages="top_k",
            instance=True,
            types={"responses": int | None, "messages": int | None},
            default=0,
            convert=_count_top,
        ),
    ] = None
    min_p: Annotated[
        Share | None,
        ParameterUse(
            responses="min_p", messages="min_p", instance=True, default=0.0, convert=float
        ),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=100.0)] | None,
        ParameterUse(
            responses="repetition_penalty",
            messages="repetition_penalty",
            instance=True,
            types={"responses": float | None, "messages": float | None},
            default=1.0,
            convert=float,
        ),
    ] = None
    min_tokens: Annotated[NonNegative | None, ParameterUse(instance=True)] = None
    ignore_eos: Annotated[bool | None, ParameterUse(instance=True, default=False, convert=bool)] = (
        None
    )
    # Forms of the answer, of vLLM and llama.cpp. The gateway must know that there is one: a stream that has
    # a form cannot be continued from its text.
    guided_json: Annotated[
        dict[str, Any] | str | None, ParameterUse(gateway=True, instance=True)
    ] = None
    guided_regex: Annotated[str | None, ParameterUse(gateway=True, instance=True)] = None
    guided_choice: Annotated[list[str] | None, ParameterUse(gateway=True, instance=True)] = None
    guided_grammar: Annotated[str | None, ParameterUse(gateway=True, instance=True)] = None
    structured_outputs: Annotated[
        dict[str, Any] | None, ParameterUse(gateway=True, instance=True)
    ] = None
    grammar: Annotated[str | None, ParameterUse(gateway=True, instance=True)] = None
    json_schema: Annotated[dict[str, Any] | None, ParameterUse(gateway=True, instance=True)] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        ParameterUse(
            responses="chat_template_kwargs", messages="chat_template_kwargs", instance=True
        ),
    ] = None
    reasoning_effort: Annotated[
        str | None,
        ParameterUse(responses="reasoning.effort", messages="output_config.effort", instance=True),
    ] = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A declared parameter: its name, its type as msgspec checks it, and how it travels."""

    name: str
    type: Any
    use: ParameterUse

    def name_at(self, surface: Surface) -> str | None:
        """Return what a surface calls the parameter, None where it does not know it."""
        found = getattr(self.use, surface)
        if surface in ("responses", "messages"):
            return found  # type: ignore[no-any-return]
        return self.name if found else None

    def type_at(self, surface: Surface) -> Any:
        """Return the type by which a surface checks the parameter."""
        if surface == "graph" and self.use.graph == "ignored":
            return Any
        return self.use.types.get(surface, self.type)

    def limits(self, surface: Surface) -> tuple[type, float, float]:
        """Return whether a number is int or float, and its lowest and highest value."""
        for kind in get_args(self.type_at(surface)):
            inner, *metas = get_args(kind) or (None,)
            if inner in (int, float):
                return inner, metas[0].ge, metas[0].le
        raise TypeError(f"{self.name} is no number with limits")

    def engine_value(self, value: Any) -> Any:
        """Return the engine's value for what a client gave."""
        if value is None:
            return self.use.default
        return value if self.use.convert is None else self.use.convert(value)


def _declared() -> Iterable[Parameter]:
    for name, hint in get_type_hints(RequestParameters, include_extras=True).items():
        kind, use = get_args(hint)
        yield Parameter(name, kind, use)


FORMS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "grammar", "json_schema"),
)
"""Parameters that give an answer a form."""
ANSWER_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "tools"),
    "response_format": "response_format",
    **dict.fromkeys(("logprobs", "top_logprobs"), "logprobs"),
}
"""Fields of a chat that only some language models obey, and the field that each belongs to.

Tasks and components say which they do (`obeys`); the others are refused by name.
"""
PARAMETERS: Mapping[str, Parameter] = {each.name: each for each in _declared()}
COMPONENT_PARAMETERS = tuple(each for each in PARAMETERS.values() if each.use.component)
TASK_DEFAULTS: Mapping[str, Any] = {
    each.name: each.use.task_default
    for each in PARAMETERS.values()
    if each.use.task_default is not None
}
"""How a language model of a task draws, where nobody says."""


def parameters_at(surface: Surface, base: type[Struct] = Struct) -> Any:
    """Return a struct with the parameters of a surface, as a base of its requests."""
    fields: list[Any] = []
    for each in PARAMETERS.values():
        name, kind = each.name_at(surface), each.type_at(surface)
        if name != each.name:
            continue
        required = kind is not Any and type(None) not in get_args(kind)
        if required:
            fields.append((name, kind))
        else:
            fields.append((name, kind, each.use.default if surface == "component" else None))
    title = f"{surface.title()}Parameters"
    frozen = surface == "component"
    return msgspec.defstruct(
        title, fields, bases=(base,), module=__name__, kw_only=True, frozen=frozen
    )


if TYPE_CHECKING:
    # Checkers see all parameters at each surface: they cannot follow what is made while importing.
    GatewayParameters = RequestParameters
    ResponsesParameters = RequestParameters
    GraphParameters = RequestParameters
    InstanceParameters = RequestParameters

    class ComponentParameters(Struct, frozen=True):
        """Values as the engine takes them."""

        def __getattr__(self, name: str) -> Any: ...

else:
    GatewayParameters = parameters_at("gateway")
    ResponsesParameters = parameters_at("responses")
    GraphParameters = parameters_at("graph")
    ComponentParameters = parameters_at("component")
    InstanceParameters = parameters_at("instance")


def chat_parameters(request: Struct, dialect: Literal["responses", "messages"]) -> dict[str, Any]:
    """Return the parameters of a dialect's request by their names in chat, those that were given."""
    given: dict[str, Any] = {}
    for each in PARAMETERS.values():
        value: Any = request
        for step in (each.name_at(dialect) or "").split("."):
            value = getattr(value, step, None)
        if value is not None and value != []:
            given[each.name] = value
    return given


def engine_values(request: object) -> dict[str, Any]:
    """Return the options of `SamplingParams` that a request's parameters of the same names give."""
    return {
        each.name: each.engine_value(getattr(request, each.name))
        for each in PARAMETERS.values()
        if each.use.convert is not None and hasattr(request, each.name)
    }


class OutputFormat(Frozen):
    """The form of an answer: a JSON schema, a regular expression, any JSON object, or a grammar.

    "lark" is a grammar of Atoll's own, in the syntax of llguidance; "grammar" is somebody's, in that or in
    llama.cpp's (GBNF).
    """

    kind: Literal["json_schema", "regex", "json_object", "lark", "grammar"]
    text: str = ""


class SamplingParams(Frozen):
    """How the engine chooses the next token. The defaults are greedy and limited by nothing but length.

    temperature 0, and less than 1e-5, is greedy; top_k 0, top_p 1 and min_p 0 are off; repetition_penalty
    1 is off; before `min_tokens` no token ends the answer;
    `logprobs` is how many alternatives to report beside the chosen token (None: none at all).
    The same seed gives the same answer whatever else runs and whichever nodes are taken.
    """

    max_tokens: int = Field(default=128, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = Field(default=None, ge=0, le=20)
    guide: OutputFormat | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken; logits over next to nothing would be no numbers."""
        return self.temperature < GREEDY_BELOW
