"""Runs that compare choices of experts next to one that does not: figures, the card's column, the report's section."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from run_files import OWN, kld_run, made_up_kld, made_up_nlls, made_up_reference

from scoremode.comparison import RunFile, as_text, card, compare
from scoremode.comparison.report import write_report
from scoremode.runs import ExpertRoutes
from scoremode.wire import ReferenceRoutes

KLD = made_up_kld(1, 0.1)
REFERENCE = made_up_reference(
    routes=ReferenceRoutes(layers=["model.layers.3.mlp", "model.layers.5.mlp"], num_experts=8, top_k=2)
)
ANY = {"mean": 0.5, "stderr": None}
# The share of the same sets in each layer, with own and with forced experts.
LAYERS = [
    {
        **dict.fromkeys(("same_first", "overlap"), ANY),
        **{"name": name, "same_set": {**ANY, "mean": own}, "forced_same_set": {**ANY, "mean": forced}},
    }
    for name, own, forced in (("model.layers.3.mlp", 0.9, 0.99), ("model.layers.5.mlp", 0.7, 0.95))
]
MEANS = ("own", "forced", "rerouting", "same_experts", "kld_same", "kld_other")


def routed_run(folder: Path, name: str, kld=KLD) -> RunFile:
    """A run whose targets have 0, 1, 2, 0, 1, 2, 0, 1, 2, 0 differing layers, and 3/4 of the divergence if forced."""
    differing = (np.arange(len(kld)) % 10 % 3).astype(np.int32)
    routes = ExpertRoutes(
        **{"num_experts": 8, "top_k": 2, "layers": LAYERS, "differing_layers": [1200, 900, 900]},
        **dict.fromkeys(MEANS, ANY),
        arrays={"forced_kld": (0.75 * kld).astype(np.float32), "differing_layers": differing},
    )
    return kld_run(folder, name, made_up_nlls(3), kld, reference=REFERENCE, routes=routes)


@pytest.fixture
def original(tmp_path) -> RunFile:
    """A run without routes, although its reference has some."""
    return kld_run(tmp_path, "original", made_up_nlls(0), 1e-12 * KLD, reference=REFERENCE, server=OWN)


def test_shares_and_parts_of_the_divergence_are_in_all_tables(original, tmp_path):
    comparison = compare([original, routed_run(tmp_path, "int4")], num_resamples=100)
    base, int4 = comparison.runs
    assert (base.same_experts, base.forced_kld, base.rerouting) == (None, None, None)
    # (4 + 3/2) of ten targets, whose shares are 1, 1/2 and 0.
    expected = {"same_experts": 0.55, "forced_kld": 0.75 * KLD.mean(), "rerouting": 0.25 * KLD.mean()}
    assert {name: getattr(int4, name).value for name in expected} == pytest.approx(expected, rel=1e-6)
    assert int4.rerouting.stderr == pytest.approx(0.25 * KLD.std() / len(KLD) ** 0.5, rel=1e-3)
    assert int4.rerouting.low < int4.rerouting.value < int4.rerouting.high
    headers = [re.split("  +", line) for line in as_text(comparison).splitlines() if line.startswith("run ")]
    assert headers[4:6] == [["run", "forced KLD, nats", "rerouting, nats"], ["run", "same experts, %"]]
    header, _, *cells = [line.strip("| ").split(" | ") for line in card(comparison).splitlines() if line[:1] == "|"]
    assert [header[-1], *(row[-1] for row in cells)] == ["same experts %", "-", "55.00"]
    assert "same experts" not in as_text(compare([original], num_resamples=100))


def test_an_infinite_divergence_has_no_rerouting_and_a_reference_no_routes(tmp_path):
    run = routed_run(tmp_path, "broken", np.where(np.arange(len(KLD)), KLD, np.inf))
    reference, figures = compare([run], num_resamples=100).runs
    assert (figures.forced_kld.value, figures.rerouting) == (np.inf, None)
    assert (reference.same_experts, reference.forced_kld, reference.run.routes) == (None, None, None)


def test_the_report_has_a_section_with_a_line_per_run_and_pass(original, tmp_path):
    runs = [original, routed_run(tmp_path, "int4"), routed_run(tmp_path, "int3")]
    write_report(compare(runs, num_resamples=100), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    [section] = re.findall(r'<section aria-labelledby="routes">.*?</section>', html, re.DOTALL)
    root = ElementTree.fromstring(section.replace("<wbr>", "").replace(" hidden", ""))
    assert [title.text for title in root.iter("title")] == [
        f"{run}: {share}% of tokens have the same experts in layer {layer}, {name}"
        for run in ("int4", "int3")
        for share, layer, name in (
            ("90.00", 3, "own"),
            ("70.00", 5, "own"),
            ("99.00", 3, "forced"),
            ("95.00", 5, "forced"),
        )
    ]
    # Runs of one format have colors of their own here.
    assert set(re.findall(r"var\(--plot-run-(\d)\)", section)) == {"1", "2"}
    header, *rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert header == ["run", "mean KLD, nats", "forced KLD, nats", "rerouting, nats", "same experts, %"]
    assert [(row[0], row[4].split(" ± ")[0]) for row in rows] == [("int4", "55.000"), ("int3", "55.000")]
    assert (html.count('id="expert-routes"'), section.count('id="expert-routes"')) == (1, 1)
