"""`/v1/completions`: our response to a scoring request is vLLM's, field by field, from the same engine.

Each goes to our route and to vLLM's own, under /stock. Only `id` and `created` may differ, and floats by 1e-6; by
`oracle.PER_TOKEN` where a request has several sequences, which the engine may run in one step or in two.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import Any

import httpx
import pytest

from tests import oracle
from tests.e2e.metrics import metric
from tests.shared_servers import API_KEY

# A fixture chooses one of them by name.
pytestmark = pytest.mark.usefixtures("server", "plugin_server")
HITS = "scoremode_score_cache_hits_total"
SCORING = {"prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 1}

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
        yield plain | {"prompt": random_ids(rng, length)}
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
    # As SkyRL asks.
    {"echo": False, "logprobs": None, "prompt_logprobs": 0, "return_token_ids": True},
    {"user": "someone", "best_of_my_knowledge": 1},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"model": None},
    {"skip_special_tokens": False},
    {"truncate_prompt_tokens": 5},
]


def random_ids(rng: random.Random, length: int) -> list[int]:
    """Draw tokens of any kind, bytes and special tokens among them."""
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def some_prompt(rng: random.Random) -> Any:
    """Any of the four shapes."""
    ids = [random_ids(rng, rng.choice([1, 2, 7, 30])) for _ in range(rng.randint(1, 3))]
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

    ours, stock = answer("/v1/completions"), answer("/stock/v1/completions")
    if ours[0] == stock[0] == 200 and not request.get("stream") and request.get("n", 1) == 1:
        name_the_most_likely(ours[1], stock[1], request)
    return ours, stock


def name_the_most_likely(ours: dict[str, Any], stock: dict[str, Any], request: dict[str, Any]) -> None:
    """Change the logprobs of names that several tokens share in vLLM's response, which has the last token's. Those of
    the most likely come from its logprobs by id, and for sampled tokens, of which it has none, from our response."""
    if request.get("logprobs") is None or request.get("return_tokens_as_token_ids"):
        return
    for our_choice, choice in zip(ours["choices"], stock["choices"], strict=True):
        tops = [each["logprobs"]["top_logprobs"] for each in (our_choice, choice)]
        by_id = choice["prompt_logprobs"] if request.get("echo") else []
        for our_top, top, entries in zip_longest(*tops, by_id):
            for name in top or ():
                shown = islice((entries or {}).values(), request["logprobs"] + 1)
                sharing = [each["logprob"] for each in shown if each["decoded_token"] == name]
                top[name] = max([top[name], *(sharing or [our_top.get(name, top[name])])])


def prompts_that_begin_alike(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Branches of branches, each sent twice, in two styles; parts of characters among their tokens."""
    plain = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    for _ in range(NUM_PROMPTS):
        prompt = random_ids(rng, rng.randint(40, 70))
        for _ in range(2):
            branch = prompt + random_ids(rng, rng.randint(10, 40))
            for style in ({}, {"return_tokens_as_token_ids": True, "logprobs": 3}):
                for end in (1, 2, 3):
                    yield plain | style | {"prompt": branch + random_ids(rng, end)}


def connect(url: str) -> httpx.Client:
    """A client for any of the servers: one that has no API key takes no notice of it."""
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=300)


def assert_same(ours: Any, stock: Any, tolerance: float = 1e-6, path: str = "") -> None:
    """Equal but for ids, times and the last digits of floats; order of keys included."""
    assert type(ours) is type(stock), path
    if isinstance(ours, dict):
        assert list(ours) == list(stock), path
        for key in ours:
            if key not in ("id", "created"):
                assert_same(ours[key], stock[key], tolerance, f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(stock), path
        for index, (one, other) in enumerate(zip(ours, stock, strict=True)):
            assert_same(one, other, tolerance, f"{path}[{index}]")
    elif isinstance(ours, float):
        assert ours == pytest.approx(stock, abs=tolerance), path
    else:
        assert ours == stock, path


@pytest.fixture(params=["plugin_server", "server"], ids=["SentencePiece's kind of tokenizer", "byte-level tokenizer"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def test_every_scoring_request_gets_vllms_response(url):
    kinds = Counter[int]()
    with connect(url) as http:
        for body in requests(random.Random(20)):
            ours, stock = answers(http, body)
            try:
                assert_same(ours, stock, 1e-6 if is_one_sequence(body) else oracle.PER_TOKEN)
            except AssertionError as error:
                raise AssertionError(f"{json.dumps(body)}\n{error}") from None
            kinds[ours[0]] += 1
    assert kinds[200] > 40 + 0.7 * NUM_RANDOM, kinds


def test_prompts_with_a_common_prefix_get_vllms_responses(url):
    """Texts written for one prompt serve the next, also if a character spans the place where they part."""
    before = metric(url, HITS)
    with connect(url) as http:
        for body in prompts_that_begin_alike(random.Random(21)):
            assert_same(*answers(http, body), oracle.PER_TOKEN)
    assert metric(url, HITS) - before > 375 * NUM_PROMPTS


def test_a_prompt_may_fill_the_context_if_nothing_is_generated(plugin_server, byte_fallback_model):
    prompts = [random_ids(random.Random(23), length) for length in (128, 40, 128)]
    with connect(plugin_server) as client:
        content = client.post("/v1/completions", json=SCORING | {"prompt": prompts, "max_tokens": 0}).json()
    found = [choice["logprobs"]["token_logprobs"][1:] for choice in content["choices"]]
    for of_prompt, expected in zip(found, oracle.logprobs(byte_fallback_model, prompts), strict=True):
        oracle.assert_close(of_prompt, expected)
    assert content["usage"]["prompt_tokens"] == 296


FORGED = {"scoremode_rows": [1]}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}], ids=str)
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": [5, 6], "vllm_xargs": FORGED}),
        ("/v1/chat/completions", {"messages": MESSAGES, "vllm_xargs": FORGED}),
        ("/v1/responses", {"input": "a", "vllm_xargs": FORGED}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"extra_args": FORGED}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_of_the_servers_own_are_refused_by_name_on_every_route(server, route, body, more):
    answer = httpx.post(server + route, json={"model": "tiny", "max_tokens": 1, **body, **more}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, 400, "scoremode_rows"), error
    assert "scoremode_rows cannot be set in vllm_xargs or extra_args" in error["message"]
