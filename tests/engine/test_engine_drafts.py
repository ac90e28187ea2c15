"""Scoring on an engine that drafts tokens with n-grams while it generates."""

from pathlib import Path

import numpy as np
from vllm import SamplingParams, TokensPrompt

from scoremode_server.offline import read_score, score_params
from scoremode_server.rows import complete_rows, received_rows, score_columns
from scoremode_server.worker.row_spec import RowSpec, ScoringParams
from tests import oracle
from tests.engine.conftest import small_engine

BLOCK = 32
"""The smallest block of attention on a CPU."""
NUM_DRAFTS = 3
PLAIN = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)


def marked(tokens: list[int]) -> SamplingParams:
    """The parameters of a server's request, whose rows all come from the worker."""
    return ScoringParams.of(PLAIN, RowSpec(last_token=tokens[-1]))


def test_scores_next_to_n_grams_equal_transformers(random_model: Path):
    """Rows of both ways to score and of two lanes, next to generation."""
    engine = small_engine(
        random_model,
        max_model_len=256,
        max_num_seqs=8,
        block_size=BLOCK,
        speculative_config={
            "method": "ngram",
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
            "num_speculative_tokens": NUM_DRAFTS,
        },
    )
    common = np.random.default_rng(3).integers(3, 1000, 4 * BLOCK + 2).tolist()
    # From the second time on, the prefix cache has all but one token of sequences with whole blocks and one token more.
    lengths = (2, 3, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 1, 2 * BLOCK + 2, 4 * BLOCK + 2)
    sequences = [common[:length] for length in lengths]
    expected = oracle.logprobs(random_model, sequences)
    generation = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    # Repeated, so that there is something to draft.
    generating = [TokensPrompt(prompt_token_ids=common[:4] * 5)] * 2
    fed = [TokensPrompt(prompt_token_ids=tokens[:-1]) for tokens in sequences]
    try:
        for reads_cache in (False, False, True):
            for make in (score_params, marked):
                params = [make(tokens) for tokens in sequences]
                for each in params:
                    each.skip_reading_prefix_cache = not reads_cache
                outputs = engine.generate([*generating, *fed], [generation] * 2 + params, use_tqdm=False)[2:]
                for tokens, output, exact in zip(sequences, outputs, expected, strict=True):
                    if make is marked:
                        cached = output.num_cached_tokens if reads_cache else 0
                        rows, missing = complete_rows(tokens, received_rows(output, score_columns(1)), cached)
                        assert missing == cached
                        oracle.assert_close(rows.logprobs[missing:, 0], exact[missing:])
                    elif not reads_cache:
                        oracle.assert_close(read_score(tokens, 0, output).logprobs[1:], exact)
        for chunk in (1, 1 + NUM_DRAFTS):
            in_lane = [ScoringParams.of(PLAIN, RowSpec(last_token=tokens[-1], chunk=chunk)) for tokens in sequences]
            for each in in_lane:
                each.skip_reading_prefix_cache = True
            outputs = engine.generate([*generating, *fed], [generation] * 2 + in_lane, use_tqdm=False)[2:]
            for output, exact in zip(outputs, expected, strict=True):
                oracle.assert_close(received_rows(output, score_columns(1)).logprobs[:, 0], exact)
    finally:
        engine.llm_engine.engine_core.shutdown()
