"""The set of a class's names, which is pinned where a new one might go unnoticed."""

from pathlib import Path

import pytest
import vllm

from scoremode_server.vllm_patches import versions

CLIENT = "vllm/v1/engine/async_llm.py"
ABORT = "    async def abort("


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The engine client of a release that nobody knows, the same as that of the installed one, and pinned alone."""
    copy, original = tmp_path / CLIENT, Path(vllm.__file__).parents[1] / CLIENT
    copy.parent.mkdir(parents=True)
    copy.write_text(original.read_text())
    key = "vllm.v1.engine.async_llm:AsyncLLM.*"
    monkeypatch.setattr(versions, "PRIVATE", {key: versions.PRIVATE[key]})
    monkeypatch.setattr(vllm, "__version__", "0.33.7")
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "vllm" / "__init__.py"))
    return copy


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ABORT, f"    async def load_other_weights(self): ...\n\n{ABORT}"),
        (ABORT, f"    reload = abort\n\n{ABORT}"),
        ("class AsyncLLM(EngineClient)", "class AsyncLLM(EngineClient, Reloading)"),
    ],
)
def test_a_release_whose_engine_client_has_a_new_method_is_refused(client: Path, before: str, after: str):
    client.write_text(client.read_text().replace(before, after, 1))
    with pytest.raises(RuntimeError, match=r"vllm\.v1\.engine\.async_llm:AsyncLLM\.\* \(changed\)$"):
        versions.require_supported()


def test_one_whose_methods_do_something_else_is_not(client: Path):
    client.write_text(client.read_text().replace(ABORT, f"    def _new(self): ...\n\n{ABORT}", 1))
    versions.require_supported()
