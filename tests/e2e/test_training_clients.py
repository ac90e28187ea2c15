"""Trainers ask for scores in three ways, and each response is what vLLM returns, from the same engine.

TRL's own client is driven. SkyRL's and prime-rl's requests are sent in their shape. vLLM's response comes from its own
route, under /stock. Seeds, which the clients do not send, make both sample the same token.
"""

import os
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from tests import oracle
from tests.e2e.test_completions import SCORING, assert_same, connect, name_the_most_likely, random_ids

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
LARGE: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 100, "temperature": 0}
VALID = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
# TRL names the versions of vLLM that it was tested with.
of_trl = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM versions:UserWarning")


def token_ids(length: int, *name: Any) -> list[int]:
    """Others for each name, so that a test finds nothing in the cache."""
    return random_ids(random.Random(repr((name, length))), length)


def both(url: str, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
    """Our response and vLLM's."""
    with connect(url) as client:
        return client.post(path, json=body), client.post(f"/stock{path}", json=body)


def assert_scored_alike(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    """Our response, which is vLLM's but for the request's id."""
    ours, stock = both(url, path, body)
    contents = [response.raise_for_status().json() for response in (ours, stock)]
    for content in contents:
        content.pop("request_id", None)
    name_the_most_likely(*contents, body)
    assert_same(*contents)
    return ours


@pytest.fixture(scope="module")
def trl_client() -> Callable[[str], Any]:
    """TRL's client of a server at an address. Importing TRL lowers vLLM's log level for all processes started later."""
    with patch.dict(os.environ):
        module = pytest.importorskip("trl.generation.vllm_client")
    return lambda url: module.VLLMClient(url)


@of_trl
def test_trls_client(server, trl_client):
    """Sequences of several lengths, of which the completions are scored; with the prompts shared by two of them."""
    client = trl_client(server)
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
    assert [len(positions) for positions in ours["logprobs"]] == [30, 9, 1]
    assert {len(position) for positions in ours["logprobs"] for position in positions} == {100}


@of_trl
def test_trls_teachers_have_the_temperature_that_it_asks_for(llama_2_server, llama_2_model, trl_client):
    """TRL starts them with processed logprobs. Each answer comes twice, the second time from the cache."""
    client = trl_client(llama_2_server)
    sequence = token_ids(100, "a teacher")
    logits = oracle.logits(llama_2_model, sequence)[69:]
    for temperature in (0.7, 1.0) * 2:
        teacher = client.get_sequence_logprobs([sequence], [70], top_logprobs=100, temperature=temperature)
        expected = (logits / temperature).log_softmax(-1)
        actual = expected[range(30), sequence[70:]].numpy()
        for field, values in (("logprobs", expected.topk(100).values.numpy()), ("actual_logprobs", actual[:, None])):
            np.testing.assert_allclose(teacher[field][0], values, rtol=0, atol=oracle.PER_TOKEN)
    client.session.close()


@pytest.mark.parametrize(("given", "temperature"), [({}, 1.0), ({"temperature": 0}, 1.0), ({"temperature": 0.7}, 0.7)])
def test_no_default_of_the_models_applies_to_processed_logprobs(llama_2_server, llama_2_model, given, temperature):
    """It has a temperature and a top p. The sampled token has the distribution of the prompt's rows, too."""
    prompt = token_ids(40, given)
    expected = (oracle.logits(llama_2_model, [*prompt, 0]) / temperature).log_softmax(-1)
    with connect(llama_2_server) as client:
        body = {"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 1, **given}
        [choice] = client.post(COMPLETIONS, json=body).raise_for_status().json()["choices"]
        params = {"max_tokens": 1, "prompt_logprobs": 0, **given}
        generated = client.post(GENERATE, json={"token_ids": prompt, "sampling_params": params}).raise_for_status()
        refused = client.post(COMPLETIONS, json=body | {"top_p": 0.9, "temperature": 0.7})
    values = expected[range(39), prompt[1:]].numpy()
    oracle.assert_close(choice["logprobs"]["token_logprobs"][1:-1], values)
    oracle.assert_close([max(choice["logprobs"]["top_logprobs"][-1].values())], expected[-1:].amax(1).numpy())
    by_id = generated.json()["prompt_logprobs"][1:]
    oracle.assert_close([each[str(token)]["logprob"] for each, token in zip(by_id, prompt[1:], strict=True)], values)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_p")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, LARGE | {"prompt": [token_ids(350, "large")]}),
        # Both of its logprobs are large, and each has its own texts.
        (COMPLETIONS, LARGE | {"prompt": [token_ids(350, "echo")], "logprobs": 20, "echo": True}),
        (GENERATE, {"token_ids": token_ids(350, "large generate"), "sampling_params": LARGE}),
    ],
    ids=["completions", "echo", "generate"],
)
def test_a_large_response_is_streamed_and_vllms(server, path, body):
    assert "content-length" not in assert_scored_alike(server, path, body).headers


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
        {"output_mode": "text"},
    ],
)
def test_the_generate_route(server, change):
    body = {"model": "tiny", "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1, "seed": 7}} | change
    for length in (1, 2, 90):
        assert_scored_alike(server, GENERATE, body | {"token_ids": token_ids(length, change)})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, VALID | {"token_ids": [5, 10**6]}),
        (GENERATE, VALID | {"token_ids": [5] * 3000}),
        (GENERATE, VALID | {"model": "gpt-5"}),
        (GENERATE, VALID | {"sampling_params": {"max_tokens": 1, "prompt_logprobs": 257}}),
        (COMPLETIONS, {"prompt": [5, 6], "max_tokens": 1, "prompt_logprobs": 257}),
        (COMPLETIONS, {"prompt": [[5] * 2048], "max_tokens": 1, "prompt_logprobs": 1}),
        *(
            (COMPLETIONS, SCORING | change)
            for change in (
                *({"prompt": [5] * 2048}, {"prompt": [5] * 2049, "max_tokens": 0}, {"prompt": "", "max_tokens": 0}),
                *({"prompt": [5, 10**6]}, {"prompt": [[5, 6], []]}, {"prompt": None}),
                *({"logprobs": 257}, {"temperature": -1}, {"model": "gpt-5"}),
            )
        ),
    ],
)
def test_refusals_are_vllms(server, path, body):
    ours, stock = both(server, path, body)
    assert ours.status_code == stock.status_code >= 400
    assert_same(ours.json(), stock.json())
