"""Embeddings, tokens, completions and the client's mistakes, on real nodes of a model that is cut."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

from tests.runtime.serving.test_instance import asked, chunks, get, post, text_of, whole
from tests.served_fleet import Running

pytestmark = pytest.mark.engine
Json = dict[str, Any]
PROMPT = "Hello there"
TOKENS = [ord(c) - 31 for c in PROMPT]


@pytest.fixture(scope="module")
def model(running: Running) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(running.folder).eval()


def test_vectors_are_those_of_transformers(running: Running, model: Any) -> None:
    import torch

    openai = pytest.importorskip("openai", reason="needs OpenAI's client")
    texts = ["Hello there", "x", "A longer text, " * 20]
    with openai.OpenAI(base_url=f"{running.fleet.url}/v1", api_key="x", max_retries=0) as client:
        # The client asks for base64 by itself.
        found = client.embeddings.create(model="tiny", input=texts)
        short = client.embeddings.create(model="tiny", input=[TOKENS], dimensions=8)
    assert found.usage.prompt_tokens == sum(map(len, texts))
    for text, entry in zip(texts, found.data, strict=True):
        with torch.no_grad():
            tokens = torch.tensor([[ord(c) - 31 for c in text]])
            last = model.model(tokens).last_hidden_state[0, -1]
        assert entry.embedding == pytest.approx((last / last.norm()).tolist(), abs=1e-4)
    whole_vector = found.data[0].embedding
    length = sum(value**2 for value in whole_vector[:8]) ** 0.5
    expected = [value / length for value in whole_vector[:8]]
    assert short.data[0].embedding == pytest.approx(expected, abs=1e-4)


def test_a_prompt_is_shown_with_its_log_probabilities(running: Running, model: Any) -> None:
    import torch

    answer = whole(running, echo=True, logprobs=1, max_tokens=3)["choices"][0]
    plain = whole(running, max_tokens=3)["choices"][0]
    assert answer["text"] == PROMPT + plain["text"]
    assert answer["token_ids"] == plain["token_ids"]
    found = answer["logprobs"]
    assert "".join(found["tokens"]) == answer["text"]
    assert found["text_offset"] == list(range(len(answer["text"])))
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0], -1)
    expected = [float(logs[i, token]) for i, token in enumerate(TOKENS[1:])]
    assert found["token_logprobs"][1 : len(TOKENS)] == pytest.approx(expected, abs=1e-3)
    only = whole(running, echo=True, logprobs=0, max_tokens=0)
    assert only["choices"][0]["text"] == PROMPT
    assert only["choices"][0]["finish_reason"] == "length"
    assert only["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        found["token_logprobs"][: len(TOKENS)], abs=1e-4
    )
    assert only["usage"]["completion_tokens"] == 0
    assert whole(running, echo=True, max_tokens=0)["choices"][0]["text"] == PROMPT


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
def test_an_echo_streams_and_goes_on_where_it_broke_off(running: Running, more: Json) -> None:
    more = more | {"echo": True, "max_tokens": 12, "seed": 3, "temperature": 0.9}
    expected = whole(running, **more)["choices"][0]
    found = chunks(post(running.instance_url, asked(stream=True, **more))[1])
    assert text_of(found) == expected["text"]
    text = PROMPT + expected["text"][len(PROMPT) : len(PROMPT) + 5]
    resume = {"text": text, "tokens": 5, "token_ids": expected["token_ids"][:5]}
    rest = chunks(
        post(running.instance_url, asked(stream=True, atoll={"resume": resume}, **more))[1]
    )
    assert text + text_of(rest) == expected["text"]


def test_several_choices_stream_as_they_are_whole(running: Running) -> None:
    more: Json = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 6}
    expected = [choice["text"] for choice in whole(running, **more)["choices"]]
    assert len(set(expected)) == 3
    found: dict[int, str] = {}
    for chunk in chunks(post(running.instance_url, asked(stream=True, **more))[1]):
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    assert [found[index] for index in range(3)] == expected
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        **more,
    }
    chat = json.loads(post(running.instance_url, body, "/v1/chat/completions")[1])
    assert [choice["message"]["content"] for choice in chat["choices"]] == expected


def test_the_best_of_several(running: Running) -> None:
    more: Json = {"seed": 5, "temperature": 1.0, "max_tokens": 6}
    all_of_them = whole(running, n=4, logprobs=0, **more)["choices"]

    def mean(choice: Json) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    ranked = [c["text"] for c in sorted(all_of_them, key=mean, reverse=True)]
    best = whole(running, n=2, best_of=4, **more)
    assert [choice["text"] for choice in best["choices"]] == ranked[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in all_of_them)


def test_tokens_there_and_back(running: Running) -> None:
    for url in (running.instance_url, running.fleet.url):
        found = json.loads(post(url, {"model": "tiny", "prompt": PROMPT}, "/tokenize")[1])
        assert (found["tokens"], found["count"]) == (TOKENS, len(TOKENS))
        assert 0 < found["max_model_len"] <= 1024
        back = json.loads(post(url, {"model": "tiny", "tokens": TOKENS}, "/detokenize")[1])
        assert back == {"prompt": PROMPT}


MISTAKES: list[Json] = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
    {"guided_regex": "(?=a)b"},
    {"use_beam_search": True},
    {"stop": ["x" * 20_000]},
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_s_mistake_is_nobody_else_s(running: Running, stream: bool) -> None:
    """Each is told so once, by 400; the backend stays as good as it was."""
    before = json.loads(get(f"{running.instance_url}/atoll/v1/status")[1])
    for more in MISTAKES:
        code, answer = post(running.fleet.url, asked(stream=stream, **more))
        assert code == 400, (more, answer)
        assert json.loads(answer)["error"]["type"] == "invalid_request_error"
    after = json.loads(get(f"{running.instance_url}/atoll/v1/status")[1])
    assert after["restarts"] == before["restarts"]
    assert [node["alive"] for node in after["nodes"]] == [True] * 3
    members = list(running.fleet.gateway.pool.members.values())
    assert [member.state for member in members] == ["up"] * len(members)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_out_is_named_to_the_client(running: Running, stream: bool) -> None:
    body = json.dumps(asked(stream=stream, store=True, guided_choice=["AB", "CD"])).encode()
    request = urllib.request.Request(f"{running.fleet.url}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["x-atoll-ignored"] == "store"
        said = "".join(re.findall(r'"text": ?"(.*?)"', answer.read().decode()))
        assert said in ("AB", "CD")


def test_next_to_nothing_is_greedy(running: Running) -> None:
    expected = whole(running, max_tokens=8)["choices"][0]["text"]
    for more in ({"temperature": 1e-320}, {"temperature": 5e-324}, {"temperature": 1, "top_p": 0}):
        answer = whole(running, max_tokens=8, logprobs=1, **more)["choices"][0]
        assert answer["text"] == expected
        assert all(value <= 0 for value in answer["logprobs"]["token_logprobs"])


def test_other_methods_are_told_so(running: Running) -> None:
    for path in ("/v1/embeddings", "/tokenize", "/detokenize"):
        request = urllib.request.Request(running.instance_url + path)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code == 405
        caught.value.close()
