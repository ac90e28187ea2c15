"""lm-eval on our server beside its own `hf` backend in float32, request by request: the table of docs/lm-eval.md.

python bench/lm_eval_agreement.py WIKITEXT [QUESTIONS] [DOCUMENTS]      2 CPU cores: some 10 minutes for 100 and 3
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OPENAI_API_KEY", "unused")
ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts")]

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from demo_model import demo_model  # noqa: E402
from lm_eval_tasks import write_tasks  # noqa: E402
from local_server import running_server  # noqa: E402

LENGTH = 1024
TASKS = ("python_reference", "wikitext_documents")


def evaluate(folder: Path, task: str, limit: int, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's results for the first documents of one task."""
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        limit=limit,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    return results


def main() -> None:
    """Run both backends on both tasks."""
    wikitext, *counts = sys.argv[1:]
    limits = [int(count) for count in counts] + [100, 3][len(counts) :]
    model = demo_model()
    reference = {"pretrained": str(model), "dtype": "float32", "device": "cpu", "max_length": LENGTH}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tasks(folder, Path(wikitext))
        flags = ("--served-model-name", "smollm2", "--max-model-len", "2048", "--max-num-seqs", "8")
        with running_server(model, *flags, log=folder / "server.log") as url:
            served = {
                "model": "smollm2",
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "remote",
                "num_concurrent": 8,
                "max_length": LENGTH + 2,
            }
            for task, limit in zip(TASKS, limits, strict=True):
                ours = evaluate(folder, task, limit, "local-completions", served)
                theirs = evaluate(folder, task, limit, "hf", reference)
                compare(task, ours, theirs)


def compare(task: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Print the largest difference of any request, and every metric of both."""
    answers = [
        [
            answer
            for sample in sorted(results["samples"][task], key=lambda s: s["doc_id"])
            for (answer,) in sample["resps"]
        ]
        for results in (ours, theirs)
    ]
    pairs = list(zip(*answers, strict=True))
    if isinstance(pairs[0][0], tuple | list):
        differ = sum(one[1] != other[1] for one, other in pairs)
        print(f"{task}: {len(pairs)} requests, is_greedy differs on {differ}")
        pairs = [(one[0], other[0]) for one, other in pairs]
    largest = max(abs(float(one) - float(other)) for one, other in pairs)
    print(f"{task}: {len(pairs)} loglikelihoods, largest difference {largest:.2e} nats")
    for name, value in theirs["results"][task].items():
        if isinstance(value, float):
            print(f"{task}: {name} ours {ours['results'][task][name]:.6f} hf {value:.6f}", flush=True)


if __name__ == "__main__":
    main()
