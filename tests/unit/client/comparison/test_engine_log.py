"""Logs of llama-perplexity are compared next to our runs. The logs are of llama.cpp itself, on a Q4_K_M file of
SmolLM2."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from run_files import kld_run, made_up_kld, made_up_nlls, made_up_reference

from scoremode.comparison import as_csv, as_text, compare
from scoremode.comparison.engine_log import load_log, with_logs
from scoremode.errors import RunError

DATA = Path(__file__).parents[3] / "data"
KLD = DATA / "llama_perplexity_kld.txt"
SIZES = [255] * 8
NLLS = made_up_nlls(1, SIZES)


@pytest.fixture
def comparison(tmp_path: Path):
    reference = made_up_reference(SIZES, method="llama.cpp", context_length=512, perplexity=24.530176)
    run = kld_run(tmp_path, "int8", NLLS, made_up_kld(1, 0.1, SIZES), window_sizes=SIZES, reference=reference)
    return compare([run], num_resamples=100)


def test_a_log_with_kl_divergence_gives_every_figure_that_it_prints():
    figures = load_log(KLD, "q4_k_m")
    assert (figures.run.num_windows, figures.run.context_length, figures.run.base_perplexity) == (8, 512, 24.530176)
    assert (figures.perplexity.value, figures.perplexity.stderr) == (26.063299, 1.784940)
    assert figures.nll.value == pytest.approx(math.log(26.063299))
    assert figures.nll.stderr == pytest.approx(1.784940 / 26.063299)
    assert (figures.kld.value, figures.kld.stderr, figures.kld.low) == (0.053622, 0.001553, None)
    quantiles = (figures.kld_median, figures.kld_p95, figures.kld_p99, figures.kld_p999, figures.kld_max)
    assert quantiles == (0.036718, 0.146770, 0.334010, 0.745685, 1.297598)
    assert (figures.same_top_p.value, figures.same_top_p.stderr) == pytest.approx((0.85735, 0.00774))
    assert (figures.delta_p_rms.value, figures.delta_p_rms.stderr) == pytest.approx((0.05537, 0.00350))


def test_a_log_that_powershell_wrote_is_read(tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text(KLD.read_text(), encoding="utf-16", newline="\r\n")
    expected, found = load_log(KLD, "q4_k_m"), load_log(log, "q4_k_m")
    assert replace(found, run=replace(found.run, path=KLD)) == expected


def test_tables_have_a_row_for_it_and_leave_empty_what_it_lacks(comparison):
    both = with_logs(comparison, [("q4_k_m", str(KLD))])
    rows = [line.split() for line in as_text(both).splitlines() if line.startswith("q4_k_m ")]
    cells = [cell for row in rows[:3] for cell in row[1:]]
    assert " ".join(cells) == "llama.cpp - - - 26.0633 ± 1.7849 - 0.053622 ± 0.001553 85.735 ± 0.774 -"
    found = {row["figure"]: row for row in csv.DictReader(io.StringIO(as_csv(both))) if row["run"] == "q4_k_m"}
    assert (found["kld"]["value"], found["kld"]["low"]) == ("0.053622", "")


LOG = KLD.read_text()


@pytest.mark.parametrize(
    ("printed", "wrong", "message"),
    [
        *(("  26.063299 ", value, f"Mean PPL(Q): '{value[:33]}") for value in ("0.0", "-3.0", "1.2.3", "9" * 5000)),
        *(("  24.530176 ", value, f"Mean PPL(base): '{value}") for value in ("0.0", "1.2.3", "0.5")),
        ("   1.784940", " 1.7.8", "Mean PPL(Q): '26.063299 ± 1.7.8' is not a number from 0.999 to inf"),
        ("   1.784940", "-1.0", "Mean PPL(Q): '26.063299"),
        ("   0.053622 ", "none", "Mean KLD: 'none"),
        ("   1.297598", "1.2.3", "Maximum KLD: '1.2.3'"),
        (" 85.735 ", "857.35", "Same top p: '857.35"),
        ("over 8 chunks", f"over {'8' * 5000} chunks", "it lacks the number of chunks"),
        *(
            ("  24.530176 ", value, f"another base than the reference base: its perplexity is {value}")
            for value in ("nan", "25.530176")
        ),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_figure_is_refused_with_its_file_and_name(comparison, tmp_path: Path, printed, wrong, message):
    path = tmp_path / "log.txt"
    path.write_text(LOG.replace(printed, f"{wrong} " if printed.endswith(" ") else wrong))
    with pytest.raises(RunError) as caught:
        with_logs(comparison, [("q4_k_m", str(path))])
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_reference_without_a_perplexity_does_not_pass_for_the_base(comparison):
    run = comparison.base
    unknown = replace(run, reference=run.reference.model_copy(update={"perplexity": None}))
    with pytest.raises(RunError, match=f"^{run.path}: reference.perplexity is null"):
        with_logs(replace(comparison, runs=[replace(comparison.runs[0], run=unknown)]), [("q4_k_m", str(KLD))])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama_perplexity.txt", r"41 chunks of 512 tokens, and .* 8 windows of 512"),
        ("wikitext.txt", "is not a log of llama-perplexity"),
    ],
)
def test_a_log_of_another_text_and_what_is_not_a_log_are_refused(comparison, name, message):
    with pytest.raises(RunError, match=message):
        with_logs(comparison, [("other", str(DATA / name))])
