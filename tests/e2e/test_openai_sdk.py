"""The unmodified openai package: scoring, generation and errors, sync and async, streamed and not."""

from collections.abc import Iterator

import openai
import pytest

PROMPT = "The capital of France is"
SCORING = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
GENERATION = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def sync(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="unused", timeout=300) as client:
        yield client


async def test_scoring_is_the_same_through_every_call(sync, server):
    (choice,) = sync.completions.create(**SCORING).choices
    assert choice.text == "".join(choice.logprobs.tokens) == PROMPT
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs[1:])
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="unused", timeout=300) as asynchronous:
        (other,) = (await asynchronous.completions.create(**SCORING)).choices
    assert other.logprobs == choice.logprobs
    chunks = list(sync.completions.create(**SCORING, stream=True))
    assert "".join(token for chunk in chunks for token in chunk.choices[0].logprobs.tokens) == PROMPT


def test_generation_chat_and_errors_are_vllms(sync):
    text = sync.completions.create(**GENERATION).choices[0].text
    assert text
    assert "".join(chunk.choices[0].text for chunk in sync.completions.create(**GENERATION, stream=True)) == text
    messages = [{"role": "user", "content": "Say hello."}]
    response = sync.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
    assert response.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        sync.completions.create(**(SCORING | {"model": "gpt-5"}))
