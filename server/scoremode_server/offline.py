"""Score mode without a server: `score` on a `vllm.LLM`."""

from collections.abc import Sequence

from vllm import LLM, SamplingParams, TokensPrompt

from scoremode_server.limits import Limits
from scoremode_server.scoring import SequenceScore, check_engine, read_score, score_params, unscored
from scoremode_server.text import as_prompts


def score(
    llm: LLM,
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    top_logprobs: int = 0,
    *,
    add_special_tokens: bool = True,
    use_tqdm: bool = False,
) -> list[SequenceScore]:
    """Exact log-probabilities (nats) of each prompt's tokens, a text or its token ids.

    Raises:
        RequestError: a prompt is empty, too long, or has a token id outside the vocabulary.
        ValueError: the engine was made with a setting that makes logprobs something else.
    """
    check_engine(llm.llm_engine.vllm_config)
    limits = Limits.of(llm.llm_engine.model_config)
    limits.check_top_logprobs(top_logprobs)
    tokenizer = llm.get_tokenizer()
    sequences = [
        tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in as_prompts(prompts)
    ]
    for index, token_ids in enumerate(sequences):
        limits.check_sequence(token_ids, f"prompt[{index}]")
    fed = [token_ids for token_ids in sequences if len(token_ids) > 1]
    params: list[SamplingParams] = [score_params(token_ids, top_logprobs) for token_ids in fed]
    prompts_fed = [TokensPrompt(prompt_token_ids=token_ids[:-1]) for token_ids in fed]
    outputs = iter(llm.generate(prompts_fed, params, use_tqdm=use_tqdm) if fed else ())
    return [
        read_score(token_ids, top_logprobs, next(outputs)) if len(token_ids) > 1 else unscored(token_ids, top_logprobs)
        for token_ids in sequences
    ]
