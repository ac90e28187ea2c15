"""Bounds of a request, checked before anything is made of it."""

import pytest

from scoremode_server.errors import RequestError
from scoremode_server.scoring.limits import Limits

LIMITS = Limits(max_model_len=8, vocab_size=10, max_top_logprobs=5, max_sequences=6, max_request_bytes=100)


@pytest.mark.parametrize(("prompts", "continuations"), [(6, None), (6, 1), (2, 3), (1, 6)])
def test_as_many_sequences_as_allowed_pass(prompts: int, continuations: int | None):
    LIMITS.check_num_sequences(prompts, continuations)


@pytest.mark.parametrize(("prompts", "continuations", "field"), [(7, None, "prompt"), (3, 3, "continuations")])
def test_more_sequences_are_refused_with_their_number(prompts: int, continuations: int | None, field: str):
    with pytest.raises(RequestError, match=r"at most 6 \(--max-request-sequences") as refused:
        LIMITS.check_num_sequences(prompts, continuations)
    assert refused.value.param == field
    assert f"{prompts * (continuations or 1)} sequences" in str(refused.value)


def test_more_windows_are_refused_with_the_stride():
    LIMITS.check_num_windows(6, stride=4)
    with pytest.raises(RequestError, match="with stride 4 there are 7 windows") as refused:
        LIMITS.check_num_windows(7, stride=4)
    assert refused.value.param == "stride"
