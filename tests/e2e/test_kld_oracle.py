"""KL divergence on real servers against transformers: float64 over the full logits of a model and of a disturbed copy.
And one model measured in every way, none of which may show it to be better than itself."""

import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from scoremode import KldPositions, KldResult, ScoreClient, cut_windows
from scoremode.cli.main import main
from scoremode.comparison import compare, load_run, load_runs, summary
from tests import oracle

CONTEXT, STRIDE = 128, 64


@pytest.fixture(scope="module")
def text(wikitext: str) -> str:
    return wikitext[:1000]


@pytest.fixture(scope="module")
def sequences(client: ScoreClient, text: str) -> list[tuple[list[int], int]]:
    """The tokens of each window, and its first target."""
    tokens = client.tokenize(text)
    windows = cut_windows(len(tokens), "sliding", CONTEXT, STRIDE)
    return [(window.token_ids(tokens), window.first_scored) for window in windows]


@pytest.fixture(scope="module")
def reference(client: ScoreClient, text: str) -> Iterator[str]:
    """The tiny model."""
    client.record_reference("base", text, context_length=CONTEXT, stride=STRIDE)
    yield "base"
    client.delete_reference("base")


def positions_of(result: KldResult) -> KldPositions:
    return KldPositions.concatenate([window.positions for window in result.data])


def test_a_reference_has_the_perplexity_of_its_model(client, reference, text):
    recorded = client.reference(reference)
    expected = client.perplexity(text, context_length=CONTEXT, stride=STRIDE)
    assert recorded.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
    assert (recorded.num_scored, recorded.num_windows) == (expected.num_scored, expected.num_windows)
    assert (recorded.num_bytes, recorded.num_words) == (expected.num_bytes, expected.num_words)
    assert recorded.fingerprint == client.info().fingerprint
    # Hidden states of 128 float32, a head of 1,024 rows, and little else.
    assert 1 <= recorded.disk_bytes / (128 * 4 * (recorded.num_scored + 1024)) < 1.02


def test_entropies_of_both_models(disturbed_server, reference, random_model, disturbed_model, sequences):
    """The cross-entropy is the sum of the divergence and the reference's entropy."""
    with ScoreClient(disturbed_server, timeout=300) as client:
        result = client.kld(reference, statistics=["entropy", "std_logprob"], top_logprobs=2)
    assert len(result.data) == len(sequences)
    for window, (tokens, first) in zip(result.data, sequences, strict=True):
        log_p, log_q = (
            oracle.logits(model, tokens).log_softmax(-1)[first - 1 :].numpy()
            for model in (random_model, disturbed_model)
        )
        for prefix, logprobs in (("reference_", log_p), ("", log_q)):
            entropy = -(np.exp(logprobs) * logprobs).sum(1)
            deviation = np.sqrt((np.exp(logprobs) * (logprobs + entropy[:, None]) ** 2).sum(1))
            np.testing.assert_allclose(window.columns[f"{prefix}entropy"], entropy, rtol=1e-4)
            np.testing.assert_allclose(window.columns[f"{prefix}std_logprob"], deviation, rtol=1e-4, atol=1e-5)
        cross_entropy = window.positions.kld + window.columns["reference_entropy"]
        np.testing.assert_allclose(cross_entropy, -(np.exp(log_p) * log_q).sum(1), rtol=1e-4)


def test_both_lanes_of_a_run_agree(server, reference, text, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(text)
    windows = ["--text-file", str(tmp_path / "text.txt"), "--context-length", str(CONTEXT), "--stride", str(STRIDE)]
    lanes = ["--url", server, "--lane", "both", "--decode-batch", "2", "--quiet"]
    for command in (windows, ["kld", "--reference", reference]):
        assert main([*command, *lanes, "--output", str(tmp_path / "run.json")]) == 0
        assert "decode agrees with prefill" in capsys.readouterr().out
        prefill, decode = runs = load_runs([tmp_path / f"run-{lane}.json" for lane in ("prefill", "decode")])
        assert (prefill.lane, decode.lane, decode.label) == ("prefill", "decode", f"{prefill.label} (decode)")
        assert any(f"{decode.label} and {prefill.label} by" in sentence for sentence in summary(compare(runs)))
        assert json.loads(decode.path.read_text())["settings"]["concurrency"] == 2
        for each in tmp_path.glob("run-*"):
            each.unlink()


def test_a_model_does_not_diverge_from_itself(client, reference):
    result = client.kld(reference)
    positions = positions_of(result)
    assert max(positions.kld.max(), positions.reverse_kld.max()) < 1e-6
    assert positions.acceptance.min() > 1 - 1e-4
    assert result.statistics["same_top_p"] == 1


@pytest.mark.parametrize("options", [{}, {"lane": "decode"}, {"lane": "decode", "context": 3}], ids=str)
def test_a_disturbed_copy_diverges_as_transformers_says(
    disturbed_client, random_model, disturbed_model, reference, sequences, options
):
    compared = disturbed_client.kld(reference, **options)
    found = positions_of(compared)
    assert found.kld.mean() > 0.01
    expected = oracle.divergences(random_model, disturbed_model, [tokens for tokens, _ in sequences])
    for name in oracle.Divergence._fields:
        ours = getattr(found, name)
        parts = [getattr(each, name)[first - 1 :] for each, (_, first) in zip(expected, sequences, strict=True)]
        theirs = np.concatenate(parts)
        assert ours.shape == theirs.shape
        if name.endswith("token_ids"):
            # Two tokens of nearly equal likelihood may change places.
            assert np.mean(ours == theirs) > 0.99
        else:
            oracle.assert_close(ours, theirs)
    alone = positions_of(disturbed_client.kld(reference, windows=(1, 2), **options))
    start = compared.data[0].num_scored
    oracle.assert_close(alone.kld, found.kld[start : start + STRIDE])


def test_llama_cpp_gets_the_references_distributions_from_any_models_server(
    client, disturbed_server, random_model, text, tmp_path
):
    """The file as llama-perplexity reads it: header, the text's tokens, and rows for the second half of each window."""
    length, path = 64, tmp_path / "base.kld"
    client.record_reference("chunks", text, method="llama.cpp", context_length=length)
    server = ("--url", disturbed_server, "--quiet")
    assert main(["export", *server, "--reference", "chunks", "--llama-cpp", str(path)]) == 0
    tokens = np.array(client.tokenize(text), np.int32)
    content, num_windows = path.read_bytes(), len(tokens) // length
    vocab_size = client.info().vocab_size
    tokens = tokens[: num_windows * length]
    header = b"_logits_" + np.array([length, vocab_size, num_windows], np.int32).tobytes() + tokens.tobytes()
    assert content.startswith(header)
    rows = np.frombuffer(content, np.uint16, offset=len(header)).reshape(num_windows, length // 2 - 1, -1)
    beginnings = np.ascontiguousarray(rows[..., :4]).view(np.float32)
    found = beginnings[..., 1:] + beginnings[..., :1] * rows[..., 4 : 4 + vocab_size]
    for window, of_window in zip(tokens.reshape(num_windows, -1), found, strict=True):
        expected = oracle.logits(random_model, window.tolist()).log_softmax(-1).numpy()[length // 2 :]
        # None is less than 16 nats below the top one.
        expected = np.maximum(expected, expected.max(-1, keepdims=True) - 16)
        assert np.abs(of_window - expected).max() <= 16 / 65535 / 2 + oracle.PER_TOKEN
    part = httpx.get(f"{disturbed_server}/v1/references/chunks/llama.cpp", params={"first": 1})
    assert part.content == content[len(header) + rows[0].nbytes :]
    client.delete_reference("chunks")


def test_what_llama_cpp_could_not_read_is_not_exported(server, reference):
    for path, status, param in (
        (f"{reference}/llama.cpp", 400, "name"),
        ("unknown/llama.cpp", 404, "reference"),
        (f"{reference}/llama.cpp?first=-1", 400, "name"),
    ):
        refused = httpx.get(f"{server}/v1/references/{path}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


def test_no_way_is_shown_to_be_better_than_another(smollm2_server, smollm2_client, wikitext, tmp_path):
    """When sums were in float32, `/v1/score` was worse than `/v1/kld` by 8e-6 nats per token, and the comparison showed
    it."""
    server = ("--url", smollm2_server, "--quiet")
    cut = ("--method", "disjoint", "--context-length", "96")
    for number in range(3):
        # Each text has some two hundred tokens.
        text = tmp_path / f"{number}.txt"
        text.write_text(wikitext[40_000 + 800 * number :][:800])
        given = ("--text-file", str(text), *cut)
        ways = {
            "score": (*server, *given),
            "from the cache, one at a time": (*server, *given, "--concurrency", "1"),
            "kld": ("kld", *server, "--reference", "itself"),
        }
        assert main(["record", *server, *given, "--reference", "itself"]) == 0
        for way, arguments in ways.items():
            assert main([*arguments, "--output", str(tmp_path / f"{text.stem}-{way}.json")]) == 0
        smollm2_client.delete_reference("itself")
        pairs = compare([load_run(tmp_path / f"{text.stem}-{way}.json", way) for way in ways]).pairs
        # So short a text has no interval, in which an earlier build saw a difference.
        assert {pair.verdict for pair in pairs} == {"no interval"}
        # A step of float32 at 20 nats is 2e-6, and batches differ.
        assert max(abs(pair.ln_ppl_ratio.value) for pair in pairs) < 1e-6
