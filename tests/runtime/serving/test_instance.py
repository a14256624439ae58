"""An instance of the stage engine as clients see it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.served_fleet import Running

pytestmark = pytest.mark.engine
Json = dict[str, Any]


def post(url: str, body: object, path: str = "/v1/completions") -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return answer.status, answer.read().decode()


def asked(**more: object) -> Json:
    return {"model": "tiny", "prompt": "Hello there", "max_tokens": 40, "temperature": 0} | more


def whole(running: Running, **more: object) -> Json:
    status, body = post(running.instance_url, asked(**more))
    assert status == 200, body
    found: Json = json.loads(body)
    return found


def chunks(body: bytes) -> list[Json]:
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def text_of(found: list[Json]) -> str:
    return "".join(choice["text"] for chunk in found for choice in chunk["choices"])


def test_tokens_are_those_of_transformers(running: Running) -> None:
    import torch
    import transformers

    answer = whole(running, ignore_eos=True)["choices"][0]
    model = transformers.AutoModelForCausalLM.from_pretrained(running.folder)
    prompt = [ord(c) - 31 for c in "Hello there"]
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert answer["token_ids"] == made[0, len(prompt) :].tolist()


def test_stream_equals_whole(running: Running) -> None:
    expected = whole(running)
    options = {"include_usage": True}
    status, body = post(running.instance_url, asked(stream=True, stream_options=options))
    found = chunks(body)
    assert status == 200
    assert text_of(found) == expected["choices"][0]["text"]
    assert found[-1]["usage"] == expected["usage"]
    assert found[-2]["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    ids = [t for chunk in found for c in chunk["choices"] for t in c["token_ids"]]
    assert ids == expected["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("with_ids", "more"),
    [
        (True, {"presence_penalty": 1.5, "temperature": 0.8, "seed": 5}),
        (False, {}),
        pytest.param(True, {}, marks=pytest.mark.slow),
        pytest.param(
            *(False, {"presence_penalty": 1.5, "temperature": 0.8, "seed": 5}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resumed_anywhere_it_is_the_same_answer(
    running: Running, with_ids: bool, more: Json
) -> None:
    expected = whole(running, **more)
    choice = expected["choices"][0]
    for cut in (0, 1, 17, 39, 40):
        text = choice["text"][:cut]
        resume: Json = {"text": text, "tokens": cut}
        if with_ids:
            resume["token_ids"] = choice["token_ids"][:cut]
        body = asked(
            stream=True,
            stream_options={"include_usage": True},
            atoll={"resume": resume},
            **more,
        )
        found = chunks(post(running.instance_url, body)[1])
        assert text + text_of(found) == choice["text"]
        assert found[-1]["usage"] == expected["usage"]
        assert found[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_every_event_says_how_many_tokens_there_are_if_asked(running: Running) -> None:
    expected = whole(running)
    choice, cut = expected["choices"][0], 17
    resume = {"text": choice["text"][:cut], "token_ids": choice["token_ids"][:cut], "tokens": cut}
    for more, before in (({}, 0), ({"n": 2}, 0), ({"atoll": {"resume": resume}}, cut)):
        options = {"include_usage": True, "continuous_usage_stats": True}
        found = chunks(
            post(running.instance_url, asked(stream=True, stream_options=options, **more))[1]
        )
        made = dict.fromkeys(range(2), before)
        for chunk in found[:-1]:
            (part,) = chunk["choices"]
            made[part["index"]] += len(part["token_ids"])
            usage = expected["usage"] | {"completion_tokens": made[part["index"]]}
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
            assert chunk["usage"] == usage
        assert found[-1]["usage"]["completion_tokens"] == sum(made.values()) - (
            0 if "n" in more else before
        )


def test_stop_strings_are_never_shown(running: Running) -> None:
    text = whole(running)["choices"][0]["text"]
    stop = text[10:13]
    answer = whole(running, stop=[stop])["choices"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"
    cut = text.index(stop) - 1
    body = asked(stream=True, stop=stop, atoll={"resume": {"text": text[:cut], "tokens": cut}})
    assert text_of(chunks(post(running.instance_url, body)[1])) == answer["text"][cut:]


def test_several_answers(running: Running) -> None:
    answer = whole(running, prompt=["Hello there", "Something else"], n=2, ignore_eos=True)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer["usage"]["prompt_tokens"] == 11 + 14
    assert answer["usage"]["completion_tokens"] == 160


def test_log_probabilities(running: Running) -> None:
    found = whole(running, logprobs=2, max_tokens=5)["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == 5
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == pytest.approx(value)
        assert value == max(top.values()) <= 0
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}],
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    answer = json.loads(post(running.instance_url, chat, "/v1/chat/completions")[1])
    entries = answer["choices"][0]["logprobs"]["content"]
    assert (
        "".join(entry["token"] for entry in entries) == answer["choices"][0]["message"]["content"]
    )


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (asked(model="other"), 404, "model"),
        (asked(max_tokens=-1), 400, "max_tokens"),
        (asked(prompt="x" * 4_000_000), 400, "prompt"),
    ],
)
def test_nonsense_is_refused_in_openai_s_shape(
    running: Running, body: object, status: int, param: str | None
) -> None:
    code, answer = post(running.instance_url, body)
    error = json.loads(answer)["error"]
    assert code == status, error
    assert error.keys() == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param


def test_pages(running: Running) -> None:
    url = running.instance_url
    assert json.loads(get(f"{url}/v1/models")[1])["data"][0]["id"] == "tiny"
    assert get(f"{url}/health")[0] == 200
    metrics = get(f"{url}/metrics")[1]
    counted = next(
        line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total{")
    )
    assert float(counted.rpartition(" ")[2]) > 0
    assert 'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="tiny"}' in metrics
    late = [line for line in metrics.splitlines() if "node_compiled_after_ready_total{" in line]
    assert [float(line.rpartition(" ")[2]) for line in late] == [0, 0, 0]
    nodes = json.loads(get(f"{url}/atoll/v1/status")[1])["nodes"]
    assert [n["stats"]["compiled_after_ready"] for n in nodes] == [0, 0, 0]
    assert [(n["name"], n["start"], n["end"], n["alive"]) for n in nodes] == [
        ("a/n0", 0, 1, True),
        ("a/n1", 0, 1, True),
        ("a/n2", 1, 4, True),
    ]


def test_siblings_share_the_work(running: Running) -> None:
    for number in range(6):
        whole(running, prompt=f"Sibling {number}", max_tokens=2)
    nodes = json.loads(get(f"{running.instance_url}/atoll/v1/status")[1])["nodes"]
    steps = {node["name"]: node["stats"]["steps"] for node in nodes}
    assert steps["a/n0"] > 0
    assert steps["a/n1"] > 0


def test_a_client_that_leaves_frees_its_room(running: Running) -> None:
    body = json.dumps(asked(stream=True, max_tokens=900, ignore_eos=True)).encode()
    request = urllib.request.Request(f"{running.instance_url}/v1/completions", data=body)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.readline()
    import time

    deadline_s = time.monotonic() + 60
    while json.loads(get(f"{running.instance_url}/atoll/v1/status")[1])["running"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
