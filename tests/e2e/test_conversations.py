"""Conversations on a real model: their logprobs next to transformers in float64, the same through every route, and chat
completions that score next to vLLM's, field by field."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from scoremode.cli.main import main
from scoremode.comparison.run_file import load_run
from tests import oracle
from tests.e2e.test_completions import assert_same, connect

CHAT = "/v1/chat/completions"
SHORT = [
    {"role": "user", "content": "Which bird cannot fly?"},
    {"role": "assistant", "content": "An ostrich cannot, though it runs faster than most horses."},
]
CONVERSATIONS = [
    [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Where does the Danube end?"},
        {
            "role": "assistant",
            "content": "The Danube flows into the Black Sea, in a delta that Romania and Ukraine share.",
        },
        {"role": "user", "content": "And the Rhine — naïvely asked?"},
        {"role": "assistant", "content": "The Rhine reaches the North Sea near Rotterdam, by several arms."},
    ],
    SHORT,
]
LABELS = ["rivers", "birds"]
SCORING: dict[str, Any] = {"messages": SHORT, "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def http(smollm2_server: str) -> Iterator[httpx.Client]:
    with connect(smollm2_server) as client:
        yield client


@pytest.fixture(scope="module")
def sequences(http: httpx.Client) -> list[dict[str, Any]]:
    """The conversations as the server renders them."""
    return http.post("/v1/turns", json={"messages": CONVERSATIONS}).raise_for_status().json()["data"]


@pytest.fixture(scope="module")
def expected(smollm2, sequences) -> list[np.ndarray]:
    """The logprobs of each turn in float64."""
    return [
        logprobs[turn["first"] - 1 : turn["end"] - 1]
        for sequence in sequences
        for logprobs in oracle.logprobs(smollm2, [sequence["token_ids"]])
        for turn in sequence["turns"]
    ]


def test_logprobs_of_turns_are_transformers(http, smollm2, sequences, expected):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rendered = [tokenizer.apply_chat_template(each, tokenize=True, return_dict=False) for each in CONVERSATIONS]
    assert [sequence["token_ids"] for sequence in sequences] == rendered
    body = {"messages": CONVERSATIONS, "return_ranks": True}
    data = http.post("/v1/score", json=body).raise_for_status().json()["data"]
    assert [(each["prompt_index"], each["continuation_index"]) for each in data] == [(0, 0), (0, 1), (1, 0)]
    said = [message["content"] for messages in CONVERSATIONS for message in messages if message["role"] == "assistant"]
    assert [tokenizer.decode(each["token_ids"]) for each in data] == [f"{text}<|im_end|>" for text in said]
    for each, logprobs in zip(data, expected, strict=True):
        oracle.assert_close(each["logprobs"], logprobs)
        assert len(each["ranks"]) == each["num_scored"] == len(logprobs)


def test_every_route_has_the_same_perplexity(http, sequences, expected):
    """`/v1/perplexity`, a reference, and its comparison with its own model."""
    all_logprobs = np.concatenate(expected)
    perplexity = http.post("/v1/perplexity", json={"messages": CONVERSATIONS}).raise_for_status().json()
    name, body = "conversations", {"messages": CONVERSATIONS, "labels": LABELS}
    reference = http.post("/v1/references", json=body | {"name": name}).raise_for_status().json()
    try:
        windows = http.get(f"/v1/references/{name}/windows").raise_for_status().json()
        kld = http.post("/v1/kld", json={"reference": name}).raise_for_status().json()
    finally:
        http.delete(f"/v1/references/{name}").raise_for_status()
    for found in (perplexity, reference):
        assert (found["method"], found["num_scored"]) == ("conversation", all_logprobs.size)
        assert found["perplexity"] == pytest.approx(np.exp(-all_logprobs.mean()), rel=oracle.MEAN)
    for window, logprobs in zip(kld["data"], expected, strict=True):
        oracle.assert_close(window["logprobs"], logprobs)
        oracle.assert_close(window["reference_logprobs"], logprobs)
    assert kld["statistics"]["kld"]["mean"] < oracle.PER_TOKEN
    assert windows["num_context"] == [turn["first"] for sequence in sequences for turn in sequence["turns"]]
    assert (windows["documents"], windows["roles"]) == ([0, 0, 1], ["assistant"] * 3)
    assert windows["labels"] == ["rivers", "rivers", "birds"]


def test_turns_are_cut_at_the_context(http, sequences, expected):
    """A turn that begins in it counts as far as it goes."""
    first, second = sequences[0]["turns"]
    for length, num_scored in (
        (second["first"] + 3, len(expected[0]) + 3),
        (second["first"], len(expected[0])),
        (first["first"] + 2, 2),
    ):
        body = {"messages": CONVERSATIONS[0], "context_length": length}
        assert http.post("/v1/perplexity", json=body).raise_for_status().json()["num_scored"] == num_scored
    answer = http.post("/v1/perplexity", json=body | {"context_length": first["first"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "context_length")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": None, "echo": True, "logprobs": True, "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": None, "max_completion_tokens": 1},
        # This token is a part of a character.
        {"logprobs": True, "top_logprobs": 2, "logit_bias": {"115": 100}},
        {"return_token_ids": True},
        {"return_tokens_as_token_ids": True, "logprobs": True},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"messages": [{"role": "system", "content": "Naïve — 日本語 🙂"}, *SHORT]},
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"stop": ["e"], "logit_bias": {"5": 50}},
        # vLLM answers all that follow, and the errors are vLLM's.
        {"prompt_logprobs": None},
        {"max_tokens": 3},
        {"messages": [SHORT[0] | {"content": [{"type": "text", "text": "In parts"}]}]},
        {"prompt_logprobs": 300},
        {"model": "gpt-5"},
        {"messages": [{"content": "Hello"}]},
        {"chat_template": "{{ messages }}"},
        {"messages": [SHORT[0] | {"content": "word " * 3000}]},
    ],
    ids=str,
)
def test_chat_completions_are_vllms(http, change):
    body = SCORING | change
    ours, stock = (http.post(path, json=body) for path in (CHAT, f"/stock{CHAT}"))
    assert ours.status_code == stock.status_code
    assert_same(ours.json(), stock.json(), oracle.PER_TOKEN)


def test_runs_of_a_dataset_have_these_logprobs_and_say_where_they_are_from(
    smollm2_server, http, sequences, expected, tmp_path
):
    rows = [{"chat": chat, "topic": label} for chat, label in zip(CONVERSATIONS, LABELS, strict=True)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = ("--url", smollm2_server, "--dataset", str(tmp_path / "chats.jsonl"), "--messages", "chat", "--by", "topic")
    reference = ("--url", smollm2_server, "--reference", "dataset")
    assert main([*text, "--output", str(tmp_path / "plain.json")]) == 0
    assert main(["record", *text, "--reference", "dataset"]) == 0
    assert main(["kld", *reference, "--output", str(tmp_path / "kld.json")]) == 0
    http.delete("/v1/references/dataset").raise_for_status()
    for name in ("plain", "kld"):
        run = load_run(tmp_path / f"{name}.json")
        oracle.assert_close(-run.nlls, np.concatenate(expected))
        assert (run.window_documents.tolist(), run.window_labels.tolist(), run.labels) == ([0, 0, 1], [0, 0, 1], LABELS)
        assert (run.method, set(run.classes)) == ("conversation", {0})
        assert run.window_contexts.tolist() == [turn["first"] for each in sequences for turn in each["turns"]]
        # The template gives a conversation without a system message one of its own.
        system = ("You answer in one sentence.", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
        rendered = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
        assert run.prompts[0] == rendered(system[0], "Where does the Danube end?")
        assert run.prompts[2] == rendered(system[1], "Which bird cannot fly?")
        assert re.fullmatch(r"\s*<\|im_start\|>user\nAnd the Rhine .* asked\?<\|im_end\|>\n.*\n", run.prompts[1])
