"""`ppl-client parity` on rollouts that vLLM itself has sampled, and on copies with one fault each."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from scoremode import ScoreClient
from scoremode.cli.main import main

Row = dict[str, Any]
NUM_ROWS, PROMPT, COMPLETION = 8, 12, 80
PLACES = PROMPT + np.arange(COMPLETION)


def sampled(server: str, temperature: float) -> list[Row]:
    """Rollouts that share a prompt, as those of one group do, so that vLLM's prefix cache has it."""
    with ScoreClient(server) as client:
        model, prompt = client.info().model, client.tokenize("The parliament of the republic met again today, and")
    prompt = (prompt * PROMPT)[:PROMPT]
    body = {"model": model, "prompt": prompt, "max_tokens": COMPLETION, "logprobs": 1, "return_token_ids": True}
    body |= {"temperature": temperature, "top_p": 1, "top_k": -1, "ignore_eos": True, "n": NUM_ROWS, "seed": 7}
    answer = httpx.post(f"{server}/v1/completions", json=body, timeout=300).raise_for_status().json()
    return [
        {
            "token_ids": prompt + choice["token_ids"],
            "prompt_length": PROMPT,
            "sampler_logprobs": choice["logprobs"]["token_logprobs"],
            "temperature": temperature,
        }
        for choice in answer["choices"]
    ]


def verdict(server: str, rows: list[Row], folder: Path) -> str:
    path, output = folder / "rollouts.jsonl", folder / "parity.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["parity", str(path), "--url", server, "--quiet", "--output", str(output), "--force"]) == 0
    [finding] = json.loads(output.read_text())["findings"]
    return finding["sentence"]


def test_rollouts_are_the_decode_lane_and_each_fault_is_named(server, llama_2_server, tmp_path):
    """The second server returns processed logprobs. The first returns raw ones, which are those of temperature 1."""
    rows, is_lane = sampled(llama_2_server, 0.7), "the sampler is the decode lane (within the floor)"
    assert verdict(llama_2_server, rows, tmp_path) == is_lane
    assert verdict(server, sampled(server, 1), tmp_path) == is_lane
    raw = verdict(server, sampled(server, 0.7), tmp_path)
    assert raw.endswith("lane, and within the floor at temperature 1: its own was not applied")
    logprobs = np.array([row["sampler_logprobs"] for row in rows])
    with ScoreClient(llama_2_server) as client:
        longer = [[client.info().bos_token_id, *row["token_ids"]] for row in rows]
        with_bos = [score.logprobs for score in client.score(longer, logprobs_from=PROMPT + 1, temperature=0.7)]
    faults = {
        "without row 5": logprobs - 0.1 * (np.arange(NUM_ROWS) == 4)[:, None],
        "without positions 32 to 63": logprobs - 0.1 * ((PLACES > 40) & (PLACES < 60)),
        "if each logprob is that of the token before: they are shifted by one": np.roll(logprobs, 1, axis=1),
        "with a BOS before the tokens: its input has one too many": with_bos,
    }
    for fault, trainer in faults.items():
        faulty = [
            {**row, "trainer_logprobs": [*values], "sampler_logprobs": None}
            for row, values in zip(rows, trainer, strict=True)
        ]
        assert verdict(llama_2_server, faulty, tmp_path).endswith(f"lane, and within the floor {fault}")
