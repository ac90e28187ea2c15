"""KL divergence of a model's 4-bit copy from the model in float32, on one GPU and on several.

    python bench/kld_tensor_parallel.py MODEL TEXT LOGS [OPTION...] [any vllm serve flag]

MODEL, TEXT and LOGS are those of bench/tensor_parallel.py, and so is the padding of heads. Each degree records the
model, and compares the copy with its own recording and with the first degree's: a reference does not depend on the
degree that recorded it. The oracle is transformers in float32, its divergences in float64.
"""

import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from agreement import cut_windows, windows_parser  # noqa: E402
from checkpoints import pad_heads  # noqa: E402
from kld_formats import oracle_divergences, record  # noqa: E402
from model_servers import Server, starting  # noqa: E402
from quantized_oracle import oracle_model  # noqa: E402
from servers import Settings  # noqa: E402
from tables import table  # noqa: E402

from rounded_model import rounded_model  # noqa: E402
from scoremode import ScoreClient  # noqa: E402

HEADER = ("recorded by", "compared by", "mean KLD", "to the first", "largest", "to the oracle", "largest")


def divergences(url: str, reference: str) -> np.ndarray:
    """KL(reference||served) of all positions, in nats."""
    with ScoreClient(url, timeout=600) as client:
        return np.concatenate([window.positions.kld for window in client.kld(reference).data]).astype(float)


def main() -> None:
    """Write both models, start a server for each and each degree, record, compare."""
    parser = windows_parser(__doc__)
    parser.add_argument("--heads", type=int, nargs=2, default=(12, 4), help="query and key-value heads after padding")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2], help="of tensor parallelism")
    options, flags = parser.parse_known_args()
    torch.set_float32_matmul_precision("highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    base = pad_heads(options.model, options.logs / "padded", *options.heads)
    models = {"base": base, "copy": rounded_model(base, options.logs / "padded-4bit")}
    settings = ("--dtype", "float32", "--reference-dir", str(options.logs / "references"))
    servers = {
        f"{name}-tp{degree}": Server(folder, Settings((*settings, "--tensor-parallel-size", str(degree))))
        for degree in options.degrees
        for name, folder in models.items()
    }
    limit = ("--max-model-len", str(options.length + 1))
    with starting(servers, options.logs, *limit, *flags) as urls:
        expected = oracle_divergences(*(oracle_model(folder, device=device) for folder in models.values()), windows)[
            :, 0
        ]
        for degree in options.degrees:
            record(urls[f"base-tp{degree}"].result(), f"tp{degree}", windows)
        first_degree = options.degrees[0]
        pairs = [(first_degree, degree) for degree in options.degrees]
        pairs += [(degree, degree) for degree in options.degrees if degree != first_degree]
        found = {pair: divergences(urls[f"copy-tp{pair[1]}"].result(), f"tp{pair[0]}") for pair in pairs}
    first = found[pairs[0]]
    rows = [
        (
            *(f"TP {recorded}", f"TP {compared}", f"{kld.mean():.8f}"),
            *(f"{kld.mean() - first.mean():+.2e}", f"{np.abs(kld - first).max():.2e}"),
            *(f"{kld.mean() - expected.mean():+.2e}", f"{np.abs(kld - expected).max():.2e}"),
        )
        for (recorded, compared), kld in found.items()
    ]
    print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
