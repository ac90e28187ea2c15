"""The examples of README.md and docs/ for a server, but for its address and the model's name."""

import json
import re

import httpx
import pytest

from tests.doc_examples import ROOT, examples, run
from tests.e2e.metrics import metrics_of

TUTORIAL = ("measure.md", "decode.md", "sharing.md")
"""Pages whose examples are one story in this order."""
STEPS = [code for page in TUTORIAL for name, (_, code) in examples("").items() if name.startswith(page)]
FOR_A_SERVER = {name: block for name, block in examples("localhost:8000").items() if not name.startswith(TUTORIAL)}
WITH_TOKEN_IDS = {name: FOR_A_SERVER.pop(name) for name in list(FOR_A_SERVER) if name.startswith("training.md")}
"""Examples with token ids of a real model's vocabulary."""
STEP = "the next step of an example"


@pytest.mark.parametrize(("language", "code"), FOR_A_SERVER.values(), ids=FOR_A_SERVER)
def test_examples_for_a_server(server, tmp_path, language, code):
    code = code.replace("http://localhost:8000", server).replace("model=smollm2", "model=tiny")
    assert run(language, code, tmp_path).strip()


@pytest.mark.parametrize(("language", "code"), WITH_TOKEN_IDS.values(), ids=WITH_TOKEN_IDS)
def test_examples_with_token_ids(smollm2_server, tmp_path, language, code):
    printed = run(language, code.replace("http://localhost:8000", smollm2_server), tmp_path)
    assert printed.strip()
    assert '"error"' not in printed


def test_from_two_checkpoints_to_a_card(server, int8_server, tmp_path):
    story = "".join(f"echo '{STEP}'\n{code}" for code in STEPS)
    story = story.replace("http://localhost:8000", server).replace("http://localhost:8001", int8_server)
    _, recorded, floor, compared, lanes, listed, deleted = run("bash", story, tmp_path).split(STEP)
    assert "perplexity" in recorded
    assert "kept with the reference" in floor
    assert re.search(r"^Mean    KLD:  +0\.0\d+ ± ", compared, re.MULTILINE)
    assert "<!-- scoremode -->" in (tmp_path / "README.md").read_text()
    assert re.search(r"^decode (agrees with prefill|differs)", lanes, re.MULTILINE)
    [reference] = [each for each in json.loads(listed)["data"] if each["name"] == "original"]
    assert reference["complete"]
    divergence = json.loads((tmp_path / "quantized.json").read_text())["statistics"]["kld"]["mean"]
    assert reference["noise_floor"]["mean"] < divergence
    assert json.loads(deleted)["deleted"]


def test_alerts_ask_for_metrics_that_there_are(server):
    names = re.findall(r"\b(?:scoremode_|vllm:|http_requests)[a-z_]+", (ROOT / "docker" / "alerts.yaml").read_text())
    assert len(set(names)) > 5
    # Requests are not shown before there was one.
    httpx.get(f"{server}/v1/models", timeout=60).raise_for_status()
    metrics = metrics_of(server)
    assert [name for name in names if f"\n{name}" not in metrics] == []
