"""The right numbers: transformers in float64 on the CPU, perplexity by each method, and how far from them an engine
that computes in float32 may be.

Nothing here imports from scoremode or vLLM. Logprobs are natural logarithms. Of n tokens, n - 1 are scored: entry i
is about token i + 1, given tokens 0 to i.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.window_loops import Tokens, fixed_length_loop, llama_perplexity, lm_eval_rolling, strided_rows

# From float32's measured distance to float64 on SmolLM2, on CPUs with AVX2 and with AVX-512. Single tokens are at most
# 4e-5 off, except near BOS, where activations are huge: FIRST_TOKENS is 1.5e-4 off in transformers and 3.8e-4 in vLLM.
# Means are 8e-6 (AVX-512) and 2e-5 (AVX2) off, nearly all of it the bias of a float32 log-softmax. An off-by-one, a
# wrong window or decompressed weights move both by tenths of a nat.
PER_TOKEN = 1e-3
"""Nats, for each token."""
MEAN = 5e-5
"""Nats, for the mean over at least MEAN_TOKENS tokens; relative, for their perplexity."""
MEAN_TOKENS = 50
FIRST_TOKENS = ([1, 5398, 26], -6.197199)
"""BOS, a token and a token in SmolLM2, and the last one's logprob in float64: the case that set PER_TOKEN."""


Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Weights [tokens, k] from a router's logits [tokens, experts], of experts [tokens, k]."""


def assert_close(found: Sequence[float | None] | np.ndarray, expected: np.ndarray, *, scale: float = 1.0) -> None:
    """Each logprob within PER_TOKEN, and the mean error of MEAN_TOKENS or more within MEAN; `scale` times both, where
    a temperature multiplies logits."""
    error = np.asarray(found, np.float64) - expected
    assert np.isfinite(error).all(), found
    assert np.abs(error).max(initial=0) <= scale * PER_TOKEN, (np.abs(error).max(), np.abs(error).argmax())
    if error.size >= MEAN_TOKENS:
        assert np.abs(error).mean() <= scale * MEAN, np.abs(error).mean()


class Result(NamedTuple):
    perplexity: float
    num_scored: int
    nlls: np.ndarray
    """[num_scored] float64, nats, in the order of evaluation."""


def logprobs(model: Path | PreTrainedModel, sequences: Sequence[Tokens]) -> list[np.ndarray]:
    """Logprob of each token but the first: for n tokens [n - 1], float64. A path is that of a model to run in
    float64."""
    of_all = ((logits(model, tokens).log_softmax(-1), _targets(tokens)) for tokens in sequences)
    return [found.gather(1, targets).squeeze(1).cpu().numpy() for found, targets in of_all]


@torch.inference_mode()
def logits(model: Path | PreTrainedModel, tokens: Tokens) -> torch.Tensor:
    """Logits [n - 1, vocabulary] float64 after each token but the last: what predicts tokens 1 to n - 1."""
    run = _float64_model(model) if isinstance(model, Path) else model
    return run(torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1].double()


def ranks(model: Path, sequences: Sequence[Tokens]) -> list[np.ndarray]:
    """1 + the number of tokens with a larger logit than the actual one's, for each token but the first: [n - 1]."""
    of_all = [(logits(model, tokens), _targets(tokens)) for tokens in sequences]
    return [1 + (found > found.gather(1, targets)).sum(dim=-1).numpy() for found, targets in of_all]


class Divergence(NamedTuple):
    """Two distributions over the vocabulary at each token but the first: p of the base and q of another model. All
    [n - 1] float64, nats; tops are token ids."""

    kld: np.ndarray
    """KL(p||q)."""
    reverse_kld: np.ndarray
    acceptance: np.ndarray
    """The sum of min(p, q)."""
    logprobs: np.ndarray
    """Logprobs of the tokens in q."""
    reference_logprobs: np.ndarray
    top_token_ids: np.ndarray
    reference_top_token_ids: np.ndarray
    reference_confidence: np.ndarray
    """The largest probability in p."""


def divergences(base: Path, other: Path | PreTrainedModel, sequences: Sequence[Tokens]) -> list[Divergence]:
    """How far a model is from a base."""
    return [divergence(logits(base, tokens), logits(other, tokens), tokens) for tokens in sequences]


def divergence(base_logits: torch.Tensor, logits: torch.Tensor, tokens: Tokens) -> Divergence:
    """From the logits [n - 1, vocabulary] of both."""
    log_p, log_q = (each.log_softmax(-1) for each in (base_logits, logits))
    p, q = log_p.exp(), log_q.exp()
    tensors = (
        (p * (log_p - log_q)).sum(-1),
        (q * (log_q - log_p)).sum(-1),
        torch.minimum(p, q).sum(-1),
        log_q.gather(1, _targets(tokens))[:, 0],
        log_p.gather(1, _targets(tokens))[:, 0],
        log_q.argmax(-1),
        log_p.argmax(-1),
        p.amax(-1),
    )
    return Divergence(*(tensor.numpy() for tensor in tensors))


@contextmanager
def choosing_experts(
    model: PreTrainedModel, forced: torch.Tensor | None = None, weigh: Weigh | None = None
) -> Iterator[list[torch.Tensor]]:
    """Lists, router by router, the experts [n - 1, k] that a mixture of experts chooses in a forward pass that runs
    inside, by descending weight. `forced` [n - 1, routers, k] replaces them, weighted by `weigh`, or else by the
    softmax of their logits."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("router")]

    def choose(router: torch.nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, experts = output
        chosen.append(experts.gather(1, weights.argsort(1, descending=True))[:-1])
        if forced is None:
            return output
        # The last token is not fed to an engine, and nothing is predicted from it.
        experts = torch.cat((forced[:, len(chosen) - 1].long(), experts[-1:]))
        scores = logits.double()
        forced_weights = scores.gather(1, experts).softmax(1) if weigh is None else weigh(scores, experts)
        return logits, forced_weights.to(weights.dtype), experts

    hooks = [router.register_forward_hook(choose) for router in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def perplexity(
    model: Path,
    token_ids: Tokens,
    method: str,
    context_length: int,
    stride: int | None = None,
    *,
    bos: int | None = None,
    prefix: int | None = None,
) -> Result:
    """Perplexity by one of the five methods. `bos` is for `llama.cpp` (None: the model adds none), `prefix` for
    `rolling`."""

    def score(window: Tokens) -> np.ndarray:
        return logprobs(model, [window])[0]

    pieces = {
        "sliding": lambda: fixed_length_loop(score, token_ids, context_length, stride),
        "overlapping": lambda: strided_rows(score, token_ids, context_length, stride),
        "disjoint": lambda: strided_rows(score, token_ids, context_length, context_length),
        "llama.cpp": lambda: llama_perplexity(score, token_ids, context_length, bos),
        "rolling": lambda: lm_eval_rolling(score, token_ids, context_length, prefix),
    }[method]()
    nlls = -np.concatenate(list(pieces)).astype(np.float64)
    return Result(math.exp(math.fsum(nlls) / len(nlls)), len(nlls), nlls)


def _targets(tokens: Tokens) -> torch.Tensor:
    return torch.tensor(tokens[1:], dtype=torch.long).unsqueeze(1)


@lru_cache(maxsize=3)
def _float64_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


@torch.inference_mode()
def resumed_divergences(base: PreTrainedModel, other: PreTrainedModel, tokens: Tokens) -> np.ndarray:
    """KL divergences [boundaries, n - 1] of a Llama from a base when its residual stream is replaced by the base's at
    each boundary: before each layer, before each MLP, and after the last layer."""
    streams: list[torch.Tensor] = []
    hooks = [
        place.register_forward_pre_hook(lambda module, args: streams.append(args[0].clone()))
        for place in _boundaries(base)
    ]
    base_logits = logits(base, tokens)
    for hook in hooks:
        hook.remove()
    found = []
    for place, stream in zip(_boundaries(other), streams, strict=True):
        # In place: the layer keeps the tensor that it gives its norm.
        hook = place.register_forward_pre_hook(lambda module, args, stream=stream: (args[0].copy_(stream), None)[1])
        found.append(divergence(base_logits, logits(other, tokens), tokens).kld)
        hook.remove()
    return np.array(found)


def _boundaries(model: PreTrainedModel) -> list[torch.nn.Module]:
    inside = [(layer, layer.post_attention_layernorm) for layer in model.model.layers]
    return [*(module for pair in inside for module in pair), model.model.norm]
