"""Presets against the tools that can be run here: lm-eval's task, and the loop of Hugging Face's documentation."""

import importlib.util
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lm_eval_tasks
from tests import oracle
from tests.command_line import ppl_client

LENGTH = 256


@pytest.fixture(scope="module")
def lines(wikitext: str) -> list[str]:
    """Of WikiText-2's file, from the second article's end on: two titles, one article whole."""
    rows = wikitext.split("\n\n")
    titles = [number for number, row in enumerate(rows) if lm_eval_tasks.TITLE.match(row.removeprefix("\n"))]
    return [row.removeprefix("\n") or " " for row in rows[titles[1] - 8 : titles[2] + 8]]


def measured(server: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The record of a run."""
    output = folder / "run.json"
    ppl_client("--url", server, *arguments, "--context-length", str(LENGTH), "--output", str(output), "--quiet")
    record: dict[str, Any] = json.loads(output.read_text())
    return record


def test_lm_eval_has_the_same_figures(server, random_model, lines, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    text = "\n".join(lines) + "\n"
    (tmp_path / "wiki.test.raw").write_text(text)
    starts = [0, *(found.start() for found in lm_eval_tasks.TITLE.finditer(text)), len(text)]
    # A title begins a page, and the line before it ends one.
    pages = [text[start : end - (end < len(text))] for start, end in pairwise(starts)]
    lm_eval_tasks.write_jsonl(tmp_path / "pages.jsonl", [{"page": page} for page in pages])
    [package] = importlib.util.find_spec("lm_eval").submodule_search_locations
    task = Path(package, "tasks", "wikitext")
    shutil.copy(task / "preprocess_wikitext.py", tmp_path)
    here = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/pages.jsonl\n"
    kept = [
        line
        for line in (task / "wikitext.yaml").read_text().splitlines()
        if not line.startswith(("dataset_", "training_split", "validation_split"))
    ]
    (tmp_path / "wikitext.yaml").write_text(here + "\n".join(kept))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(random_model), "dtype": "float32", "device": "cpu", "max_length": LENGTH},
        batch_size=1,
        tasks=["wikitext"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )["results"]["wikitext"]
    record = measured(server, tmp_path, "--text-file", str(tmp_path / "wiki.test.raw"), "--preset", "lm-eval")
    for name in ("word_perplexity", "bits_per_byte"):
        assert math.log(record[name]) == pytest.approx(math.log(found[f"{name},none"]), rel=oracle.MEAN)


def test_the_loop_of_hugging_faces_documentation_has_the_same_perplexity(server, random_model, lines, tmp_path):
    rows = ["" if line == " " else f"{line}\n" for line in lines]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float64).eval()
    encodings = AutoTokenizer.from_pretrained(random_model)("\n\n".join(rows), return_tensors="pt")
    stride, seq_len, prev_end_loc, nlls = LENGTH // 2, encodings.input_ids.size(1), 0, []
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + LENGTH, seq_len)
        input_ids = encodings.input_ids[:, begin_loc:end_loc]
        target_ids = input_ids.clone()
        target_ids[:, : -(end_loc - prev_end_loc)] = -100
        with torch.no_grad():
            loss = float(model(input_ids, labels=target_ids).loss)
        # The documentation takes one target off the weight of every window.
        nlls.append((loss, int((target_ids != -100).sum()) - 1))
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    record = measured(server, tmp_path, "--dataset", str(tmp_path / "rows.jsonl"), "--preset", "hf")
    ours = [window["nll_sum"] / window["num_scored"] for window in record["windows"]]
    assert ours == pytest.approx([loss for loss, _ in nlls], rel=oracle.MEAN)
    documented = sum(loss * weight for loss, weight in nlls) / sum(weight for _, weight in nlls)
    assert record["nll_mean"] == pytest.approx(documented, abs=0.01)
