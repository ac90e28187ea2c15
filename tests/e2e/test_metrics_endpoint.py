"""`/metrics` counts the tokens that were scored and the requests."""

from tests.e2e.metrics import metric


def counted(server: str) -> list[float]:
    """Tokens scored, requests that waited, requests that ran."""
    names = ("scored_tokens_total", "request_waiting_seconds_count", "request_running_seconds_count")
    return [metric(server, f"scoremode_{name}") for name in names]


def test_scores_count_with_the_cache_and_without(client, server):
    tokens = client.tokenize("Every way to score a text comes to the same counter in the end. " * 8)[:100]
    before = counted(server)
    client.score([tokens, tokens[:5]])
    client.score(tokens)
    client.score(tokens, use_cache=False)
    client.score(tokens[:50], [tokens[50:53], tokens[60:61]])
    added = [now - then for now, then in zip(counted(server), before, strict=True)]
    assert added == [99 + 4 + 99 + 99 + 52 + 50, 6, 6]
