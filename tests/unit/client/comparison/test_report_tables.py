"""What the report's tables say: effects, pairs both ways round, and digits that fit the errors."""

import re
from dataclasses import replace

import numpy as np
import pytest
from run_files import kld_run, made_up_nlls, perplexity_run

from scoremode.comparison import Figure, compare
from scoremode.comparison.report import write_report
from scoremode.comparison.report_tables import effects, pair_matrices, plain, run_table, with_errors


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A base, a run that is clearly worse, and one that is as good."""
    folder = tmp_path_factory.mktemp("runs")
    nlls = made_up_nlls(0)
    size = {"weight_bytes": 2**30, "num_parameters": 2**29}
    half = {"weight_bytes": 2**29, "num_parameters": 2**29}
    base = kld_run(folder, "base", nlls, np.full(len(nlls), 1e-6), server=size)
    worse = kld_run(folder, "worse", nlls + 0.3, np.where(np.arange(len(nlls)) % 4, 0.05, 0.25), server=half)
    return compare(
        [base, worse, kld_run(folder, "alike", made_up_nlls(1), np.full(len(nlls), 0.01))], num_resamples=100
    )


def test_effects_are_of_each_run_against_the_base(comparison):
    worse, alike = effects(comparison)
    assert (worse.label, alike.label) == ("worse", "alike")
    ppl, kld, same_top, size = worse.parts
    assert re.fullmatch(r"\+34\.98\d* % \[34\.98\d*, 34\.9\d*\] PPL", ppl.text)
    assert (ppl.mark, kld.text, same_top.text, size.text) == ("worse", "KLD 0.100", "75.0% same top", "50% of the size")
    assert [part.mark for part in alike.parts] == ["", "", ""]


def test_each_pair_is_in_the_matrix_both_ways_round(comparison):
    by_ratio, by_kld = pair_matrices(comparison)
    assert by_ratio.labels == ["base", "worse", "alike"]
    assert [[cell.mark for cell in row] for row in by_ratio.rows] == [
        ["", "better", ""],
        ["worse", "", "worse"],
        ["", "better", ""],
    ]
    assert [by_ratio.rows[place][place].text for place in range(3)] == [""] * 3
    pair = comparison.pairs[0].ppl_ratio
    inverse = by_ratio.rows[0][1]
    assert inverse.value == pytest.approx(1 / pair.value)
    low, high = (float(end) for end in re.search(r"\[(.*), (.*)\]", inverse.tip).groups())
    assert (low, high) == (pytest.approx(1 / pair.high, rel=1e-3), pytest.approx(1 / pair.low, rel=1e-3))
    assert inverse.tip.startswith("base is better than worse by perplexity: 0.74")
    assert by_ratio.rows[2][0].tip.startswith("No difference is shown between alike and base by perplexity: ")
    assert by_kld.rows[1][0].tip.startswith("worse is worse than base by mean KL divergence: +0.1")
    assert by_kld.rows[0][1].value == -by_kld.rows[1][0].value


@pytest.mark.parametrize(
    ("figure", "text", "errors"),
    [
        (Figure(0.0037, 6.39e-05, 0.0035, 0.0039), "0.003700", ("± 0.000064", "[0.003500, 0.003900]")),
        (Figure(20.4267, 0.114, 20.23, 20.6442), "20.43", ("± 0.11", "[20.23, 20.64]")),
        (Figure(1234.5, 56.7, None, None), "1,234", ("± 57",)),
        (Figure(0.5, None, None, None), "0.500", ()),
        (Figure(1.1e-12, 2e-13, -1e-12, 2e-12), "0", ()),
    ],
)
def test_a_figure_has_the_digits_that_its_error_leaves(figure, text, errors):
    cell = with_errors(figure)
    assert (cell.text, cell.errors) == (text, errors)


def test_no_column_has_powers_of_ten(comparison):
    columns, rows = run_table(comparison)
    assert [column.name for column in columns[:3]] == ["run", "GiB", "bits per weight"]
    texts = [text for row in rows for cell in row[1:] for text in (cell.text, *cell.errors)]
    assert [text for text in texts if "e" in text] == []
    assert plain(6.94e-7).text == "0.00000069"
    figures = [Figure(29.0, error, None, None) for error in (0.99, 1.3, 1.2)]
    runs = [replace(run, perplexity=figure) for run, figure in zip(comparison.runs, figures, strict=True)]
    rows = run_table(replace(comparison, runs=runs))[1]
    assert [row[3].errors[0] for row in rows] == ["± 0.99", "± 1.30", "± 1.20"]


def test_a_report_names_its_runs_and_no_folder_of_this_machine(tmp_path):
    runs = []
    for seed, name in enumerate(("one/base", "one/a", "one/b", "one/c", "two/d")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        runs.append(perplexity_run((tmp_path / name).parent, name[4:], made_up_nlls(seed)))
    path = tmp_path / "report.html"
    write_report(compare(runs, num_resamples=20), path)
    text = path.read_text()
    assert "<title>base, a, b, c, d</title>" in text
    assert "<code>ppl-client compare one/base.json one/a.json one/b.json one/c.json two/d.json " in text
    assert str(tmp_path) not in text
    write_report(compare([replace(runs[at % 5], label=f"run{at}") for at in range(10)], num_resamples=20), path)
    assert "run6, run7, 2 more</title>" in path.read_text()
