"""Scores texts without a server: `score` takes a `vllm.LLM`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm import LLM, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from scoremode_server.rows import (
    NO_RANK,
    NO_TOKEN,
    Rows,
    check_finished,
    complete_rows,
    missing_row,
    own_rows,
    score_columns,
)
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.scorer import check_engine
from scoremode_server.scoring.tokenizer import as_prompts
from scoremode_server.worker.row_spec import ScoringParams


@dataclass(frozen=True, slots=True)
class SequenceScore:
    """Scores of one sequence of n tokens. Every array has an entry per token.

    A sequence's first token has no context, so its logprob is NaN, its rank `NO_RANK`, and its top tokens `NO_TOKEN`.
    """

    token_ids: list[int]
    logprobs: np.ndarray
    """[n] float32, nats: log p(t_i | t_<i)."""
    ranks: np.ndarray
    """[n] int32: how many tokens of the vocabulary are at least as likely, 1 for the top token."""
    top_token_ids: np.ndarray
    """[n, k] int32, the top token first."""
    top_logprobs: np.ndarray
    """[n, k] float32, nats."""
    num_cached_tokens: int
    """Tokens that the engine read from its prefix cache."""

    @classmethod
    def from_rows(cls, token_ids: Sequence[int], rows: Rows, num_cached_tokens: int = 0) -> "SequenceScore":
        """Make scores from the rows of all tokens after the first."""
        return cls(
            token_ids=list(token_ids),
            logprobs=np.insert(rows.logprobs[:, 0], 0, np.nan),
            ranks=np.insert(rows.ranks, 0, NO_RANK),
            top_token_ids=np.insert(rows.token_ids[:, 1:], 0, NO_TOKEN, axis=0),
            top_logprobs=np.insert(rows.logprobs[:, 1:], 0, np.nan, axis=0),
            num_cached_tokens=num_cached_tokens,
        )


def score_params(token_ids: Sequence[int], top_logprobs: int = 0) -> ScoringParams:
    """Make `SamplingParams` that score `token_ids` when `token_ids[:-1]` is the prompt, with the top k tokens at every
    position in addition to the actual token. vLLM samples one token, which is forced to be the last of `token_ids`.

    Raises:
        ValueError: there are fewer than two tokens, so no token has a context.
    """
    if len(token_ids) < 2:
        raise ValueError(f"scoring needs at least 2 tokens, got {len(token_ids)}")
    return ScoringParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        prompt_logprobs=top_logprobs,
        logprobs=top_logprobs,
        flat_logprobs=True,
        allowed_token_ids=[token_ids[-1]],
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def read_score(token_ids: Sequence[int], top_logprobs: int, output: RequestOutput) -> SequenceScore:
    """Read the scores of `token_ids` from the output of a request made with `score_params`.

    Raises:
        EngineOutputError: the output is of other tokens, is incomplete, or has a NaN.
    """
    check_finished(output)
    parts = [own_rows(logprobs, top_logprobs + 1) for logprobs in (output.prompt_logprobs, output.outputs[0].logprobs)]
    computed = Rows(np.concatenate([part.table for part in parts]), score_columns(top_logprobs + 1))
    rows, num_missing = complete_rows(token_ids, computed)
    if num_missing:
        raise missing_row(num_missing)
    return SequenceScore.from_rows(token_ids, rows, output.num_cached_tokens or 0)


def score(
    llm: LLM,
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    top_logprobs: int = 0,
    *,
    add_special_tokens: bool = True,
    use_tqdm: bool = False,
) -> list[SequenceScore]:
    """Compute exact log-probabilities, in nats, of each prompt's tokens. A prompt is a text or its token ids.

    Raises:
        RequestError: a prompt is empty, too long, or has a token id outside the vocabulary.
        ValueError: a setting of the engine changes what logprobs mean.
    """
    # vLLM samples the last token. In other logprobs modes, its logprob would show that it was forced.
    check_engine(llm.llm_engine.vllm_config, ["raw_logprobs"])
    limits = Limits.from_model(llm.llm_engine.model_config)
    limits.check_top_logprobs(top_logprobs)
    tokenizer = llm.get_tokenizer()
    sequences = [
        tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in as_prompts(prompts)
    ]
    for index, token_ids in enumerate(sequences):
        limits.check_sequence(token_ids, f"prompt[{index}]")
    fed = [token_ids for token_ids in sequences if len(token_ids) > 1]
    prompts_fed = [TokensPrompt(prompt_token_ids=token_ids[:-1]) for token_ids in fed]
    params = [score_params(token_ids, top_logprobs) for token_ids in fed]
    outputs = iter(llm.generate(prompts_fed, params, use_tqdm=use_tqdm) if fed else ())
    return [
        read_score(token_ids, top_logprobs, next(outputs))
        if len(token_ids) > 1
        else SequenceScore.from_rows(token_ids, Rows.empty(0, score_columns(top_logprobs + 1)))
        for token_ids in sequences
    ]
