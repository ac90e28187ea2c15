"""`ppl-client sweep` over two running servers, and `quick`, which serves two models."""

import json
import re

import yaml
from safetensors.numpy import load_file

from local_server import CPU_ENVIRONMENT, CPU_FLAGS, has_gpu
from scoremode import ScoreClient
from scoremode.cli.main import main
from tests import oracle
from tests.shared_servers import SMALL
from tests.texts import WIKITEXT


def test_two_models_make_two_runs_and_a_report(server, disturbed_server, tmp_path):
    runs = tmp_path / "runs"
    plan = {
        "output": "runs",
        "text": {"text_file": str(WIKITEXT), "max_tokens": 1000},
        "windows": {"method": "disjoint", "context_length": 64},
        "models": [{"name": "base", "url": disturbed_server}, {"name": "other", "url": server}],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["sweep", str(tmp_path / "plan.yaml"), "--quiet"]) == 0
    base, other = (json.loads((runs / f"{name}.json").read_text()) for name in ("base", "other"))
    with ScoreClient(server) as client:
        client.delete_reference(other["reference"]["name"])
    assert (base["kind"], other["kind"]) == ("perplexity", "kld")
    assert other["statistics"]["kld"]["mean"] > 1e-3
    assert other["statistics"]["num_windows"] == 15
    # The same positions, scored as prompts and from the reference's hidden states: sums in another order.
    compared, alone = (load_file(runs / f"{name}.safetensors") for name in ("other", "base"))
    oracle.assert_close(compared["reference_logprobs"], alone["logprobs"])
    assert (runs / "report.html").is_file()


def test_quick_measures_a_text_answers_and_tasks_in_one_run(
    random_model, disturbed_model, tmp_path, monkeypatch, wikitext
):
    monkeypatch.chdir(tmp_path)
    for name, value in () if has_gpu() else CPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": wikitext[: 50 + at]}) + "\n" for at in range(9))
    )
    for name, is_right in (("random", 1), ("__home__disturbed", 0)):
        answer = {
            **{"doc_id": 0, "filter": "none", "metrics": ["acc"], "acc": is_right, "filtered_resps": [["-1", "True"]]},
            **dict.fromkeys(("target", "doc_hash", "prompt_hash", "target_hash"), "a"),
            "arguments": {"gen_args_0": {"arg_0": "Which?", "arg_1": "a"}},
        }
        (folder := tmp_path / "tasks" / name).mkdir(parents=True)
        (folder / "samples_letters_2026-11-24T10-00-00.000001.jsonl").write_text(json.dumps(answer))
    quick = ["quick", str(random_model), str(disturbed_model)]
    text = ["--text-file", str(WIKITEXT), "--context-length", "64", "--max-windows", "2", "--quiet"]
    answers = "--prompts prompts.jsonl --max-new-tokens 8 --tasks tasks --write-card card.md"
    flags = ["--", *SMALL, *(() if has_gpu() else CPU_FLAGS)]
    assert main([*quick, *text, *answers.split(), *flags]) == 0
    report, rows = (tmp_path / "scoremode-quick" / "report.html").read_text(), (tmp_path / "card.md").read_text()
    assert re.search(
        r"\| same top % \| same answer for \(tokens\) \|\n.*\n.*\n\| disturbed .*\| (\d+|to the end) \|\n", rows
    )
    assert "\n| letters | acc | 1 | 100.00 | 0.00 | -100.00 " in rows
    assert ["same for, median" in report, "floor, to the end" in report, "Accuracies of disturbed" in report] == [
        True
    ] * 3
