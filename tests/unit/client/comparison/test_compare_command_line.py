"""`ppl-client compare` from end to end, over files that `ppl-client` and `ppl-client kld` wrote."""

import csv
import io
import subprocess
import sys

import pytest
from fake_references import KldServer
from fake_scoremode import serve
from run_files import made_up_nlls, write_perplexity_run

from scoremode.cli import main

TEXT = "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow! " * 6
TEXT_OPTIONS = ["--text", TEXT, "--method", "disjoint", "--context-length", "16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[str]:
    """Three files: two models beside a reference, the second further from it, and a run of perplexity."""
    folder = tmp_path_factory.mktemp("runs")
    server = KldServer()
    with serve(server) as url:
        assert main(["record", "--url", url, "--reference", "base", *TEXT_OPTIONS, "--quiet"]) == 0
    paths = [str(folder / f"{name}.json") for name in ("near", "far")]
    for path, noise in zip(paths, (0.1, 1.0), strict=True):
        with serve(KldServer(server.references, noise=noise)) as url:
            assert main(["kld", "--url", url, "--reference", "base", "--output", path, "--quiet"]) == 0
    paths.append(str(folder / "perplexity.json"))
    with serve(KldServer()) as url:
        assert main(["--url", url, *TEXT_OPTIONS, "--output", paths[-1], "--quiet"]) == 0
    return paths


def test_tables_and_nothing_else_on_stdout(runs, capsys):
    assert main(["compare", *runs]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0].startswith("465 tokens of text, 31 windows: disjoint, context length 16, stride 16.")
    assert "By mean KL divergence, near is better than far." in lines


def test_markdown_and_csv(runs, capsys):
    assert main(["compare", *runs, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| run | weights |")
    assert main(["compare", *runs, "--csv", "--resamples", "200", "--seed", "3"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["run"] for row in rows} == {"near", "far", "perplexity"}
    [verdict] = [row["verdict"] for row in rows if (row["run"], row["figure"]) == ("far", "kld_difference")]
    assert verdict == "worse"


def test_labels(runs, capsys):
    assert main(["compare", *runs, "--labels", "A,B,C", "--csv"]) == 0
    assert {row["run"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))} == {"A", "B", "C"}


def test_runs_that_do_not_pair_are_one_line_on_stderr(runs, tmp_path, capsys):
    other = write_perplexity_run(tmp_path / "other.json", made_up_nlls(1))
    assert main(["compare", runs[0], str(other)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line == (
        f"ppl-client: error: {runs[0]} and {other} cannot be compared: "
        "the method is disjoint in the first and sliding in the second"
    )


def test_a_file_that_is_not_there(runs, capsys):
    assert main(["compare", runs[0], "/no/where.json"]) == 1
    assert capsys.readouterr().err == "ppl-client: error: cannot read /no/where.json: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: BASE.json, RUN.json"),
        (["a.json"], "the following arguments are required: RUN.json"),
        (["a.json", "a.json"], "a run is named twice"),
        (["a.json", "b.json", "--labels", "A"], "--labels has 1 names for 2 runs"),
        (["a.json", "b.json", "--labels", "A,A"], "--labels needs another name for every run"),
        (["a.json", "b.json", "--labels", "A,"], "--labels needs another name for every run"),
        (["a.json", "b.json", "--markdown", "--csv"], "not allowed with"),
        (["a.json", "b.json", "--resamples", "99"], "at least 100"),
        (["a.json", "b.json", "--seed", "-1"], "at least 0"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["compare", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


WITHOUT = """
import sys
sys.modules["{name}"] = None
from scoremode.cli import main
sys.exit(main({arguments}))
"""


@pytest.mark.processes
def test_without_the_extra_the_command_says_what_to_install(runs):
    code = WITHOUT.format(name="arch", arguments=["compare", *runs])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == 'ppl-client: error: arch is missing: pip install "scoremode[report]"\n'


@pytest.mark.processes
def test_other_commands_do_without_the_extra():
    code = "import sys, scoremode, scoremode.cli; print({'arch', 'scipy', 'matplotlib', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
