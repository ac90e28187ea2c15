"""KL divergence of a model's quantized copies from itself, as served, beside an oracle that quantizes in torch.

    python bench/kld_formats.py MODEL TEXT LOGS [OPTION...] [any vllm serve flag]

MODEL, TEXT and LOGS are those of bench/formats.py. The model itself is recorded as served in bfloat16, and each format,
itself among them, compared with that. The oracle computes both models' logits in float32 and their divergence in
float64: what is between the two is the rounding of bfloat16 on both sides. All servers start at once on one GPU.
"""

import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "bench")]

from agreement import Windows, cut_windows, windows_parser  # noqa: E402
from checkpoints import write_checkpoint  # noqa: E402
from model_servers import Server, failed_row, kernels, log_of, reason, starting  # noqa: E402
from quantized_oracle import oracle_model  # noqa: E402
from servers import Settings  # noqa: E402
from tables import table  # noqa: E402

from local_server import has_gpu  # noqa: E402
from scoremode import ScoreClient  # noqa: E402

BASE = "bf16"
FORMATS = (BASE, "w4a16", "nvfp4a16", "fp8", "int8")
REFERENCE = "base"
HEADER = ("format", "kernels", "mean KLD", "oracle's", "mean difference", "max", "reverse, max", "same top p")


@torch.inference_mode()
def oracle_divergences(base: PreTrainedModel, other: PreTrainedModel, windows: Windows) -> np.ndarray:
    """KL(base||other) and KL(other||base) at each token but the first of each window: [positions, 2] float64, nats."""
    parts = []
    for window in windows:
        token_ids = torch.tensor([list(window)], device=base.device)
        log_p, log_q = (
            model(token_ids, use_cache=False).logits[0, :-1].double().log_softmax(-1) for model in (base, other)
        )
        ratio = log_p - log_q
        parts.append(torch.stack(((log_p.exp() * ratio).sum(-1), -(log_q.exp() * ratio).sum(-1)), 1).cpu().numpy())
    return np.concatenate(parts)


def record(url: str, name: str, windows: Windows) -> None:
    """Keep the served model as a reference over these windows."""
    # `disjoint` leaves out a window that ends with the text.
    tokens = [token for window in windows for token in window] + [windows[0][0]]
    with ScoreClient(url, timeout=600) as client:
        reference = client.record_reference(name, tokens, method="disjoint", context_length=len(windows[0]))
    if reference.num_windows != len(windows):
        raise ValueError(f"{reference.num_windows} windows of {len(windows)} were recorded")


def row(name: str, url: Future[str], expected: np.ndarray, log: Path) -> tuple[str, ...]:
    """A line of the table, or the reason why there is none."""
    try:
        with ScoreClient(url.result(), timeout=600) as client:
            result = client.kld(REFERENCE)
    except Exception as error:
        print(f"{name}: {reason(error)}", flush=True)
        return failed_row(HEADER, name, error=error)
    kld = np.concatenate([window.positions.kld for window in result.data]).astype(float)
    reverse = np.concatenate([window.positions.reverse_kld for window in result.data]).astype(float)
    difference = kld - expected[:, 0]
    return (
        name,
        ", ".join(kernels(log)) or "-",
        f"{kld.mean():.6f}",
        f"{expected[:, 0].mean():.6f}",
        f"{difference.mean():+.2e}",
        f"{np.abs(difference).max():.2e}",
        f"{np.abs(reverse - expected[:, 1]).max():.2e}",
        f"{result.statistics['same_top_p']:.4f}",
    )


def main() -> None:
    """Write checkpoints, start servers, record the base, compare each format."""
    parser = windows_parser(__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    options, flags = parser.parse_known_args()
    torch.set_float32_matmul_precision("highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = cut_windows(options.text, options.model, options.windows, options.length)
    names = [BASE, *(name for name in options.formats if name != BASE)]
    folders = {
        name: options.model
        if name == BASE
        else write_checkpoint(options.model, options.logs / "checkpoints" / name, name)
        for name in names
    }
    # bfloat16 is emulated, and slow, on many a CPU.
    settings = Settings(
        ("--dtype", "bfloat16" if has_gpu() else "float32", "--reference-dir", str(options.logs / "references"))
    )
    servers = {name: Server(folder, settings) for name, folder in folders.items()}
    with starting(servers, options.logs, "--max-model-len", str(options.length + 1), *flags) as urls:
        base = oracle_model(folders[BASE], device=device)
        expected = {
            name: oracle_divergences(base, base if name == BASE else oracle_model(folder, device=device), windows)
            for name, folder in folders.items()
        }
        record(urls[BASE].result(), REFERENCE, windows)
        rows = [row(name, urls[name], expected[name], log_of(name, options.logs)) for name in names]
    print(table(HEADER, rows), flush=True)


if __name__ == "__main__":
    main()
