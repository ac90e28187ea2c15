"""The loops of the perplexity methods, as short as can be: each gives the scores of the targets of its windows.

Nothing here imports from scoremode, nor torch, which takes long.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Tokens = Sequence[int]
Score = Callable[[Tokens], Sequence[Any]]
"""n tokens -> something of each but the first, such as n - 1 logprobs."""


def fixed_length_loop(score: Score, tokens: Tokens, length: int, stride: int) -> Iterator[Sequence[Any]]:
    # Hugging Face, "Perplexity of fixed-length models". Its text weighs a window by one target fewer than the window
    # has, an approximation of its own; here every target counts once.
    scored_to = 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        # A window's own first token has no context in it.
        fresh = end - max(scored_to, begin + 1)
        yield score(tokens[begin:end])[-fresh:]
        scored_to = end
        if end == len(tokens):
            return


def strided_rows(score: Score, tokens: Tokens, length: int, stride: int) -> Iterator[Sequence[Any]]:
    # ExLlamaV3, eval/ppl.py: `for a in range(0, num_tokens - eval_len, eval_stride)`, all targets of each row.
    for begin in range(0, len(tokens) - length, stride):
        yield score(tokens[begin : begin + length])


def llama_perplexity(score: Score, tokens: Tokens, length: int, bos: int | None) -> Iterator[Sequence[Any]]:
    # llama.cpp, tools/perplexity: logits from length / 2 on are used, each to predict the token after it.
    for chunk in range(len(tokens) // length):
        window = list(tokens[chunk * length : (chunk + 1) * length])
        if bos is not None:
            window[0] = bos
        yield score(window)[length // 2 :]


def lm_eval_rolling(score: Score, tokens: Tokens, length: int, prefix: int) -> Iterator[Sequence[Any]]:
    # lm-eval, get_rolling_token_windows with context_len 1: `length` tokens are fed to predict up to `length`.
    with_prefix = [prefix, *tokens]
    for predicted in range(0, len(tokens), length):
        end = min(predicted + length, len(tokens))
        yield score(with_prefix[max(0, end - length) : end + 1])[predicted - end :]
