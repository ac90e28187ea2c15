"""Reading rows off vLLM's outputs, on outputs written by hand: no engine."""

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from scoremode_server.errors import EngineOutputError
from scoremode_server.offline import read_score
from scoremode_server.rows import NO_RANK, Column, Rows, json_logprobs

TOKENS = [4, 7, 9]


def flat(*positions: list[tuple[int, float, int]] | None) -> FlatLogprobs:
    """vLLM's logprobs of each position, as (token, logprob, rank)."""
    result = FlatLogprobs()
    for position in positions:
        if position is None:
            result.append(None)
        else:
            result.append_fast(*map(list, zip(*position, strict=True)), [None] * len(position))
    return result


def output_of(prompt: FlatLogprobs | None, sampled: FlatLogprobs | None, reason: str = "length") -> RequestOutput:
    completion = CompletionOutput(0, "", [9], None, sampled, finish_reason=reason)
    return RequestOutput("id", None, TOKENS[:-1], prompt, [completion], True, num_cached_tokens=0)


def test_the_actual_token_comes_before_the_top_tokens_and_the_first_has_no_row():
    prompt = flat(None, [(7, -1.5, 3), (2, -0.5, 1), (5, -1.0, 2)])
    sampled = flat([(9, -0.25, 1), (9, -0.25, 1), (1, -3.0, 2)])
    score = read_score(TOKENS, 2, output_of(prompt, sampled))
    assert np.array_equal(score.logprobs, [np.nan, -1.5, -0.25], equal_nan=True)
    assert score.ranks.tolist() == [NO_RANK, 3, 1]
    # Token 0 is a real one.
    assert score.top_token_ids.tolist() == [[-1, -1], [2, 5], [9, 1]]
    assert score.top_logprobs[1:].tolist() == [[-0.5, -1.0], [-0.25, -3.0]]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (output_of(None, None), "without logprobs"),
        (output_of(flat(None, [(8, -1.5, 3)]), flat([(9, -0.25, 1)])), "position 1"),
        (output_of(flat(None), flat([(9, -0.25, 1)])), "position 2"),
        (output_of(flat(None, [(7, -1.5, 3)]), flat()), "position 2"),
        (output_of(flat(None, [(7, float("nan"), 1)]), flat([(9, -0.25, 1)])), "NaN, for the token at position 1"),
        (output_of(flat(None, [(7, -1.0, 1)]), flat([(9, float("nan"), 1)])), "NaN, for the token at position 2"),
        (output_of(flat(None, [(7, -1.5, 3)]), None, "abort"), "abort"),
    ],
)
def test_an_output_that_is_not_the_score_is_an_error_and_never_a_number(output: RequestOutput, message: str):
    with pytest.raises(EngineOutputError, match=message):
        read_score(TOKENS, 0, output)


def test_a_nan_anywhere_in_a_row_is_seen_and_an_infinity_is_a_number():
    rows = Rows.empty(4, (Column("ids", "int32", 2), Column("figure"), Column("figures", width=3)))
    rows.table[:] = 0
    rows.column("figure")[0] = np.nan
    rows.column("figures")[1, 2] = np.nan
    rows.column("figures")[2] = np.inf
    # The bits of a NaN.
    rows.column("ids")[3] = np.float32(np.nan).view(np.int32)
    assert rows.has_nan.tolist() == [True, True, False, False]


def test_json_has_the_float32_value_exactly_and_no_infinity():
    assert json_logprobs(np.array([-0.1, -np.inf], np.float32)).tolist() == [float(np.float32(-0.1)), -9999.0]
