"""Bounds of a request, checked before anything is made of it."""

import pytest

from scoremode_server.errors import RequestError
from scoremode_server.scoring.limits import Limits

LIMITS = Limits(max_model_len=8, vocab_size=10, max_top_logprobs=5, max_sequences=6, max_request_bytes=100)


@pytest.mark.parametrize(
    ("check", "allowed", "refused", "field"),
    [
        (LIMITS.check_num_sequences, (6, "prompt"), (7, "prompt"), "prompt"),
        (LIMITS.check_num_sequences, (6, "continuations"), (7, "continuations"), "continuations"),
        (LIMITS.check_num_windows, (6, 4), (7, 4), "stride"),
    ],
)
def test_more_sequences_than_allowed_are_refused_with_their_number(check, allowed, refused, field):
    check(*allowed)
    with pytest.raises(RequestError, match=r"7 (sequences|windows).* at most 6 \(--max-request") as raised:
        check(*refused)
    assert raised.value.param == field
