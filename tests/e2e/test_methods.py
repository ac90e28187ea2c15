"""Every perplexity method against an independent short implementation over transformers' logits, on several windows."""

from typing import NamedTuple

import pytest

from scoremode import Method
from tests import oracle


class Case(NamedTuple):
    method: Method
    context_length: int
    stride: int | None = None


CASES = [
    Case("sliding", 64, 32),
    Case("sliding", 50, 50),
    Case("sliding", 32, 25),
    Case("overlapping", 64, 32),
    Case("overlapping", 50, 17),
    Case("disjoint", 50),
    Case("llama.cpp", 64),
    Case("llama.cpp", 51),
    Case("rolling", 50),
    Case("rolling", 64),
]
CASES_WITH_BOS = [Case("llama.cpp", 64), Case("rolling", 64), Case("sliding", 64, 32)]
# Tests choose their client by name.
pytestmark = pytest.mark.usefixtures("server", "plugin_server")


@pytest.fixture(scope="module")
def text(wikitext: str) -> str:
    return wikitext[:1500]


@pytest.mark.parametrize(
    ("client_name", "model_name", "case"),
    [
        *(("client", "random_model", case) for case in CASES),
        *(("bos_client", "byte_fallback_model", case) for case in CASES_WITH_BOS),
    ],
)
def test_perplexity_and_counts_are_those_of_an_oracle(request, text, client_name, model_name, case):
    """Also where the tokenizer adds BOS, which `rolling` replaces with its own prefix."""
    client, model = map(request.getfixturevalue, (client_name, model_name))
    info = client.info()
    tokens = client.tokenize(text, add_special_tokens=case.method != "rolling")
    bos = info.bos_token_id if info.adds_bos else None
    expected = oracle.perplexity(model, tokens, *case, bos=bos, prefix=info.bos_token_id)
    result = client.perplexity(text, method=case.method, context_length=case.context_length, stride=case.stride)
    assert result.num_windows >= 5
    assert result.num_scored == expected.num_scored
    assert result.perplexity == pytest.approx(expected.perplexity, rel=oracle.MEAN)
    assert result.nll_stderr == pytest.approx(expected.nlls.std(ddof=1) / len(expected.nlls) ** 0.5, rel=1e-4)
    assert result.perplexity_stderr == pytest.approx(result.perplexity * result.nll_stderr, rel=1e-9)


def test_texts_share_no_context_and_pool_their_tokens(client, text):
    halves = [text[:600], text[600:1200]]
    apart = [client.perplexity(half, context_length=128) for half in halves]
    together = client.perplexity(texts=halves, context_length=128)
    assert together.num_scored == sum(result.num_scored for result in apart)
    assert together.nll_sum == pytest.approx(sum(result.nll_sum for result in apart), rel=1e-6)
    num_tokens = len(client.tokenize(halves[0])) + 50
    assert client.perplexity(texts=halves, max_tokens=num_tokens).num_tokens == num_tokens
