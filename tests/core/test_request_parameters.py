"""Request parameters are declared once, and every surface takes them from there.

`test_a_new_parameter_is_one_declaration` follows the recipe: it adds a toy parameter to that file, and
to no other, and looks for it everywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from atoll.core import request_parameters
from atoll.core.request_parameters import PARAMETERS, Parameter, SamplingParams, engine_values

ROOT = Path(__file__).parents[2]
SURFACES = ("gateway", "responses", "messages", "graph", "component", "instance")


def render_row(parameter: Parameter) -> str:
    """Return the row of a parameter in the table of docs/reference/gateway.md."""
    use = parameter.use
    try:
        _, low, high = parameter.limits("gateway")
        values = f"{low:g} to {high:g}" if abs(high) < 1000 else f"from {low:g}"
        values = "any whole number of 64 bits" if parameter.name == "seed" else values
    except TypeError:
        kinds = [kind for kind in get_args(parameter.type) if kind is not type(None)]
        bases = [getattr(kind, "__origin__", kind) for kind in kinds]
        named = {str: "text", bool: "true or false"}
        values = " or ".join(
            dict.fromkeys(
                named.get(base, "list" if "list" in str(base) else "object") for base in bases
            )
        )
    checked = "checked" if use.gateway else "passed"
    cells = [
        f"`{parameter.name}`",
        values,
        checked,
        f"`{use.responses}`" if use.responses else "400",
        f"`{use.messages}`" if use.messages else "400",
        {"neutral": "only where it changes nothing", None: "400"}.get(use.graph, use.graph),
        "yes" if use.instance or (use.gateway and use.graph != "ignored") else "no",
    ]
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def test_the_docs_list_every_parameter_as_it_is_declared() -> None:
    page = (ROOT / "docs/reference/gateway.md").read_text()
    section = page.split("### Parameters\n")[1].split("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [render_row(parameter) for parameter in PARAMETERS.values()]


def test_options_of_the_engine_have_the_names_and_defaults_that_are_declared() -> None:
    for parameter in PARAMETERS.values():
        if parameter.use.convert is not None:
            value = parameter.engine_value(None)
            assert SamplingParams(**{parameter.name: value}) is not None
    assert engine_values(object()) == {}


_TOY = """    toy: Annotated[
        Annotated[float, Meta(ge=0.0, le=7.0)] | None,
        ParameterUse(
            gateway=True,
            responses="toy",
            messages="toy",
            graph="taken",
            component=True,
            default=2.0,
            task_default=3.0,
            convert=float,
        ),
    ] = None
"""
_SCRIPT = """
import json, sys, types
source, name = sys.stdin.read(), "atoll.core.request_parameters"
module = types.ModuleType(name)
sys.modules[name] = module
exec(compile(source, name, "exec"), module.__dict__)

import msgspec
from atoll.components.chat_inputs import read_chat
from atoll.runtime.executor.openai_chat import OpenAiChat
from atoll.runtime.gateway.dialects import messages_request as messages
from atoll.runtime.gateway.dialects import responses_request as responses
from atoll.runtime.graph_server.chat_endpoint import ChatFields
from atoll.runtime.openai import ApiError, read_request
from atoll.tasks.library.unit_tasks import Chat

said = [{"role": "user", "content": "Hi"}]
body = {"model": "m", "messages": said, "max_tokens": 1}
found = {"gateway": read_request("/v1/chat/completions", msgspec.json.encode(body | {"toy": 5})).toy}
try:
    read_request("/v1/completions", b'{"model": "m", "prompt": "", "toy": 8}')
except ApiError as error:
    found["refused"] = error.param
request = responses.read_responses(b'{"model": "m", "input": "Hi", "toy": 5}')
found["responses"] = json.loads(responses.chat_body(request))["toy"]
request = messages.read_messages(msgspec.json.encode(body | {"toy": 5}))
found["messages"] = json.loads(messages.chat_body(request))["toy"]
fields = msgspec.json.decode(msgspec.json.encode(body | {"toy": 5}), type=ChatFields)
found["graph"] = fields.sampling()["toy"]
found["task"] = module.TASK_DEFAULTS["toy"]
asked = read_chat({"messages": said, "toy": 5})
found["component"] = asked.toy
found["executor"] = OpenAiChat("http://a/v1", "m")._ask(asked).body["toy"]
found["engine"] = module.SamplingParams(**module.engine_values(asked)).toy
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_a_new_parameter_is_one_declaration() -> None:
    source = Path(request_parameters.__file__).read_text()
    place = source.index("    temperature: Annotated[")
    option = source.index("    temperature: float = Field(")
    source = f"{source[:place]}{_TOY}{source[place:option]}    toy: float = 2.0\n{source[option:]}"
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=source,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found.pop("refused") == "toy"
    assert found.pop("task") == 3.0
    assert set(found.values()) == {5.0}
    assert len(found) == 7


@pytest.mark.parametrize("surface", SURFACES)
def test_surfaces_know_the_parameters_that_are_declared_for_them(surface: Any) -> None:
    from atoll.components.chat_inputs import ChatInputs
    from atoll.runtime.gateway.dialects.messages_request import MessagesRequest
    from atoll.runtime.gateway.dialects.responses_request import ResponsesRequest
    from atoll.runtime.graph_server.chat_endpoint import ChatFields
    from atoll.runtime.openai import Generation

    pytest.importorskip("tokenizers", reason="needs the extra 'engine'")
    from atoll.runtime.instance.instance_requests import _Extras

    kinds = (Generation, ResponsesRequest, MessagesRequest, ChatFields, ChatInputs, _Extras)
    known = kinds[SURFACES.index(surface)].__struct_fields__
    for parameter in PARAMETERS.values():
        name = parameter.name_at(surface)
        assert name is None or name.split(".")[0] in known, parameter.name
        if name is None:
            assert parameter.name not in known, parameter.name
