"""Presets against the tools: lm-eval's task, and the loop of Hugging Face's documentation as the oracle has it."""

import importlib.util
import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import lm_eval_tasks
from scoremode.cli.main import main
from scoremode.runs import comparable_with
from scoremode.wire.references import CorpusInfo
from tests import oracle

LENGTH = 256
TITLE = re.compile(r"^ = [^=\n]+ = $", re.MULTILINE)


@pytest.fixture(scope="module")
def lines(wikitext: str) -> list[str]:
    """Lines of WikiText-2's file: the end of an article, a whole one, and the beginning of the next."""
    lines = [row.removeprefix("\n") or " " for row in wikitext.split("\n\n")]
    titles = [number for number, line in enumerate(lines) if TITLE.match(line)]
    return lines[titles[1] - 8 : titles[2] + 8]


def measured(server: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The record of a run."""
    output = folder / "run.json"
    options = ("--context-length", str(LENGTH), "--output", str(output), "--quiet")
    assert main(["--url", server, *arguments, *options]) == 0
    record: dict[str, Any] = json.loads(output.read_text())
    assert f"max_length={LENGTH}" in comparable_with(CorpusInfo.model_validate(record["corpus"]), LENGTH)
    return record


def test_lm_eval_has_the_same_figures(server, random_model, lines, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    (tmp_path / "wiki.test.raw").write_text("\n".join([*lines, ""]))
    starts = [0, *(number for number, line in enumerate(lines) if TITLE.match(line)), len(lines)]
    pages = ["\n".join(lines[start:end]) for start, end in pairwise(starts)]
    pages[-1] += "\n"
    lm_eval_tasks.write_jsonl(tmp_path / "pages.jsonl", [{"page": page} for page in pages])
    [package] = importlib.util.find_spec("lm_eval").submodule_search_locations
    shutil.copytree(Path(package, "tasks", "wikitext"), tmp_path / "task")
    task = tmp_path / "task" / "wikitext.yaml"
    files = {"data_files": dict.fromkeys(("train", "validation", "test"), str(tmp_path / "pages.jsonl"))}
    of_hub = "dataset_path: EleutherAI/wikitext_document_level\ndataset_name: wikitext-2-raw-v1\n"
    here = f"dataset_path: json\ndataset_kwargs: {json.dumps(files)}\n"
    task.write_text(task.read_text().replace(of_hub, here))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(random_model), "dtype": "float32", "device": "cpu", "max_length": LENGTH},
        tasks=["wikitext"],
        task_manager=TaskManager(include_path=str(task.parent), include_defaults=False),
        bootstrap_iters=0,
    )["results"]["wikitext"]
    record = measured(server, tmp_path, "--text-file", str(tmp_path / "wiki.test.raw"), "--preset", "lm-eval")
    for name in ("word_perplexity", "bits_per_byte"):
        assert math.log(record[name]) == pytest.approx(math.log(found[f"{name},none"]), rel=oracle.MEAN)


def test_the_loop_of_hugging_faces_documentation_has_the_same_windows(server, random_model, lines, tmp_path):
    rows = ["" if line == " " else f"{line}\n" for line in lines]
    lm_eval_tasks.write_jsonl(tmp_path / "rows.jsonl", [{"text": row} for row in rows])
    tokens = AutoTokenizer.from_pretrained(random_model)("\n\n".join(rows))["input_ids"]
    expected = oracle.perplexity(random_model, tokens, "sliding", LENGTH, LENGTH // 2)
    record = measured(server, tmp_path, "--dataset", str(tmp_path / "rows.jsonl"), "--preset", "hf")
    ends = np.cumsum([window["num_scored"] for window in record["windows"]])
    losses = [window.mean() for window in np.split(expected.nlls, ends[:-1])]
    assert [window["nll_sum"] / window["num_scored"] for window in record["windows"]] == pytest.approx(
        losses, rel=oracle.MEAN
    )
