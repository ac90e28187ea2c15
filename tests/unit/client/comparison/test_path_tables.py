"""A run of `ppl-client paths` as text and in a report: the table, sentences on paths that differ, and the picture."""

from math import inf
from pathlib import Path

import pytest
from fake_server import INFO

from scoremode import ServerInfo
from scoremode.cli.main import main
from scoremode.comparison.excess import Excess
from scoremode.comparison.path_tables import paths_as_text, paths_view
from scoremode.comparison.paths import BlockFigures, LaneFigures, PathRow, PathsRun, Range
from scoremode.comparison.plot_style import LIGHT

FLEX = "attention-backend=FLEX_ATTENTION"
FLOOR = 0.00076


def made_up_excess(mean: float, floor: float = FLOOR, p: float | None = 0.5) -> Excess:
    return Excess(mean, floor, mean - floor - 0.00008, mean - floor + 0.00008, p)


def in_lane(mean: float, lane: str = "prefill", speed: float | None = None, **fields) -> LaneFigures:
    """Figures of a path, which differs if it has twice the floor."""
    differs = mean > 2 * FLOOR
    made_up = {
        "lane": lane,
        "excess": made_up_excess(mean),
        "differs": differs,
        "differs_from": 1 if differs else None,
        "by_position": [Range(by="position", name=name, num_tokens=40, kld=mean, floor=FLOOR) for name in ("1", "2")],
        "groups": [
            Range(by="confidence", name="p < 0.5", num_tokens=9, kld=0.0026, floor=0.0011),
            Range(by="confidence", name="p ≥ 0.9", num_tokens=9, kld=0.0003, floor=0.0001),
        ],
        "tokens_per_second": speed,
    }
    return LaneFigures(**made_up | fields)


def block(index: int) -> BlockFigures:
    return BlockFigures(name=f"model.layers.{index}.mlp", kind="mlp", excess=made_up_excess(0.001, 0.0002))


def made_up_run(*rows: PathRow, context_length: int = 1024) -> PathsRun:
    default = PathRow(name="default", lanes=[in_lane(FLOOR, speed=123_456), in_lane(FLOOR, "decode", 6543)])
    return PathsRun(
        model="tiny",
        server=ServerInfo(**INFO),
        text="9a0b1c2d3e4f5566",
        num_tokens=40_920,
        num_windows=40,
        context_length=context_length,
        num_repeats=4,
        rows=[default, *rows],
    )


RUN = made_up_run(
    PathRow(
        name=FLEX,
        lanes=[in_lane(0.00169, speed=62_963), in_lane(0.0017, "decode", 3337)],
        eager=in_lane(0.0017),
        blocks=[block(index) for index in range(11)],
    ),
    PathRow(name="attention-backend=FLASH_ATTN", lanes=[in_lane(FLOOR, speed=123_000)], same_as="default"),
    PathRow(name="X=$1$", lanes=[in_lane(0.0007)]),
    PathRow(name="dtype=<b>", reason="ValueError:\n  no \x1b[31m<b>"),
)


TEXT = """\
1 of 4 paths differs from the default path; refused: 1.
Each path was compared 4 times over 40,920 tokens in 40 windows of 1,024, and as the floor the default path again.
tiny: not quantized, float32; scoremode 9.9.9, vLLM 0.32.0, unknown device; text 9a0b1c2d3e4f.

path                              lane          KLD     floor  times         excess, 95 %  from  tokens/s  verdict
default                           prefill  0.000760  0.000760    1.0                    -     -   123,456  default
default                           decode   0.000760  0.000760    1.0                    -     -     6,543  default
attention-backend=FLEX_ATTENTION  prefill   0.00169  0.000760    2.2   [0.00085, 0.00101]     1    62,963  differs
attention-backend=FLEX_ATTENTION  decode    0.00170  0.000760    2.2   [0.00086, 0.00102]     1     3,337  differs
attention-backend=FLASH_ATTN      prefill  0.000760  0.000760    1.0  [-0.00008, 0.00008]     -   123,000  agrees
X=$1$                             prefill  0.000700  0.000760    0.9  [-0.00014, 0.00002]     -         -  agrees
dtype=<b>                         -               -         -      -                    -     -         -  refused
In nats per token; times: KLD / floor; excess: KLD - floor; from: the position from which on the path differs.
attention-backend=FLASH_ATTN reports the same kernels as default.

attention-backend=FLEX_ATTENTION differs in prefill: 0.00169 nats, 2.2 times the floor, from position 1 on.
Most where the default path's top token has p < 0.5: 0.00260 nats.
attention-backend=FLEX_ATTENTION differs in decode: 0.00170 nats, 2.2 times the floor, from position 1 on.
Most where the default path's top token has p < 0.5: 0.00260 nats.
With both paths eager: 0.00170 nats, 2.2 times the floor. Blocks that cost more than on the default path (10 of 11):
block               kind                       excess
model.layers.0.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.1.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.2.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.3.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.4.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.5.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.6.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.7.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.8.mlp  mlp   +0.00080 [0.00072, 0.00088]
model.layers.9.mlp  mlp   +0.00080 [0.00072, 0.00088]

dtype=<b> is refused: ValueError: no \\x1b[31m<b>
"""


def test_text_has_the_count_the_floor_a_table_and_a_paragraph_per_path_that_differs():
    assert paths_as_text(RUN) == TEXT


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"eager": in_lane(FLOOR)}, "It agrees when both are eager: compilation or CUDA graphs make the difference."),
        ({"eager": in_lane(0.0017)}, "0.00170 nats, 2.2 times the floor. No block stands out."),
        (
            {"eager": in_lane(0.0017), "blocks": [block(3).model_copy(update={"differs": False})]},
            "No block stands out. The largest excesses:\nblock               kind                       excess\nmodel.",
        ),
        (
            {"eager": in_lane(FLOOR, excess=made_up_excess(FLOOR, p=None))},
            "With both paths eager, the text is too short",
        ),
        ({}, "Its blocks were not measured."),
        ({"reason": "it died"}, "a failed: it died"),
        (
            {"lanes": [in_lane(0.0017, "decode")]},
            "The difference is in the decode lane: blocks are not measured there.",
        ),
        (
            {"original": made_up_excess(0.45, 0.44)},
            "It is farther from the original: 0.440 nats on the default path, +0.01000 [0.00992, 0.01008] here.",
        ),
        ({"original": made_up_excess(0.43, 0.44)}, "It is nearer to the original"),
        ({"original": made_up_excess(0.44, 0.44)}, "It is about as near to the original"),
        ({"original": Excess(inf, 0.44, None, None, 0.0)}, "It is farther from the original"),
    ],
)
def test_a_path_that_differs_has_a_sentence_on_where(fields, sentence):
    row = PathRow(**{"name": "a", "lanes": [in_lane(0.0017)], **fields})
    text = paths_as_text(made_up_run(row))
    assert sentence in text
    assert "positions" not in text
    assert "positions, " in paths_as_text(made_up_run(row, context_length=4096))


def test_the_picture_has_divergence_by_speed_with_a_marker_per_lane():
    """It leaves out paths without a speed, and those that compute as another one does."""
    [axes] = paths_view(RUN).plot.draw(LIGHT).axes
    drawn = {(line.get_marker(), *line.get_xdata(), *line.get_ydata()) for line in axes.lines if line.get_xdata().size}
    prefill, decode = {("o", 123_456, FLOOR), ("o", 62_963, 0.00169)}, {("s", 6543, FLOOR), ("s", 3337, 0.0017)}
    assert drawn == prefill | decode
    assert axes.get_yscale() == "log"
    assert [floor.get_segments()[0][0][1] for floor in axes.collections] == [FLOOR, FLOOR]
    assert {text.get_text() for text in axes.texts} >= {"default", "FLEX_ATTENTION"}
    assert paths_view(RUN.model_copy(update={"rows": RUN.rows[3:]})).plot is None


def test_compare_prints_a_run_and_writes_its_report(tmp_path: Path, capsys):
    path, other = tmp_path / "paths.json", tmp_path / "other.json"
    path.write_text(RUN.model_dump_json())
    other.write_text('{"kind": "paths"}')
    assert main(["compare", str(path), "--html", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out == TEXT
    html = (tmp_path / "report.html").read_text()
    assert "FLEX_ATTENTION, decode: 0.00170 nats, 2.2 times the floor; 3,337 tokens/s" in html
    assert html.count('<th scope="row">attention-<wbr>backend=FLEX_ATTENTION</th>') == 2
    assert "no \\x1b[31m&lt;b&gt;" in html
    wrong = {
        f"{path} {other}": "give it alone",
        f"{path} --csv": "--csv does not work with runs of ppl-client paths",
        f"{other}": "other.json is not a run of ppl-client paths: model: Field required",
    }
    for arguments, message in wrong.items():
        assert main(["compare", *arguments.split()]) == 1
        assert message in capsys.readouterr().err
