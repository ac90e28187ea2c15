"""The largest right request to every route, with which the bounds of server and client are tested by sizes and counts:
what is larger may be refused, these may not."""

import json
from collections.abc import Callable
from typing import Any

TOKEN_ID = 262_143
"""The last of the largest vocabularies: it has the most digits."""
SEQUENCES, CONTEXT, POSITIONS, DOCUMENTS = 65_536, 131_072, 2_000_000, 20_000
"""Windows or other sequences; tokens of the longest contexts; positions of a reference; documents or texts."""
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 1000, 4000, 1024


def tokens(number: int) -> list[int]:
    return [TOKEN_ID] * number


def answers(number: int = PROMPTS, prompt: int = PROMPT_TOKENS, answer: int = ANSWER_TOKENS) -> dict[str, Any]:
    """The fields of a recording of answers."""
    data = {"prompt_token_ids": tokens(prompt), "token_ids": tokens(answer), "text": "word " * answer}
    return {"answers": {"max_new_tokens": answer, "data": [data] * number}, "labels": ["a label"] * number}


def conversations(number: int, messages: int, text: str) -> dict[str, Any]:
    """Conversations whose contents have parts, as OpenAI's clients write them."""
    message = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    return {"messages": [[message] * messages] * number}


def body(name: str) -> bytes:
    """A request of the table in JSON, without spaces, as clients send it."""
    return json.dumps(REQUESTS[name][1](), separators=(",", ":"), ensure_ascii=False).encode()


SCORE, PERPLEXITY, REFERENCES = "/v1/score", "/v1/perplexity", "/v1/references"
REQUESTS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "answers after long prompts": (REFERENCES, lambda: {"name": "a", **answers()}),
    "as many answers as windows": (REFERENCES, lambda: {"name": "a", **answers(SEQUENCES, 20, 20)}),
    "the largest reference": (REFERENCES, lambda: {"name": "a", "prompt": tokens(POSITIONS)}),
    "a reference of documents": (
        REFERENCES,
        lambda: {"name": "a", "texts": ["word " * 100] * DOCUMENTS, "labels": ["a label"] * DOCUMENTS},
    ),
    "a reference of long texts": (REFERENCES, lambda: {"name": "a", "texts": ["词" * 850] * DOCUMENTS}),
    "a reference of turns": (REFERENCES, lambda: {"name": "a", **conversations(SEQUENCES // 2, 2, "word " * 30)}),
    "texts": (PERPLEXITY, lambda: {"texts": ["word " * 100] * DOCUMENTS}),
    "a text in the shortest strides": (PERPLEXITY, lambda: {"prompt": tokens(SEQUENCES), "stride": 1}),
    "candidates of a long context": (
        SCORE,
        lambda: {"prompt": tokens(CONTEXT), "candidate_token_ids": [tokens(8)] * CONTEXT},
    ),
    "a continuation for each prompt": (
        SCORE,
        lambda: {"prompt": [tokens(20)] * SEQUENCES, "continuations": [[tokens(2)]] * SEQUENCES},
    ),
    "a batch of lm-eval": (
        SCORE,
        lambda: {"prompt": [tokens(2048)] * 32, "continuations": [[tokens(64)] * 4] * 32, "return_ranks": True},
    ),
    "long conversations": ("/v1/turns", lambda: conversations(2, 1024, "word " * 128)),
    "the whole vocabulary": ("/v1/tokens", lambda: {"token_ids": list(range(TOKEN_ID + 1))}),
    "all windows of a reference": ("/v1/kld", lambda: {"reference": "a", "windows": [0, SEQUENCES]}),
    "the prompts that vLLM takes": ("/v1/completions", lambda: {"prompt": [tokens(2000)] * 1024, "max_tokens": 1}),
    "tokens of a long context": (
        *("/inference/v1/generate", lambda: {"token_ids": tokens(CONTEXT), "sampling_params": {"max_tokens": 1}}),
    ),
}
"""The route and the body of each."""

VALUES = {
    "top tokens of a long context": ("base64", [CONTEXT * (1 + 100)]),
    "top tokens of a long context as floats": ("float", [CONTEXT * (1 + 20)]),
    "most top tokens": ("base64", [2048 * (1 + 256)] * 32),
    "logprobs of all sequences": ("float", [100] * SEQUENCES),
    "all positions of a reference": ("float", [2 * POSITIONS // SEQUENCES] * SEQUENCES),
    "a batch of a trainer": ("base64", [8192 * (1 + 100)] * 64),
}
"""The encoding of an answer, and the logprobs of each of its sequences."""

COMPARED = [
    *((5000, 3), (10_000, 5), (20_000, 20), (SEQUENCES, 1)),
    *((POSITIONS // 2048, 2048), (DOCUMENTS, 100), (PROMPTS, ANSWER_TOKENS), (1, CONTEXT)),
]
"""Windows of an answer of `kld`, and the positions of each."""
