"""Tables of a comparison: the figures that they are made of, in forms for people and for programs."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest
from run_files import kld_run, made_up_kld, made_up_nlls, made_up_reference, perplexity_run

from scoremode.comparison import as_csv, as_text, card, compare, summary, verdict_line
from scoremode.comparison.summary import computed_differently, in_words
from scoremode.wire import ComputedBy, NoiseFloor
from scoremode.wire.protocol import SATURATION

SIZE = {"weight_bytes": 1_500_000_000, "num_parameters": 3_000_000_000, "quantization": "awq"}
A100 = ComputedBy(
    implementation="vllm",
    device="NVIDIA A100",
    num_devices=1,
    model_runner="v2",
    kernels=["Linear: gemm"],
    attention_backends=["FLASH_ATTN 2"],
)
H200 = ComputedBy(
    implementation="transformers", device="NVIDIA H200", num_devices=8, model_runner="v2", kernels=["Linear: gemm"],
    attention_backends=["FLASH_ATTN 3"],
)  # fmt: skip
NOT_ALIKE = "Not all was computed alike"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A base without a reference, a run that is not worse, and a worse one whose server told its size."""
    folder = tmp_path_factory.mktemp("runs")
    kld = np.random.default_rng(1).exponential(0.01, 3000)
    reference = made_up_reference(noise_floor=0.02)
    base = perplexity_run(folder, "base", made_up_nlls(1))
    int8 = kld_run(folder, "int8", made_up_nlls(2), kld, reference=reference)
    int4 = kld_run(folder, "int4", made_up_nlls(3, shift=0.1), 20 * kld, reference=reference, server=SIZE)
    return compare([base, int8, int4], num_resamples=500)


def interval(figure):
    return f"{figure.value:.4f} ± {figure.stderr:.4f} [{figure.low:.4f}, {figure.high:.4f}]"


def test_text_has_settings_runs_and_pairs_in_120_columns(comparison):
    text = as_text(comparison)
    lines = text.splitlines()
    assert lines[0] == "3,000 scored tokens of text, sha256 e4fcc6171e2a."
    assert lines[4] == f"Seed 0: {comparison.blocks}, 500 resamples."
    assert max(len(line) for line in lines if not line.endswith(".")) <= 120
    int4 = comparison.runs[2]
    assert f"{interval(int4.perplexity)}  {interval(comparison.pairs[1].ppl_ratio)}" in text
    tail = [f"{int4.kld_median:.6f}", *(f"{value:.4f}" for value in np.percentile(int4.run.kld, [95, 99, 99.9, 100]))]
    assert ["int4", *tail, f"{100 * np.sqrt((int4.run.delta_p**2).mean()):.3f}"] in [row.split()[:7] for row in lines]
    assert f"{100 * int4.same_top_p.value:.3f} ± {100 * int4.same_top_p.stderr:.3f} [" in text, "a percentage"
    rows = [line.split() for line in lines]
    assert ["base", "not", "quantized,", "float32", "-", "-"] in [row[:6] for row in rows]
    assert ["int4", "awq,", "float32", "1.397", "4.00"] in [row[:5] for row in rows]
    assert [row[-1] for row in rows if row[:2] == ["int4", "base"]] == ["worse", "-"]


def test_csv_has_every_figure_in_full(comparison):
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    found = {(row["run"], row["base"], row["figure"]): row for row in rows}
    assert len(found) == len(rows)
    int4, pair = comparison.runs[2], comparison.pairs[1]
    for key, figure, verdict in (
        (("int4", "", "perplexity"), int4.perplexity, ""),
        (("int4", "base", "ppl_ratio"), pair.ppl_ratio, "worse"),
        (("int4", "int8", "kld_difference"), comparison.pairs[2].kld_difference, "worse"),
    ):
        row = found[key]
        values = [float(row[name]) for name in ("value", "stderr", "low", "high")]
        assert values == [figure.value, figure.stderr, figure.low, figure.high]
        assert (row["quantization"], row["path"], row["verdict"]) == ("awq", "int4.json", verdict)
    assert ("base", "", "kld") not in found


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(1)", "'=1", "a=1", "1-1"])
def test_a_name_in_csv_is_no_formula(tmp_path, name):
    nlls = made_up_nlls(1)
    runs = [perplexity_run(tmp_path, label, each) for label, each in (("base", nlls + 0.1), ("run", nlls))]
    comparison = compare([runs[0], replace(runs[1], label=name)], num_resamples=100)
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert {row["run"] for row in rows} == {"base", f"'{name}" if name[0] in "=+-@" else name}
    # Numbers stay numbers.
    assert [float(row["value"]) for row in rows if row["figure"] == "ln_ppl_ratio"] == [pytest.approx(-0.1)]


@pytest.mark.parametrize(
    ("floor", "dtype", "is_invariant", "sentence"),
    [
        (0.0, "bfloat16", None, "The noise floor of base is 0 and not informative: batches made no difference."),
        *(
            (
                mean,
                dtype,
                False,
                f"The noise floor of base is {text} and not informative: batches made almost no difference.",
            )
            for mean, dtype, text in (
                (1e-11, "float16", "1e-11"),
                (1e-8, "bfloat16", "1e-08"),
            )
        ),
        (0.0, "bfloat16", True, "The noise floor is exactly 0, because the server computes batch-invariantly."),
        (1e-11, "float32", None, "The noise floor is below 1e-9 nats: multiples of it are not informative."),
        (3e-7, "bfloat16", None, "near is 101,111 times the noise floor by mean KL divergence."),
    ],
)
def test_a_floor_of_nothing_says_what_it_is(tmp_path, floor, dtype, is_invariant, sentence):
    of_floor = NoiseFloor(mean=floor, p99=0, max=0, num_scored=3000, created=1)
    reference = made_up_reference(
        noise_floor=None, dtype=dtype, computed_by=ComputedBy(batch_invariant=is_invariant)
    ).model_copy(update={"noise_floor": of_floor})
    run = kld_run(tmp_path, "near", made_up_nlls(1), made_up_kld(1, 0.03), reference=reference)
    text = as_text(compare([run], num_resamples=100))
    assert [line for line in text.splitlines() if "noise floor" in line] == [sentence]


def test_the_summary_ranks_runs_in_sentences(comparison):
    multiple = comparison.runs[2].kld_over_noise_floor
    int8, int4 = (f"{verdict_line(comparison, figures)}." for figures in comparison.runs[1:])
    assert (int8[-23:], int4[-8:]) == ("%: no difference shown.", ": worse.")
    assert summary(comparison) == [
        *(int8, int4),
        "int4 is worse than int8 by perplexity.",
        "int4 is worse than int8 by mean KL divergence.",
        "int8 is at or below the noise floor: the reference's own model diverges as much from itself in other batches.",
        f"int4 is {multiple:,.1f} times the noise floor by mean KL divergence.",
    ]


@pytest.mark.parametrize(("floor", "is_used"), [(0.049, True), (0.051, False)])
def test_a_floor_that_rounding_cannot_make_is_not_used_and_named_once(tmp_path, floor, is_used):
    reference = made_up_reference(noise_floor=floor)
    runs = [
        kld_run(tmp_path, name, made_up_nlls(seed), made_up_kld(seed, 0.03), reference=reference)
        for seed, name in enumerate(("near", "far"), 1)
    ]
    sentences = summary(compare(runs, num_resamples=100))
    unused = f"The stored noise floor of base, {floor} nats, is not used: rounding in float32 gives at most 0.05."
    assert sentences.count(unused) == (not is_used)
    assert any("at or below the noise floor" in sentence for sentence in sentences) == is_used


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"wrong_logits": "no scale"}, "scores are not those of the model: no scale"),
        ({"kernels": ["Method: CPUInt8ScaledMMLinearKernel (saturates)"]}, SATURATION),
    ],
)
def test_what_computes_wrongly_is_named_wherever_its_figures_are(tmp_path, fault, words):
    wrong = {"computed_by": ComputedBy(**fault)}
    base = perplexity_run(tmp_path, "base", made_up_nlls(1))
    int8 = perplexity_run(tmp_path, "int8", made_up_nlls(2), server=wrong)
    comparison = compare([base, int8], num_resamples=100)
    assert verdict_line(comparison, comparison.runs[1]).endswith(f" ({words})")
    for text in (as_text(comparison), card(comparison)):
        assert (text.count(f"int8: {words}."), f"base: {words}" in text) == (1, False)
    run = kld_run(tmp_path, "other", made_up_nlls(1), made_up_kld(2, 0.1), reference=made_up_reference(**wrong))
    assert f"reference bytes: {words}." in summary(compare([run], num_resamples=100))


def test_lanes_are_told_apart_compared_and_each_has_its_floor(tmp_path):
    floor = NoiseFloor(mean=0.005, p99=1, max=1, num_scored=3000, created=1)
    reference = made_up_reference(noise_floor=0.001, lane_noise_floors={"decode": floor})
    position = np.tile(np.arange(100), 30)
    runs = [
        replace(
            kld_run(
                tmp_path,
                lane,
                made_up_nlls(2),
                made_up_kld(1, 0.01) + drift * position,
                reference=reference,
                server={"fingerprint": "of another"},
            ),
            lane=lane,
            window_contexts=np.full(30, 1, np.int32),
        )
        for lane, drift in (("prefill", 0), ("decode", 1e-3))
    ]
    _, prefill, decode = compare(runs, num_resamples=100).runs
    assert prefill.kld_over_noise_floor == pytest.approx(10, rel=0.1)
    assert decode.kld_over_noise_floor == pytest.approx((0.01 + 99e-3 / 2) / 0.005, rel=0.1)
    found = "\n".join(summary(compare(runs, num_resamples=100)))
    assert "decode and prefill by KL divergence: decode differs from prefill: +0.04950 nats in the mean" in found


def test_what_computed_runs_differently_is_named(tmp_path):
    servers = {"one": (A100, {}), "two": (H200, {}), "old": (None, {}), "int4": (A100, {"quantization": "awq"})}
    runs = []
    for label, (by, changes) in servers.items():
        server = {**changes, "computed_by": by and by.model_copy(update={"kernels": [label]} if changes else {})}
        runs.append(perplexity_run(tmp_path, label, made_up_nlls(1), server=server))
    [line] = [line for line in as_text(compare(runs, num_resamples=50)).splitlines() if line.startswith(NOT_ALIKE)]
    assert line == (
        f"{NOT_ALIKE}, which may be a part of the differences. implementation: vllm (one, int4), transformers (two); "
        "device: NVIDIA A100 (one, int4), NVIDIA H200 (two); "
        "attention: FLASH_ATTN 2 (one, int4), FLASH_ATTN 3 (two)."
    ), "kernels are another quantization's"


def test_eager_mode_is_compared_between_runs_and_not_with_their_reference(tmp_path):
    """`layers` needs an eager server, and the reference that it takes is also compared with compiled ones."""
    eager, compiled = ComputedBy(eager=True), ComputedBy(eager=False, cuda_graphs="FULL", compilation="VLLM_COMPILE")
    assert in_words(compiled) == "eager mode off; CUDA graphs FULL; compilation VLLM_COMPILE"
    reference = made_up_reference(computed_by=eager)
    runs = [
        kld_run(tmp_path, name, made_up_nlls(1), made_up_kld(1, 0.1), reference=reference, server={"computed_by": by})
        for name, by in (
            ("one", compiled),
            ("two", compiled.model_copy(update={"cuda_graphs": "NONE"})),
            ("three", eager),
        )
    ]
    assert computed_differently(runs[:2]) == []
    [warning] = computed_differently(runs)
    assert warning.endswith("differences. eager mode: off (one, two), on (three).")
