"""One model measured in every way: no way may show it to be better than itself."""

from pathlib import Path

import pytest

from scoremode import ScoreClient
from scoremode.cli import main
from scoremode.comparison.compare import compare
from scoremode.comparison.run_file import load_run

NUM_TEXTS = 10
CONTEXT = 96
NAME = "itself"


@pytest.fixture(scope="module")
def texts(smollm2_client: ScoreClient, wikitext: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Each of some two hundred tokens."""
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / f"{number}.txt" for number in range(NUM_TEXTS)]
    for number, path in enumerate(paths):
        path.write_text(wikitext[40_000 + 800 * number :][:800])
    return paths


def test_no_way_is_shown_to_be_better_than_another(smollm2_server, smollm2_client, texts, tmp_path):
    """With sums in float32, `/v1/score` was worse than `/v1/kld` by 8e-6 nats a token, and shown to be."""
    server = ("--url", smollm2_server, "--quiet")
    cut = ("--method", "disjoint", "--context-length", str(CONTEXT))
    for text in texts:
        given = ("--text-file", str(text), *cut)
        ways = {
            "score": (*server, *given),
            "from the cache, one at a time": (*server, *given, "--concurrency", "1"),
            "kld": ("kld", *server, "--reference", NAME),
        }
        assert main(["record", *server, *given, "--reference", NAME]) == 0
        for way, arguments in ways.items():
            assert main([*arguments, "--output", str(tmp_path / f"{text.stem}-{way}.json")]) == 0
        smollm2_client.delete_reference(NAME)
        pairs = compare([load_run(tmp_path / f"{text.stem}-{way}.json", way) for way in ways]).pairs
        assert [pair.verdict for pair in pairs] == ["no difference shown"] * 3
        # A step of float32 at 20 nats is 2e-6, and batches differ.
        assert max(abs(pair.ln_ppl_ratio.value) for pair in pairs) < 1e-6
