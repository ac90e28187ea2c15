"""Those who train ask for scores in three ways, and each is answered as vLLM answers it, from the same engine.

TRL's own client is driven. SkyRL's and prime-rl's requests are sent in their shape. vLLM's answer comes from its own
route, kept beside ours. Seeds, which the clients do not send, make both sample the same token.
"""

import random
from typing import Any

import httpx
import numpy as np
import pytest

from tests import oracle
from tests.e2e.test_completions import assert_same, connect

VOCABULARY = 1024
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"


def token_ids(length: int, *name: Any) -> list[int]:
    """Others for each name, so that a test finds nothing in the cache."""
    rng = random.Random(repr((name, length)))
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def both(url: str, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
    """Our answer and vLLM's."""
    with connect(url) as client:
        return client.post(path, json=body), client.post(f"/stock{path}", json=body)


def content(response: httpx.Response) -> dict[str, Any]:
    """But for the request's id."""
    return {key: value for key, value in response.raise_for_status().json().items() if key != "request_id"}


# TRL names the versions of vLLM that it was tested with.
@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM versions:UserWarning")
def test_trls_client(server: str):
    """Sequences of several lengths, of which the completions are scored; with the prompts shared by two of them."""
    trl = pytest.importorskip("trl.generation.vllm_client")
    client = trl.VLLMClient(server)
    prompt = token_ids(70, "TRL")
    sequences = [prompt + token_ids(30, "TRL"), prompt + token_ids(9, "TRL"), token_ids(2, "TRL")]
    asked = {"sequences": sequences, "prompt_lengths": [70, 70, 1], "top_logprobs": 100}
    ours, in_chunks = client.get_sequence_logprobs(**asked), client.get_sequence_logprobs(**asked, chunk_size=1)
    client.base_url = f"{server}/stock"
    stock = client.get_sequence_logprobs(**asked)
    client.session.close()
    for answer in (ours, in_chunks):
        assert answer["actual_token_ids"] == stock["actual_token_ids"]
        for field in ("logprobs", "actual_logprobs"):
            for one, other in zip(answer[field], stock[field], strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=oracle.PER_TOKEN)
        for positions in zip(answer["logprobs"], answer["logprob_token_ids"], stock["logprob_token_ids"], strict=True):
            for logprobs, one, other in zip(*positions, strict=True):
                # Which of two tokens nearly as likely as the last is among them is chance.
                certain = [token for token, logprob in zip(one, logprobs, strict=True) if logprob > logprobs[-1] + 0.01]
                assert set(certain) <= set(other)
    assert [len(positions) for positions in ours["logprobs"]] == [30, 9, 1]
    assert {len(position) for positions in ours["logprobs"] for position in positions} == {100}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"prompt_logprobs": 100, "temperature": 0.7}, id="TRL"),
        pytest.param({"prompt_logprobs": 0, "return_token_ids": True, "temperature": 0}, id="SkyRL"),
        {"prompt_logprobs": 1, "logprobs": 3},
        {"prompt_logprobs": 5, "n": 2},
        {"prompt_logprobs": 2, "logprobs": 1, "return_tokens_as_token_ids": True, "stop": ["e"]},
    ],
)
def test_completions_with_prompt_logprobs(server: str, settings: dict[str, Any]):
    body = {"model": "tiny", "max_tokens": 1, "seed": 7, **settings}
    for length in (1, 2, 90):
        ours, stock = both(server, COMPLETIONS, body | {"prompt": [token_ids(length, settings)]})
        assert_same(content(ours), content(stock))


def test_the_tokens_own_entry_is_the_first(server: str):
    """Also in answers that are too large to be written at once: 700 positions with 101 entries."""
    prompt = token_ids(700, "first")
    body = {"prompt": [prompt, prompt[:20]], "max_tokens": 1, "prompt_logprobs": 100}
    with connect(server) as client:
        response = client.post(COMPLETIONS, json=body)
    assert "content-length" not in response.headers
    long, short = (choice["prompt_logprobs"] for choice in response.json()["choices"])
    for scored in (long, short):
        assert scored[0] is None
        assert [next(iter(position)) for position in scored[1:]] == [str(token) for token in prompt[1 : len(scored)]]
        assert {len(position) for position in scored[1:]} <= {100, 101}


def test_a_large_answer_is_vllms(server: str):
    body = {"prompt": [token_ids(500, "large")], "max_tokens": 1, "prompt_logprobs": 100, "temperature": 0}
    ours, stock = both(server, COMPLETIONS, body)
    assert_same(content(ours), content(stock))


def test_a_large_echo_is_vllms(server: str):
    """Both of its logprobs are large, and each has its own texts."""
    body = {"prompt": [token_ids(700, "echo")], "max_tokens": 1, "prompt_logprobs": 60, "logprobs": 20, "echo": True}
    ours, stock = both(server, COMPLETIONS, body | {"temperature": 0})
    assert_same(content(ours), content(stock))


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_a_client_may_leave_while_a_large_answer_is_sent(server: str, path: str):
    prompt = token_ids(1500, path)
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 100}
    if path == GENERATE:
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 100}}
    with connect(server) as client:
        with client.stream("POST", path, json=body) as response:
            assert next(response.iter_raw())
        assert client.get("/health").status_code == 200
        short = {"prompt": [5, 6], "prompt_logprobs": 0, "max_tokens": 1}
        assert content(client.post(COMPLETIONS, json=short))["choices"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="prime-rl"),
        {"return_token_ids": True},
        {"cache_salt": "a secret"},
        {"sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": 2, "temperature": 0.7, "seed": 3}},
        {"sampling_params": {"max_tokens": 1, "prompt_logprobs": 100, "temperature": 0}},
        {"sampling_params": {"max_tokens": 1, "prompt_logprobs": 2, "seed": 3, "n": 2}},
        pytest.param({"sampling_params": {"max_tokens": 3, "temperature": 0}}, id="generates"),
        pytest.param(
            {"sampling_params": {"max_tokens": 1, "prompt_logprobs": 1, "seed": 3}, "output_mode": "text"}, id="text"
        ),
    ],
)
def test_the_generate_route(server: str, change: dict[str, Any]):
    body = {"model": "tiny", "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1, "seed": 7}} | change
    for length in (1, 2, 90):
        ours, stock = both(server, GENERATE, body | {"token_ids": token_ids(length, change)})
        assert_same(content(ours), content(stock))


def test_a_large_answer_of_the_generate_route_is_vllms(server: str):
    settings = {"max_tokens": 1, "prompt_logprobs": 100, "temperature": 0}
    body = {"model": "tiny", "token_ids": token_ids(400, "large"), "sampling_params": settings}
    ours, stock = both(server, GENERATE, body)
    assert_same(content(ours), content(stock))


def test_the_first_of_the_generate_routes_prompt_logprobs_is_null(server: str):
    body = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    with connect(server) as client:
        first, *others = content(client.post(GENERATE, json=body))["prompt_logprobs"]
    assert first is None
    assert [next(iter(position)) for position in others] == ["6", "7"]


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [5, 10**6]},
        {"token_ids": [5] * 3000},
        {"model": "gpt-5"},
        {"sampling_params": {"max_tokens": 1, "prompt_logprobs": 257}},
        {"sampling_params": {"max_tokens": 1, "prompt_logprobs": 1, "n": 9}},
    ],
)
def test_what_vllm_refuses_on_the_generate_route(server: str, change: dict[str, Any]):
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    ours, stock = both(server, GENERATE, body | change)
    assert ours.status_code == stock.status_code >= 400
    assert_same(ours.json(), stock.json())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, -1]}, "token_ids"),
        ({"sampling_params": {"temperature": "warm"}}, "sampling_params"),
    ],
)
def test_a_field_that_is_no_valid_value_is_named(server: str, change: dict[str, Any], param: str):
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    ours, stock = both(server, GENERATE, body | change)
    assert ours.status_code == stock.status_code == 400
    assert ours.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5, 6], "max_tokens": 0, "prompt_logprobs": 1},
        {"prompt": [5, 6], "max_tokens": 1, "prompt_logprobs": 257},
        {"prompt": [5, 6], "max_tokens": 1, "prompt_logprobs": 1, "temperature": -1},
        {"prompt": [[5] * 2048], "max_tokens": 1, "prompt_logprobs": 1},
    ],
)
def test_what_vllm_refuses_in_completions(server: str, body: dict[str, Any]):
    ours, stock = both(server, COMPLETIONS, body)
    assert ours.status_code == stock.status_code == 400
    assert_same(ours.json(), stock.json())


def test_without_the_flag_the_generate_route_refuses_as_vllms_does(plugin_server: str):
    with connect(plugin_server) as client:
        response = client.post(GENERATE, json={"token_ids": [5], "sampling_params": {"max_tokens": 1}})
    assert response.status_code == 403
    assert "--enable-scale-out" in response.text
