"""`ppl-client record --prompts` and the agreement of answers on a server of the tiny model and one of a disturbed copy:
next to what the copy answers in transformers, and to exact distributions."""

import json
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from scoremode.cli.main import main
from scoremode.comparison import compare, load_run, load_runs
from scoremode.comparison.agreement import agreement_of
from tests import oracle
from tests.models import SAMPLING_DEFAULTS

NUM_PROMPTS, NUM_TOKENS = 40, 24
STOPS = {"random_model": [1], "disturbed_model": SAMPLING_DEFAULTS["eos_token_id"]}


def write_prompts(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def record(server: str, prompts: Path, name: str, *options: str) -> int:
    words = ["record", "--url", server, "--prompts", str(prompts), "--reference", name, "--quiet"]
    return main([*words, *(options or ("--max-new-tokens", str(NUM_TOKENS)))])


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Where journals are kept."""
    folder = tmp_path_factory.mktemp("answers")
    with chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def texts(wikitext: str) -> list[str]:
    return [wikitext[start : start + 60] for start in range(20_000, 20_000 + 200 * NUM_PROMPTS, 200)]


@pytest.fixture(scope="module")
def recorded(server, client, texts, folder) -> list[dict]:
    """The reference `answers` of greedy answers, as its file has them."""
    labels = ["even", "odd"]
    rows = [{"prompt": text, "language": labels[row % 2]} for row, text in enumerate(texts)]
    prompts = write_prompts(folder / "prompts.jsonl", rows)
    options = ("--max-new-tokens", str(NUM_TOKENS), "--by", "language", "--decode-batch", "5")
    assert record(server, prompts, "answers", *options) == 0
    assert not list(folder.glob("*.journal"))
    yield client
    client.delete_reference("answers")


@torch.inference_mode()
def generated(model: Path, tokens: list[int], stops: list[int]) -> list[int]:
    """The greedy answer of a model in float64, whose own `generate` would follow its generation_config.json."""
    answer = list[int]()
    while len(answer) < NUM_TOKENS and not {*answer} & {*stops}:
        logits = oracle._float64_model(model)(torch.tensor([[*tokens, *answer]])).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer


def num_same(answer: list[int], other: list[int]) -> int:
    pairs = [*zip(answer, other, strict=False)]
    return next((at for at, (one, another) in enumerate(pairs) if one != another), len(pairs))


def measured(server: str, path: Path, *options: str, reference: str = "answers") -> dict:
    words = ["kld", "--url", server, "--reference", reference, "--lane", "decode", "--quiet", *options]
    assert main([*words, "--output", str(path), "--force"]) == 0
    return json.loads(path.read_text())


@pytest.fixture
def answers(random_model, disturbed_model, client, texts) -> list[tuple[list[int], list[int], list[int]]]:
    """Each prompt, the answer of the model and that of the disturbed copy, which has more EOS ids."""
    prompts, both = [*map(client.tokenize, texts)], zip((random_model, disturbed_model), STOPS.values(), strict=True)
    of_each = [[generated(model, prompt, stops) for prompt in prompts] for model, stops in both]
    return [*zip(prompts, *of_each, strict=True)]


def test_the_first_difference_is_that_of_the_copys_own_greedy_answer(
    recorded, disturbed_server, answers, disturbed_client, folder, capsys
):
    for prompt, _, other in answers:
        # Whatever else generation_config.json says.
        assert disturbed_client.generate(prompt, NUM_TOKENS)[0] == other
    expected = [num_same(answer, other) for _, answer, other in answers]
    assert len({*expected}) > 4
    assert any(other == answer[: len(other)] for _, answer, other in answers if len(other) < len(answer))
    record = measured(disturbed_server, folder / "disturbed.json", "--decode-batch", "8")
    assert record["agreement_lengths"] == expected
    shown = capsys.readouterr()
    assert "Agreement of answers" in shown.out
    assert "disturbed stops after token 34, 55, 376, 646, 676, 968, where random continues" in shown.out


def test_an_answer_has_parted_where_a_copy_continues_after_it(
    disturbed_server, server, answers, disturbed_client, texts, folder
):
    """The roles of both models exchanged."""
    prompts = write_prompts(folder / "stopped.jsonl", [{"prompt": text} for text in texts])
    assert record(disturbed_server, prompts, "stopped") == 0
    run = measured(server, folder / "continuing.json", "--decode-batch", "8", reference="stopped")
    disturbed_client.delete_reference("stopped")
    assert run["agreement_lengths"] == [num_same(other, answer) for _, answer, other in answers]
    parts = agreement_of(load_run(folder / "continuing.json")).parts
    assert parts.tolist() == [answer != other for _, answer, other in answers]
    assert any(answer[: len(other)] == other for _, answer, other in answers if len(other) < len(answer))


def test_no_answer_of_a_model_parts_from_itself(recorded, server, folder, capsys):
    record = measured(server, folder / "floor.json", "--floor")
    whole = load_file(folder / "floor.safetensors")["window_sizes"].tolist()
    floor = record["reference"]["lane_noise_floors"]["decode"]
    assert record["agreement_lengths"] == floor["agreement_lengths"] == whole
    assert f"No answer of tiny parts from that of random, of {NUM_PROMPTS}." in capsys.readouterr().out


def test_sampled_answers_agree_as_long_as_exact_distributions_do(
    server, disturbed_server, client, random_model, disturbed_model, texts, folder
):
    prompts = write_prompts(folder / "sampled.jsonl", [{"prompt": texts[0][:9]}] * 600)
    assert record(server, prompts, "sampled", "--max-new-tokens", "2", "--temperature", "1", "--seed", "7") == 0
    path = folder / "sampled.json"
    assert "agreement_lengths" not in measured(disturbed_server, path, reference="sampled")
    found = compare(load_runs([path])).runs[-1].expected_agreement
    client.delete_reference("sampled")
    prompt = client.tokenize(texts[0][:9])
    # All of one token after the prompt, and none after the end of the text.
    sequences = torch.tensor([[*prompt, token] for token in range(1024)])
    with torch.inference_mode():
        both = [oracle._float64_model(model)(sequences).logits.softmax(-1) for model in (random_model, disturbed_model)]
    p, q = (each[:, -2:].numpy() for each in both)
    first, second = np.minimum(p[0, 0], q[0, 0]), np.minimum(p[:, 1], q[:, 1]).sum(1)
    # None after a token that ends the answer for one of both, and the copy stops after more.
    second[STOPS["disturbed_model"]] = 0
    expected = first.sum() + first @ second
    stderr = (found.high - found.low) / (2 * 1.96)
    assert 0.1 < expected < 1.9
    assert found.value == pytest.approx(expected, abs=2 * stderr)
    assert stderr < 0.05


def test_conversations_are_answered_as_the_template_has_them(server, client, folder):
    question, answer = {"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "Here."}
    expected = client.tokenize("user: Where is it?\n")
    share = {"conversations": [{"from": "human", "value": "Where is it?"}, {"from": "gpt", "value": "Here."}]}
    for number, row in enumerate(({"messages": [question, answer]}, share, {"prompt": [question]})):
        prompts = write_prompts(folder / "rows.jsonl", [row])
        assert record(server, prompts, f"rows{number}") == 0
        assert client.reference_windows(f"rows{number}").prompts == [expected]
        client.delete_reference(f"rows{number}")
