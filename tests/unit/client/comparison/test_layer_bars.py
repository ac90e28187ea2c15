"""Runs of `ppl-client layers` side by side: the table, the bars and their scale, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from fake_server import INFO, StoredReference
from run_files import made_up_nlls, perplexity_run

from scoremode.cli.main import main
from scoremode.comparison.layers import load_layers
from scoremode.comparison.report import write_report
from scoremode.errors import RunError

NAMES = ["model.layers.0.self_attn", "model.layers.0.mlp"]


def part(name: str, kind: str, cost: float, stderr: float | None = 0.001) -> dict[str, Any]:
    return {"name": name, "kind": kind, "modules": [name], "cost": cost, "stderr": stderr, "floor": 0.0}


def write_run(path: Path, costs: list[float], **changes: Any) -> Path:
    """A run of a model with two blocks, and the costs of embeddings, blocks and head."""
    stored = StoredReference(
        {"name": "base", "method": "disjoint", "context_length": 4, "prompt": "a text", "layers": True}
    )
    embeddings, *blocks, head = costs
    record = {
        "kind": "layers",
        "model": path.stem,
        "server": INFO | {"fingerprint": path.stem},
        "reference": stored.json() | {"perplexity": 2.0},
        "whole": {"cost": sum(costs), "stderr": 0.002},
        "embeddings": part("embeddings", "embeddings", embeddings),
        "blocks": [part(*each) for each in zip(NAMES, ("attention", "mlp"), blocks, strict=True)],
        "head": part("head", "head", head, None),
        "floor": [0.0] * 3,
    }
    path.write_text(json.dumps(record | changes))
    return path


def axis_numbers(figure: ElementTree.Element) -> list[str]:
    """The numbers below a picture."""
    ticks = [each for each in figure.iter("g") if "-xtick_" in each.get("id", "")]
    return ["".join(each.itertext()).strip() for each in ticks]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "int4.json", [0.01, 0.02, 0.04, 0.005]),
        write_run(tmp_path / "fp8.json", [0.001, -0.002, 0.008, 0.0]),
    ]


def test_a_table_has_each_part_in_the_order_of_the_model(paths, capsys):
    assert main(["compare", *map(str, paths)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["part", "int4", "fp8"]
    assert lines[1] == ["whole", "model", "0.075000", "±", "0.002000", "0.007000", "±", "0.002000"]
    assert [line[0] for line in lines[2:6]] == ["embeddings", *NAMES, "head"]
    assert lines[3][1:] == ["0.020000", "±", "0.001000", "-0.002000", "±", "0.001000", "*"]
    assert lines[5][-4:] == ["0.000000", "±", "-", "*"]


def _ends(bar: ElementTree.Element) -> tuple[float, float]:
    heights = [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", bar.find("path").get("d"))]
    return min(heights), max(heights)


def test_bars_are_side_by_side_to_one_scale(paths, tmp_path):
    assert main(["compare", *map(str, paths), "--labels", "A,B", "--html", str(tmp_path / "report.html")]) == 0
    html = (tmp_path / "report.html").read_text()
    body = html[html.index("<body>") : html.index("</body>") + len("</body>")]
    first, second = (
        each for each in ElementTree.fromstring(body).iter("div") if each.get("class") == "panel-of-layers"
    )
    costs = {first: [0.01, 0.02, 0.04, 0.005], second: [0.001, -0.002, 0.008, 0.0]}
    bars = {figure: [bar for bar in figure.iter("g") if bar.find("title") is not None] for figure in costs}
    # Places in the picture, from its top: those of zero, and of 0.04 nats.
    highest, zero = min(_ends(bars[first][2])), max(_ends(bars[first][2]))
    for figure, own_costs in costs.items():
        expected = [sorted((zero, zero - cost / 0.04 * (zero - highest))) for cost in own_costs]
        assert np.array([*map(_ends, bars[figure])]) == pytest.approx(np.array(expected), abs=0.01)
        colors = [bar.find("path").get("fill") for bar in bars[figure]]
        assert colors == [f"var(--plot-{name})" for name in ("quiet", "run-0", "run-1", "quiet")]
    tip = bars[second][1].find("title").text
    assert tip == "model.layers.0.self_attn (attention): -0.002000 ± 0.001000 nats, not above the floor"
    assert [axis_numbers(figure) for figure in costs] == [["0"], ["0"]]
    # One file has both color schemes, and loads nothing.
    assert "prefers-color-scheme: dark" in html
    assert "http" not in html.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run["reference"].update(fingerprint="of another"), "has another original, text or layers"),
        (lambda run: run["blocks"].clear(), "has another original, text or layers"),
        (lambda run: run.update(kind="kld"), "of ppl-client layers.*kind: Input should be 'layers'"),
        (lambda run: run["whole"].update(cost="much"), r"whole\.cost"),
    ],
    ids=["original", "blocks", "kind", "cost"],
)
def test_runs_that_do_not_fit_are_refused(paths, change, message):
    record = json.loads(paths[1].read_text())
    change(record)
    paths[1].write_text(json.dumps(record))
    with pytest.raises(RunError, match=message):
        load_layers(paths)


def test_equal_labels_and_options_of_other_runs_are_refused(paths, capsys):
    with pytest.raises(RunError, match="2 runs are called 'A'"):
        load_layers(paths, ["A", "A"])
    assert main(["compare", *map(str, paths), "--max-kld", "0"]) == 1
    assert "--max-kld does not work with runs of ppl-client layers" in capsys.readouterr().err


def test_a_deep_model_without_any_cost_is_drawn(tmp_path):
    """Thirty layers of two blocks, and every third number on the axis."""
    path = write_run(tmp_path / "deep.json", [0.0] * 4)
    blocks = [part(f"model.layers.{at // 2}.{'mlp' if at % 2 else 'attn'}", "mlp", 0.0) for at in range(60)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"blocks": blocks}))
    write_report(None, tmp_path / "report.html", layers=load_layers([path]))
    html = (tmp_path / "report.html").read_text()
    assert html.count(" nats, not above the floor") == 62
    numbers = axis_numbers(ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6]))
    assert numbers == [str(number) for number in range(0, 30, 3)]


def test_layers_are_a_section_of_a_report_on_other_runs(paths, tmp_path, capsys):
    runs = [perplexity_run(tmp_path, name, made_up_nlls(seed)).path for seed, name in enumerate(("one", "two"))]
    command = ["compare", str(runs[0]), *map(str, paths), str(runs[1]), "--resamples", "100"]
    assert main([*command, "--labels", "A,B,C,D", "--html", str(tmp_path / "report.html")]) == 0
    printed, html = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert [html.count(f"<h3>{label}</h3>") for label in "ABCD"] == [1, 1, 1, 1], "settings of runs, panels of layers"
    assert ('<a href="#layers">' in html, html.count('class="panel-of-layers"')) == (True, 2)
    assert re.search("^D +A +", printed, re.MULTILINE), "a pair"
    assert "part                      B " in printed
    # The reference has one window.
    for text in (printed, html):
        assert "1 window decides nothing: record 4,096 tokens in windows of 1,024" in text
    assert main([*command, "--csv"]) == 1
    assert "--csv does not work with runs of ppl-client layers" in capsys.readouterr().err
    assert main([*command, "--tasks", *["folder"] * 4]) == 1
    assert "--tasks: folder needs a name (NAME=DIR)" in capsys.readouterr().err
