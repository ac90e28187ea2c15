"""Scoring requests to `/v1/completions`, and our response and vLLM's to each (see tests/e2e/with_stock_routes.py)."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

TEXTS = [
    "The capital of France is Paris.",
    "x",
    " leading and trailing space ",
    "Ångström, naïve café, Größe",
    "日本語のテキスト",
    "emoji 🙂🙃 and 👩‍👩‍👧 families",
    "tab\tand\nnewline\r\n",
    "<|im_start|>user\nHello<|im_end|>",
    "<s>special</s>",
    "a\u2028b\u0000c\x7f",
    "1234567890 " * 6,
]
VOCABULARY = 1024
LONGEST = 127
NUM_RANDOM = 120
NUM_PROMPTS = 3


def requests(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Scoring requests of every kind: each option alone, then NUM_RANDOM with options mixed at random."""
    plain = {"prompt": TEXTS[0], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    yield plain
    for text in TEXTS:
        for logprobs in (0, 1, 5):
            yield plain | {"prompt": text, "logprobs": logprobs}
    for change in OPTIONS:
        yield plain | change
    for length in (1, 2, 3, LONGEST - 1, LONGEST):
        yield plain | {"prompt": token_ids(rng, length)}
    for _ in range(NUM_RANDOM):
        request = dict(plain, prompt=some_prompt(rng), logprobs=rng.choice([0, 1, 2, 5, 20]))
        for change in rng.sample(OPTIONS, rng.randrange(4)):
            request |= change
        yield request


OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"logprobs": None},
    {"prompt_logprobs": 3},
    {"prompt_logprobs": 0},
    {"logprobs": None, "prompt_logprobs": 2},
    {"return_tokens_as_token_ids": True},
    {"return_token_ids": True},
    {"add_special_tokens": False},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": 11},
    {"stop": ["e", " "]},
    {"logit_bias": {"5": 50}},
    {"echo": False},
    {"echo": False, "logprobs": None, "prompt_logprobs": 2},
    {"echo": False, "prompt_logprobs": 4},
    {"user": "someone", "best_of_my_knowledge": 1},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"model": None},
    {"skip_special_tokens": False},
    {"truncate_prompt_tokens": 5},
]


def token_ids(rng: random.Random, length: int) -> list[int]:
    """Of any kind, bytes and special tokens among them."""
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def some_prompt(rng: random.Random) -> Any:
    """Any of the four shapes."""
    ids = [token_ids(rng, rng.choice([1, 2, 7, 30])) for _ in range(rng.randint(1, 3))]
    return rng.choice([rng.choice(TEXTS), rng.sample(TEXTS, 2), ids[0], ids])


def is_one_sequence(request: dict[str, Any]) -> bool:
    prompt = request["prompt"]
    return request.get("n", 1) == 1 and (isinstance(prompt, str) or isinstance(prompt[0], int))


def answers(client: httpx.Client, request: dict[str, Any]) -> tuple[Any, Any]:
    """(ours, vLLM's): status and content, the events of a stream as a list."""

    def answer(path: str) -> tuple[int, Any]:
        response = client.post(path, json=request)
        if response.headers["content-type"].startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
            chunks = [json.loads(event) for event in events if event != "[DONE]"]
            # Choices of several prompts are streamed as they come, in no fixed order.
            return response.status_code, sorted(
                chunks, key=lambda chunk: [choice["index"] for choice in chunk["choices"]]
            )
        return response.status_code, response.json()

    return answer("/v1/completions"), answer("/stock/v1/completions")


def prompts_that_begin_alike(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Branches of branches, each sent twice, in two styles; parts of characters among their tokens."""
    plain = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    for _ in range(NUM_PROMPTS):
        prompt = token_ids(rng, rng.randint(40, 70))
        for _ in range(2):
            branch = prompt + token_ids(rng, rng.randint(10, 40))
            for style in ({}, {"return_tokens_as_token_ids": True, "logprobs": 3}):
                for end in (1, 2, 3):
                    yield plain | style | {"prompt": branch + token_ids(rng, end)}
