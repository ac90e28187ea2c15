"""What a server shows at `/metrics`."""

import httpx


def metrics_of(server: str) -> str:
    """All of it; an engine that is at work may keep a busy machine from answering for long."""
    return httpx.get(f"{server}/metrics", timeout=60).text
