"""How far INT8 W8A8 scores lie from an oracle that quantizes as the kernels do, and from decompressed weights.

python bench/int8.py [NUM_TOKENS [DATASET]]      the table of docs/methods.md; CPU, some 5 minutes
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "scripts")]

from demo_model import cache_root, demo_model, made_once  # noqa: E402
from local_server import running_server  # noqa: E402
from scoremode import ScoreClient  # noqa: E402
from scoremode.corpora import load_corpus  # noqa: E402
from tests import models, oracle  # noqa: E402


def main() -> None:
    """Serve each checkpoint, score the same tokens, print a row for each oracle."""
    num_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1023
    text = load_corpus(sys.argv[2] if len(sys.argv) > 2 else "wikitext").text[:20000]
    for name, last_blocks in (("last block", 1), ("all blocks", None)):
        folder = cache_root() / ("SmolLM2-135M-INT8" + ("-last-block" if last_blocks else ""))

        def make(path: Path, last_blocks: int | None = last_blocks) -> Path:
            return models.int8_model(demo_model(), path, last_blocks=last_blocks, symmetric_activations=False)

        model = made_once(folder, make)
        with (
            tempfile.TemporaryDirectory() as logs,
            running_server(model, "--max-model-len", "2048", log=Path(logs) / "server.log") as url,
            ScoreClient(url) as client,
        ):
            tokens = client.tokenize(text)[:num_tokens]
            (score,) = client.score(tokens)
        ours = np.array(score.logprobs[1:])
        print(f"{name}: {num_tokens} tokens, perplexity {np.exp(-ours.mean()):.4f}")
        (quantized,) = oracle.int8_logprobs(model, [tokens], saturates=oracle.int8_products_saturate())
        (decompressed,) = oracle.decompressed_logprobs(model, [tokens])
        for label, expected in (("quantized", quantized), ("decompressed", decompressed)):
            off = np.abs(ours - expected)
            print(
                f"  {label:12} perplexity {np.exp(-expected.mean()):.4f}, difference per token: "
                f"mean {off.mean():.2e}, median {np.median(off):.2e}, max {off.max():.2e}"
            )


if __name__ == "__main__":
    main()
