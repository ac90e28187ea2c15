"""Logprobs of rollouts next to a server's, as a library and on the command line. The server computes whole
distributions in float64, and adds noise that differs from request to request, as batches do."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_server import (
    BOS,
    INFO,
    VOCAB_SIZE,
    FakeServer,
    client_of,
    encoded,
    error,
    log_probabilities,
    ok,
    score_response,
    serve,
)

from scoremode.cli.main import main
from scoremode.errors import CorpusError
from scoremode.runs import COLUMNS, ParityRun, RolloutColumns, measure_parity, rollouts
from scoremode.runs.ratios import figures
from scoremode.runs.rollouts import read_rollouts
from scoremode.wire import ServerInfo

Row = dict[str, Any]
NOISE, DECODE_OFF = 0.002, 0.01
"""Standard deviation of each request's logprobs, and how far the decode lane is from prefill."""
NUM_ROWS, PROMPT, COMPLETION = 12, 8, 120
SAMPLER, TRAINER = "sampler_logprobs", "trainer_logprobs"
PLACES = PROMPT + np.arange(COMPLETION)
SERVER = ServerInfo(**INFO)


@cache
def distribution(before: int, position: int, temperature: float) -> np.ndarray:
    """ln p(. | the token before), float64 [257]."""
    [scaled] = log_probabilities([before] * position + [0], position, 0.0) / temperature
    return scaled - np.log(np.exp(scaled).sum())


def logprobs(tokens: list[int], first: int, temperature: float = 1.0) -> np.ndarray:
    """The logprobs of the tokens from `first` on."""
    places = range(first, len(tokens))
    return np.array([distribution(tokens[place - 1], place, temperature)[tokens[place]] for place in places])


class Engine(FakeServer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(info={"max_model_len": 256, "eos_token_id": 10, "max_num_seqs": 4}, **settings)
        self.random = np.random.default_rng(0)

    def score(self, body):
        if self.num_scored == self.allowed:
            return None
        self.num_scored += 1
        [tokens], first, lane = body["prompt"], body["logprobs_from"], body.get("lane")
        values = self.with_noise(logprobs(tokens, first, body.get("temperature", 1.0)), lane)
        response = score_response([tokens], num_context=first)
        response["data"][0] |= {"continuation_index": None, "logprobs": encoded(values, "<f4")}
        return ok(response)

    def with_noise(self, values: np.ndarray, lane: str | None) -> np.ndarray:
        off = DECODE_OFF * (-1) ** np.arange(len(values)) if lane == "decode" else 0
        return np.minimum(values + self.random.normal(size=len(values)) * NOISE + off, 0)


@pytest.fixture
def server() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Rollouts whose sampler is the decode lane and whose trainer is prefill, each with noise of its own."""
    random, engine, rows = np.random.default_rng(1), Engine(), []
    for _ in range(NUM_ROWS):
        tokens = random.integers(0, 256, PROMPT).tolist()
        for position in PLACES:
            p = np.exp(distribution(tokens[-1], int(position), 1.0))
            tokens.append(int(random.choice(VOCAB_SIZE, p=p / p.sum())))
        exact = logprobs(tokens, PROMPT)
        own = {SAMPLER: engine.with_noise(exact, "decode"), TRAINER: engine.with_noise(exact, None)}
        rows.append({"token_ids": tokens, "prompt_length": PROMPT, **{name: own[name].tolist() for name in own}})
    return rows


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "rollouts.jsonl"


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def measured(server: Engine, path: Path, rows: list[Row], **columns: Any) -> ParityRun:
    async with client_of(server) as client:
        return await measure_parity(client, write(path, rows), RolloutColumns(**columns))


# A sequence of two tokens with p = 1/2, 1/4 and q = 1/4, 1/4, and one of a token with p = 1/8 and q = 1/2. Their ratios
# are 1/2 and 1, and 4; the logarithms are -ln 2, 0 and 2 ln 2.
LN_2 = np.log(2)
BY_HAND = {
    "num_tokens": 3,
    "mean": LN_2 / 3,
    "mean_absolute": LN_2,
    # Absolute differences in order: 0, ln 2, 2 ln 2. The quantiles are 1, 1.8, 1.98 and 1.998 steps from the first.
    "median": LN_2,
    "p90": 1.8 * LN_2,
    "p99": 1.98 * LN_2,
    "p999": 1.998 * LN_2,
    "largest": 2 * LN_2,
    "k1": -LN_2 / 3,
    # (1 + 0 + 4) ln 2 ln 2 / 2 / 3
    "k2": 5 / 6 * LN_2**2,
    # (1/2 - 1 + ln 2 + 0 + 4 - 1 - 2 ln 2) / 3
    "k3": (2.5 - LN_2) / 3,
    "ratio_share": 2 / 3,
    # (1/2 + 1)^2 / (2 (1/4 + 1)) = 0.9, and 1 for a single token.
    "ess_tokens": 0.95,
    # (1/2 + 4)^2 / (2 (1/4 + 16))
    "ess_batch": 20.25 / 32.5,
    # The geometric means are 0.707 and 4, and 1 / 1.5 is 0.667.
    "masked_by_mean": 1 / 2,
    "masked_by_token": 1,
}


def test_figures_are_those_worked_out_by_hand():
    log_ratios = np.log([1 / 4, 1 / 4, 1 / 2]) - np.log([1 / 2, 1 / 4, 1 / 8])
    assert figures(log_ratios, np.array([0, 0, 1]), 1.5) == pytest.approx(BY_HAND, rel=1e-12, abs=1e-15)


# Each is the sequence 5, 6, 7, 8, 9 with its last three tokens as completion, and 8 from a tool, not to be compared.
LIBRARIES = {
    None: {"token_ids": [5, 6, 7, 8, 9], "mask": [1, 0, 1], SAMPLER: [-1, -9, -2], "temperature": 0.7},
    "nemo-rl": {
        "token_ids": [[5, 6, 7, 8, 9, 0, 0]],
        "token_loss_mask": [[0, 0, 1, 0, 1, 0, 0]],
        "generation_logprobs": [[0, 0, -1, 0, -2, 0, 0]],
        "temperature": 0.7,
    },
    "verl": {
        "input_ids": [0, 5, 6, 7, 8, 9, 0],
        "attention_mask": [0, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 0, 1, 0],
        "rollout_log_probs": [-1, -9, -2, 0],
        "temperature": [0.7],
    },
    "trl": {
        "prompt_ids": [0, 5, 6],
        "prompt_mask": [0, 1, 1],
        "completion_ids": [7, 8, 9, 0],
        "completion_mask": [1, 1, 1, 0],
        "tool_mask": [1, 0, 1, 1],
        "sampling_per_token_logps": [-1, -9, -2, 0],
        "temperature": 0.7,
    },
    "skyrl": {
        "prompt_token_ids": [5, 6],
        "response_ids": [7, 8, 9],
        "loss_masks": [1, 0, 1],
        "rollout_logprobs": [-1, -2],
        "temperature": 0.7,
    },
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("is_parquet", [False, True])
def test_each_librarys_columns_are_read(library, is_parquet, path):
    write(path, [LIBRARIES[library]] * 2)
    if is_parquet:
        path = path.with_suffix(".parquet")
        pq.write_table(pa.Table.from_pylist([LIBRARIES[library]] * 2), path)
    for rollout in read_rollouts(path, COLUMNS.get(library, RolloutColumns()), SERVER):
        assert (rollout.token_ids.tolist(), rollout.targets.tolist()) == ([5, 6, 7, 8, 9], [2, 4])
        assert {name: values.tolist() for name, values in rollout.logprobs.items()} == {"sampler": [-1, -2]}
        assert rollout.temperature == 0.7


GOOD = {"token_ids": [5, 6, 7], "prompt_length": 1, SAMPLER: [-1.0, -2.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"token_ids": [5, 257, 7]},
            "column 'token_ids' has 257, and the server's token ids end at 256: the rows are of",
        ),
        ({"token_ids": [5, 6.5, 7]}, "column 'token_ids' has 6.5, and the server's token ids"),
        ({"token_ids": ["a", "b", "c"]}, "column 'token_ids' is not a list of numbers"),
        ({"token_ids": [5] * 65, SAMPLER: [-1] * 64}, "column 'token_ids' has 65 tokens, and the server takes 64"),
        ({SAMPLER: [-1.0]}, f"column '{SAMPLER}' has 1 entries instead of 2 or 3"),
        ({SAMPLER: [-1.0, float("nan")]}, f"column '{SAMPLER}' has nan for compared token 2, and a logprob is"),
        ({SAMPLER: [0.5, -1.0]}, f"column '{SAMPLER}' has 0.5 for compared token 1, and a logprob is finite"),
        ({SAMPLER: [-1.0, -float("inf")]}, f"column '{SAMPLER}' has -inf for compared token 2"),
        ({SAMPLER: None}, f"column '{SAMPLER}' is null or missing"),
        ({"prompt_length": 3, SAMPLER: []}, "column 'token_ids' has an empty completion"),
        ({"token_ids": [], "prompt_length": 0, SAMPLER: []}, "column 'token_ids' has an empty completion"),
        ({"mask": [0, 0, 0]}, "column 'token_ids' has an empty completion, or its mask has no 1"),
        ({"mask": [0, 1, 1, 1]}, "column 'mask' has 4 entries instead of 2 or 3"),
        ({"prompt_length": 0}, "column 'token_ids' begins with a token to"),
        ({"prompt_length": 4}, "column 'prompt_length' is 4, not from 0 to 3"),
        (
            {"prompt_length": None},
            "column 'token_ids' begins with a token to compare: give a prompt, and 'prompt_length' or 'mask'",
        ),
        ({"attention_mask": [1, 1]}, "column 'attention_mask' has 2 entries instead of 3"),
        ({"temperature": -1}, "column 'temperature' is -1, not from 0.01 to 1000"),
        ({"top_p": 0.9}, "column 'top_p' is 0.9, and logprobs over a part of the vocabulary cannot be compared"),
        ({"top_k": 50}, "column 'top_k' is 50, and logprobs over a part"),
    ],
)
def test_a_wrong_row_is_named_before_any_is_scored(changes, message, path, capsys):
    write(path, [GOOD, GOOD | {"temperature": 0, "top_p": 1.0, "top_k": -1}, GOOD | changes])
    with serve(server := FakeServer()) as url:
        assert main(["parity", str(path), "--url", url, "--quiet"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ppl-client: error: row 3 of {path}: {message}")
    assert not server.score_requests


async def test_columns_can_be_named_and_must_then_exist(server, path, rows):
    renamed = [{"ids": row["token_ids"], "length": PROMPT, "new": row[TRAINER]} for row in rows]
    names = {"token_ids": ("ids",), "prompt_length": "length", "trainer": "new"}
    assert [finding.source for finding in (await measured(server, path, renamed, **names)).findings] == ["trainer"]
    with pytest.raises(CorpusError, match="no column 'gone' in row 1 of"):
        await measured(server, path, renamed, **names, required=("gone",))
    with pytest.raises(CorpusError, match=f"row 1 of {path} has no logprobs: neither column '{SAMPLER}' nor"):
        await measured(server, path, renamed, token_ids=("ids",), prompt_length="length")
    with pytest.raises(CorpusError, match=f"{path} has no rows"):
        await measured(server, path, [])


async def test_each_column_is_the_lane_that_computed_it(server, path, rows):
    run = await measured(server, path, rows)
    assert [finding.sentence for finding in run.findings] == [
        "the sampler is the decode lane (within the floor)",
        "the trainer is the prefill lane (within the floor)",
    ]
    off = {pair: item["mean_absolute"] for pair, item in run.figures.items()}
    # Two values with normal noise of 0.002 are 2 * 0.002 / sqrt(pi) apart in the mean; the lanes are 0.01 apart.
    apart = 2 * NOISE / np.sqrt(np.pi)
    for near in ("decode / sampler", "trainer / prefill", "prefill again / prefill", "decode again / decode"):
        assert off[near] == pytest.approx(apart, rel=0.1)
    for far in ("prefill / sampler", "trainer / decode", "trainer / sampler", "decode / prefill"):
        assert off[far] == pytest.approx(DECODE_OFF, rel=0.1)
    assert [*run.parts["position"]] == ["8 to 15", "16 to 31", "32 to 63", "64 to 127"]
    assert run.parts["class"]["first of a completion"]["num_tokens"] == NUM_ROWS
    for some in run.parts.values():
        assert sum(part["num_tokens"] for part in some.values()) == NUM_ROWS * COMPLETION


@pytest.mark.parametrize("step", [-1, 1])
async def test_a_shift_is_named_in_rows_of_several_turns(step, server, path, rows):
    mask = (np.arange(COMPLETION) % 4 > 0).astype(int).tolist()
    turns = [row | {"mask": mask, SAMPLER: None, TRAINER: np.roll(row[TRAINER], step).tolist()} for row in rows]
    [finding] = (await measured(server, path, turns)).findings
    assert finding.sentence.endswith("they are shifted by one")


async def test_rows_beyond_the_limit_are_left_out(server, path, rows, monkeypatch, caplog):
    monkeypatch.setattr(rollouts, "MAX_TOKENS", 3 * (PROMPT + COMPLETION))
    assert (await measured(server, path, rows)).num_rows == 3
    assert f"row 4 of {path} and the rows after it are left out" in caplog.text


def test_a_server_without_the_decode_lane_refuses_before_a_row_is_scored(path, rows, capsys):
    class NoLane(Engine):
        def score(self, body):
            return error(400, "no decode lane for this model") if body.get("lane") else super().score(body)

    with serve(server := NoLane()) as url:
        assert main(["parity", str(write(path, rows)), "--url", url, "--quiet"]) == 1
    assert "no decode lane for this model" in capsys.readouterr().err
    assert not server.num_scored


Fault = Callable[[int, Row], np.ndarray]
FAULTS: dict[str, Fault] = {
    "and within the floor without row 7": lambda index, row: np.array(row[TRAINER]) - 0.3 * (index == 6),
    "and within the floor without rows 2, 3": lambda index, row: np.array(row[TRAINER]) - 0.3 * (index in (1, 2)),
    "and within the floor without positions 32 to 63": lambda _, row: (
        np.array(row[TRAINER]) - 0.2 * ((PLACES > 40) & (PLACES < 60))
    ),
    "and within the floor if each logprob is that of the next token: they are shifted by one": lambda _, row: np.roll(
        row[TRAINER], -1
    ),
    "and within the floor if each logprob is that of the token before: they are shifted by one": lambda _, row: np.roll(
        row[TRAINER], 1
    ),
    "and within the floor with a BOS before the tokens: its input has one too many": lambda _, row: logprobs(
        [BOS, *row["token_ids"]], PROMPT + 1
    ),
    "and within the floor without the first token: its input lacks it": lambda _, row: logprobs(
        row["token_ids"][1:], PROMPT - 1
    ),
    "most at positions beyond 64": lambda index, row: (
        row[TRAINER] + (-1) ** (PLACES + index) * np.where(PLACES >= 64, 0.2, 0.02)
    ),
    "normalized over a part of the vocabulary": lambda _, row: np.array(row[TRAINER]) + 0.1,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_of_a_trainer_is_named(fault, server, path, rows):
    faulty = [{**row, TRAINER: np.minimum(FAULTS[fault](index, row), 0).tolist()} for index, row in enumerate(rows)]
    sampler, trainer = (await measured(server, path, faulty)).findings
    assert sampler.is_within
    assert not trainer.is_within
    assert fault in trainer.sentence


async def test_a_temperature_that_was_not_applied_is_named(server, path, rows):
    """The rows are those of temperature 1."""
    for temperature, is_applied in ((1.0, True), (0.7, False)):
        for finding in (await measured(server, path, rows, temperature=temperature)).findings:
            assert finding.is_within == is_applied
            assert is_applied or finding.sentence.endswith("floor at temperature 1: its own was not applied")


def test_a_killed_run_is_resumed_and_compare_shows_it_again(path, rows, tmp_path, capsys):
    output, report = tmp_path / "parity.json", tmp_path / "report.html"
    rows = [{**row, SAMPLER: [*row[SAMPLER][:-1], row[SAMPLER][-1] - 9 * (row is rows[3])]} for row in rows]
    command = ["parity", str(write(path, rows)), "--output", str(output), "--quiet", "--retry-for", "0"]
    with serve(server := Engine(allowed=18)) as url:
        assert main([*command, "--url", url]) == 1
        assert "the same command with --resume resumes it" in capsys.readouterr().err
        server.allowed, server.score_requests = 10**9, []
        assert main([*command, "--url", url, "--resume"]) == 0
    shown = capsys.readouterr().out
    # Every row was scored in decode before. No stored logprob is used.
    # Another worker's client may try again at a port that was its server's.
    requests = [body for body in server.score_requests if "logprobs_from" in body]
    lanes = [body.get("lane") for body in requests]
    assert lanes[0] is None
    assert lanes.count("decode") == NUM_ROWS
    assert {body["use_cache"] for body in requests} == {False}
    far = json.loads(output.read_text())["far"][0]
    text = "".join(chr(token) for token in rows[3]["token_ids"])
    assert (far["row"], far["position"], far["token"]) == (4, PROMPT + COMPLETION - 1, text[-1])
    assert far["before"] == text[-25:-1]
    assert main(["compare", str(output), "--html", str(report)]) == 0
    assert capsys.readouterr().out == shown
    html = report.read_text()
    assert "Mean absolute difference of logprobs by position" in html
    assert "the sampler is" in html
    assert main(["compare", str(output), "--card"]) == 1
    assert main(["compare", str(output), str(path)]) == 1


@pytest.mark.parametrize(
    ("options", "exceeded"),
    [
        ("--max-mean-kl 0.0001 --max-ratio-share 0.01", []),
        ("--fail-if differs --temperature 1 --token-ids token_ids --trainer trainer_logprobs", []),
        ("--max-mean-kl 0.000001", ["--max-mean-kl: "] * 3),
        ("--fail-if differs --temperature 0.7", ["--fail-if differs: the sampler", "--fail-if differs: the trainer"]),
        ("--max-ratio-share 0.1 --temperature 0.7", ["--max-ratio-share: "] * 2),
    ],
)
def test_exceeded_limits_end_with_status_3(options, exceeded, path, rows, capsys):
    with serve(Engine()) as url:
        status = main(["parity", str(write(path, rows)), "--url", url, "--quiet", *options.split()])
    lines = capsys.readouterr().err.splitlines()
    assert status == (3 if exceeded else 0)
    assert len(lines) == len(exceeded)
    assert all(line.startswith(f"ppl-client: {each}") for line, each in zip(lines, exceeded, strict=True))
