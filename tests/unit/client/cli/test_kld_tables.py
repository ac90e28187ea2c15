"""The tables of a comparison by llama.cpp's formulas worked by hand, literally, and its record."""

import dataclasses
import json
import math

import numpy as np
import pytest
from fake_server import INFO, StoredReference

from scoremode.cli.kld import as_text
from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.runs import DivergentToken, ExpertRoutes, KldMeasurement
from scoremode.wire import CorpusInfo, NoiseFloor, Reference, ServerInfo

SETTINGS = {"name": "base", "prompt": "the text of two windows", "method": "disjoint", "context_length": 8}
SHOWN = {
    "dtype": "bfloat16",
    "context_length": 2048,
    "stride": 2048,
    "num_tokens": 4096,
    "num_scored": 4,
    "perplexity": math.inf,
    "corpus": CorpusInfo(name="wikitext", config="raw", split="test", num_rows=4358, sha256="0123456789abcdef"),
}
REFERENCE = Reference(**StoredReference(SETTINGS).json() | SHOWN)
TEXTS = {"text_before": 'and "so"\n it', "token": "\n", "reference_top_token": " the", "top_token": " a"}
TOKEN = DivergentToken(
    index=3,
    window=1,
    kld=5.0,
    token_id=10,
    probability=0.5,
    top_token_id=4,
    num_context=1,
    reference_probability=0.125,
    reference_top_token_id=3,
    reference_confidence=0.75,
    **TEXTS,
)
# Four tokens, q against base: probabilities 1/2, 1/4, 1/2, 1/8 against 1/2, 1/2, 1/4, 1/8. In units of ln 2:
#   NLLs of q 1, 2, 1, 3: mean 1.75, squares 15/4 - 49/16 = 0.6875, over n - 1 = 3: 0.2291667, root 0.4787136
#   NLLs of base 1, 1, 2, 3: the same mean and error
#   mean of products (1 + 2 + 2 + 9) / 4 = 3.5; covariance (3.5 - 3.0625) / 3 = 0.1458333
#   correlation 0.1458333 / 0.2291667 = 7/11
#   ln ratio 0, ± sqrt(2 · 0.2291667 - 2 · 0.1458333) = sqrt(1/6)
# Perplexities 2^1.75 = 3.363586; ± 3.363586 · 0.4787136 ln 2 = 1.116101.
# Difference 0, ± 3.363586 · sqrt(1/6) · ln 2 = 0.951814.
# Δp 0, -1/4, 1/4, 0: mean 0 ± sqrt((1/32) / 3) = 0.1020621; squares' mean 1/32, so RMS 0.1767767;
#   squares' error sqrt((1/512 - 1/1024) / 3) = 0.0180422; RMS ± 0.5 / 0.1767767 · 0.0180422 = 0.0510310
# Same top at 3 of 4: ± sqrt(0.75 · 0.25 / 3) = 0.25.
# KL 0, 1, 2, 5: mean 2, ± sqrt((30/4 - 4) / 3) = 1.0801234; median 1.5; 90 % at 2.7: 2 + 0.7 · 3 = 4.1.
ARRAYS = {
    "token_ids": [1, 2, 3, 10],
    "kld": [0, 1, 2, 5],
    "reverse_kld": [0, 1, 1, 2],
    "acceptance": [1, 0.5, 0.5, 0.25],
    "logprobs": np.log([1 / 2, 1 / 4, 1 / 2, 1 / 8]),
    "reference_logprobs": np.log([1 / 2, 1 / 2, 1 / 4, 1 / 8]),
    "ranks": [1, 2, 1, 3],
    "reference_ranks": [1, 1, 2, 3],
    "top_token_ids": [1, 2, 3, 4],
    "reference_top_token_ids": [1, 2, 3, 9],
    "reference_confidence": [0.1, 0.6, 0.8, 1],
}
# Label, of the KLD where it has one, of Δp.
QUANTILES = [
    ("99.9%  ", 4.991, 24.925),
    ("99.0%  ", 4.91, 24.25),
    ("95.0%  ", 4.55, 21.25),
    ("90.0%  ", 4.1, 17.5),
    ("75.0%  ", None, 6.25),
    ("Median ", 1.5, 0),
    ("25.0%  ", None, -6.25),
    ("10.0%  ", 0.3, -17.5),
    (" 5.0%  ", 0.15, -21.25),
    (" 1.0%  ", 0.03, -24.25),
    (" 0.1%  ", 0.003, -24.925),
]


def measured(**changes) -> KldMeasurement:
    """A measurement of four positions; `changes` replace arrays or fields."""
    arrays = {name: changes.pop(name, values) for name, values in ARRAYS.items()}
    positions = KldPositions(**{name: np.array(values, POSITION_DTYPES[name]) for name, values in arrays.items()})
    measurement = KldMeasurement(
        server=ServerInfo(**{**INFO, "quantization": "fp8"}),
        model="adapter",
        reference=REFERENCE,
        concurrency=8,
        as_noise_floor=False,
        window_sizes=[2, 2],
        positions=positions,
        statistics=statistics(positions, [2, 2]),
        most_divergent=[TOKEN],
        seconds=2.0,
    )
    return dataclasses.replace(measurement, **changes)


def with_floor(mean, **changes) -> KldMeasurement:
    floor = NoiseFloor(mean=mean, p99=0.004, max=0.1, num_scored=4, created=1)
    return measured(reference=REFERENCE.model_copy(update={"noise_floor": floor}), **changes)


def test_the_tables_are_llama_cpps_and_ours():
    lines = as_text(with_floor(0.0005)).splitlines()
    assert "model (Q)       adapter: fp8, float32" in lines
    assert "base            base: bytes, not quantized, bfloat16" in lines
    assert lines[lines.index("====== Most divergent tokens ======") :] == [
        "====== Most divergent tokens ======",
        r'KLD 5.000000, window 1, after "and \"so\"\n it"',
        r'    "\n": base 0.1250, Q 0.5000; base prefers " the" (0.7500), Q " a"',
        "",
        "====== Perplexity statistics ======",
        "Mean PPL(Q)                   :   3.363586 ±   1.116101",
        "Mean PPL(base)                :   3.363586 ±   1.116101",
        "Cor(ln(PPL(Q)), ln(PPL(base))):  63.64%",
        "Mean ln(PPL(Q)/PPL(base))     :   0.000000 ±   0.282976",
        "Mean PPL(Q)/PPL(base)         :   1.000000 ±   0.282976",
        "Mean PPL(Q)-PPL(base)         :   0.000000 ±   0.951815",
        "",
        "====== KL divergence statistics ======",
        "Mean    KLD:   2.000000 ±   1.080123",
        "Maximum KLD:   5.000000",
        *(f"{label} KLD: {kld:10.6f}" for label, kld, _ in QUANTILES if kld is not None),
        "Minimum KLD:   0.000000",
        "",
        "====== Token probability statistics ======",
        "Mean    Δp:  0.000 ± 10.206 %",
        "Maximum Δp: 25.000%",
        *(f"{label} Δp: {delta_p:6.3f}%" for label, _, delta_p in QUANTILES),
        "Minimum Δp: -25.000%",
        "RMS Δp    : 17.678 ± 5.103 %",
        "Same top p: 75.000 ± 25.000 %",
        "",
        "====== Errors clustered by window ======",
        "Mean    KLD              :   2.000000 ±   1.500000",
        "Mean ln(PPL(Q)/PPL(base)):   0.000000 ±   0.346574",
        "Mean    Δp               :  0.000 ± 12.500 %",
        "Same top p               : 75.000 ± 25.000 %",
        "",
        "====== By confidence of the base ======",
        "confidence      positions    share    mean KLD  same top p",
        "[0.00, 0.25)            1   25.00%    0.000000    100.000%",
        "[0.25, 0.50)            0    0.00%           -          -%",
        "[0.50, 0.75)            1   25.00%    1.000000    100.000%",
        "[0.75, 0.95)            1   25.00%    2.000000    100.000%",
        "[0.95, 1.00]            1   25.00%    5.000000      0.000%",
        "",
        "====== What the mean does not say ======",
        "Share of the top 1%:  62.50% of the mean KLD",
        "Mean reverse KLD   :   1.000000",
        "Mean acceptance    :  56.25%",
        "Noise floor        : mean KLD 0.0005 of the base from itself, 99.0% 0.004; this is 4,000 times the floor",
    ]


def test_expert_routes_have_a_table_of_targets_and_one_of_layers():
    """The first layer has the highest share, and is left out; the last one's router stands out."""
    exact = {"mean": 0.75, "stderr": 0.125}
    layer = {**dict.fromkeys(("same_first", "overlap"), exact), "forced_same_set": {"mean": 0.99, "stderr": 0.0}}
    layers = [{**layer, "name": f"layers.{at}", "same_set": {"mean": 1 - at / 16, "stderr": 0.0}} for at in range(13)]
    layers[12]["forced_same_set"] = {"mean": 0.9, "stderr": 0.01}
    routes = ExpertRoutes.model_validate(
        {
            **{"num_experts": 8, "top_k": 2, "layers": layers, "same_experts": exact},
            **{"own": exact, "forced": {"mean": 0.5, "stderr": 0.0625}, "rerouting": {"mean": None, "stderr": None}},
            **dict.fromkeys(("kld_same", "kld_other"), exact),
            "differing_layers": [1000, 200, 300, 200, 300, 500, 0, 0, 500, 0, 0, 0, 0, 1000],
        }
    )
    lines = as_text(measured(routes=routes)).splitlines()
    lines = lines[lines.index("====== Expert routes ======") + 1 :]
    assert lines[:15] == [
        "Mean    KLD       :   0.750000 ±   0.125000",
        "forced (rounding) :   0.500000 ±   0.062500",
        "rerouting         :          - ±          -",
        "KLD, same routes  :   0.750000 ±   0.125000, 1,000 tokens",
        "KLD, other routes :   0.750000 ±   0.125000, 3,000 tokens",
        "Same experts      : 75.000 ± 12.500 % of tokens and layers",
        "",
        "layers that differ  tokens   share",
        "                 0   1,000  25.00%",
        "                 1     200   5.00%",
        "                 2     300   7.50%",
        "            3 to 4     500  12.50%",
        "            5 to 8   1,000  25.00%",
        "           9 to 13   1,000  25.00%",
        "",
    ]
    assert lines[15].split("  ")[0] == "layer, 12 of 13"
    assert [line.split()[0] for line in lines[16:28]] == [f"layers.{at}" for at in range(12, 0, -1)]
    assert lines[16].split()[1:4] == ["25.000", "±", "0.000"]
    assert lines[28:] == [
        "The router of layers.12 stands out: with forced experts, same set in 90.000 ± 1.000 %.",
    ]


@pytest.mark.parametrize(
    ("measurement", "line"),
    [
        (measured(), "Noise floor        : not measured (ppl-client kld --floor, on a server of the base model)"),
        (
            with_floor(0.8),
            "Noise floor        : the stored noise floor of base, 0.8 nats, is not used: rounding in bfloat16 gives at "
            "most 0.2 (ppl-client kld --floor, on a server of the base model)",
        ),
        (measured(model="a\x1b[2J"), r"model (Q)       a\x1b[2J: fp8, float32"),
        (measured(kld=[0, 1, 2, math.inf]), "Infinite KLD       : 1 positions, so that the mean is infinite"),
        (measured(logprobs=ARRAYS["reference_logprobs"]), "RMS Δp    :  0.000 ±     - %"),
        (
            measured(most_divergent=[dataclasses.replace(TOKEN, **dict.fromkeys(TEXTS))]),
            "    token 10: base 0.1250, Q 0.5000; base prefers token 3 (0.7500), Q token 4",
        ),
    ],
)
def test_missing_and_infinite_figures_have_their_own_lines(measurement, line):
    assert line in as_text(measurement).splitlines()


def test_the_record_has_null_for_what_is_not_a_number():
    record = measured(kld=[0, 1, 2, math.inf]).record(["http://me:secret@host:8000"])
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["urls"], record["model"]) == (["http://host:8000"], "adapter")
    assert (record["reference"]["perplexity"], record["statistics"]["kld"]["mean"]) == (None, None)
    assert record["most_divergent"] == [dataclasses.asdict(TOKEN)]
    assert with_floor(0.0005).record([])["kld_over_noise_floor"] == pytest.approx(4000)
