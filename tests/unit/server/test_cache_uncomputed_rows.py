"""Rows that the V1 model runner leaves uncomputed."""

import pytest
from vllm.v1.outputs import LogprobsTensors

from scoremode_server.engine import uncomputed_rows


def test_rows_are_nan_until_they_are_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LogprobsTensors, "empty_cpu", staticmethod(LogprobsTensors.empty_cpu))
    monkeypatch.setattr(LogprobsTensors, "_scoremode_patched", False, raising=False)
    uncomputed_rows.install()
    patched = LogprobsTensors.empty_cpu
    uncomputed_rows.install()
    assert LogprobsTensors.empty_cpu is patched
    rows = LogprobsTensors.empty_cpu(5, 3)
    assert rows.logprobs.shape == rows.logprob_token_ids.shape == (5, 3)
    assert rows.logprobs.isnan().all()
