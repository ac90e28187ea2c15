"""Reads the metrics that a server shows at `/metrics`."""

import re

import httpx


def metrics_of(server: str) -> str:
    """All of it; an engine that is at work may keep a busy machine from answering for long."""
    return httpx.get(f"{server}/metrics", timeout=60).text


def metric(server: str, pattern: str) -> float:
    """The sum over all lines that begin with what matches a pattern, of which there must be one."""
    found = re.findall(rf"^{pattern} (\S+)$", metrics_of(server), re.MULTILINE)
    assert found, pattern
    return sum(map(float, found))
