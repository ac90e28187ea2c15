"""The unmodified openai package scores, sync and async, streamed and not."""

import openai

PROMPT = "The capital of France is"
SCORING = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}


async def test_scoring_is_the_same_through_every_call(server):
    settings = {"base_url": f"{server}/v1", "api_key": "unused", "timeout": 300}
    with openai.OpenAI(**settings) as client:
        (choice,) = client.completions.create(**SCORING).choices
        chunks = list(client.completions.create(**SCORING, stream=True))
    assert choice.text == "".join(choice.logprobs.tokens) == PROMPT
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs[1:])
    async with openai.AsyncOpenAI(**settings) as client:
        (other,) = (await client.completions.create(**SCORING)).choices
    assert other.logprobs == choice.logprobs
    assert "".join(token for chunk in chunks for token in chunk.choices[0].logprobs.tokens) == PROMPT
