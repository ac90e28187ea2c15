"""What the comparison of builds reads from its command line, how it takes turns, and what it makes of its figures."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import load
import pytest
from builds import COUNTS, LOADS, REPEATS, Build, Run, Turns, parse, report, rotated

from local_server import ServerProcess

BUILDS = ["--build", "before=/b/1", "--build", "after=/b/2:/b/vllm"]


def run(build: str, turn: int, seconds: float, api: float = 1.0) -> Run:
    return Run("1b", "choices", turn, build, 100, 70_100, seconds, 5, api, 0.5)


def test_builds_are_read_with_their_flags_and_environment():
    settings = ["--flags", "after=--score-cache-bytes 0", "--env", "after=A=1 B='x y=z'", "--count", "score=8"]
    options, flags = parse(["tokenizer", "logs", *BUILDS, *settings, "--dtype", "float32"])
    assert list(options.builds) == ["before", "after"]
    assert options.builds["before"] == Build((Path("/b/1"),), (), {})
    assert options.builds["after"] == Build(
        (Path("/b/2"), Path("/b/vllm")), ("--score-cache-bytes", "0"), {"A": "1", "B": "x y=z"}
    )
    assert flags == ["--dtype", "float32"]
    assert options.count == [("score", 8)]
    assert (options.shapes, list(options.loads), options.turns) == (["8b", "1b"], list(LOADS), 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--build"),
        (["--build", "folder"], "NAME=VALUE"),
        (["--build", "a=/1", "--build", "a=/2"], "one name"),
        ([*BUILDS, "--flags", "later=--x"], "no build is named later"),
        ([*BUILDS, "--env", "after=JUST_A_NAME"], "NAME=VALUE"),
        ([*BUILDS, "--count", "socre=8"], "LOAD=N"),
        ([*BUILDS, "--count", "score=0"], "LOAD=N"),
        ([*BUILDS, "--loads", "plain"], "invalid choice"),
        ([*BUILDS, "--shapes", "9b"], "invalid choice"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["tokenizer", "logs", *arguments])
    assert message in capsys.readouterr().err


def test_a_builds_folders_come_before_what_is_there(monkeypatch: pytest.MonkeyPatch):
    build = Build((Path("/b/2"), Path("/b/vllm")), ("--own", "1"), {"A": "1"})
    monkeypatch.setenv("PYTHONPATH", "/site")
    settings = build.settings(["--common"])
    assert settings.flags == ("--common", "--own", "1")
    assert settings.environment == {"A": "1", "PYTHONPATH": os.pathsep.join(["/b/2", "/b/vllm", "/site"])}
    monkeypatch.delenv("PYTHONPATH")
    assert Build((Path("/b/1"),)).settings([]).environment == {"PYTHONPATH": "/b/1"}


def test_every_build_is_first_in_turn():
    assert [rotated(["a", "b", "c"], turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_the_report_pairs_turns():
    runs = [run("before", 0, 1.0), run("after", 0, 0.5, api=2.0), run("after", 1, 1.0, api=4.0), run("before", 1, 4.0)]
    header, _, before, after = report(runs, "before").splitlines()
    assert header.startswith("| shape | load | build | turns | requests/s |")
    assert before == "| 1b | choices | before | 2 | 62.5 | 43,812 | - | 10.00 | - | 5.00 |"
    # Twice and four times as fast is 2 sqrt(2) in the mean, give or take a factor of exp(12.706 ln(2) / 2).
    ratio = "2.828 [0.035, 231.200]"
    assert after == f"| 1b | choices | after | 2 | 150.0 | 105,150 | {ratio} | 30.00 | {ratio} | 5.00 |"


def test_cpu_time_too_short_to_measure_leaves_out_its_ratio():
    _, _, _, after = report([run("before", 0, 1.0, api=0), run("after", 0, 1.0)], "before").splitlines()
    assert after == "| 1b | choices | after | 1 | 100.0 | 70,100 | 1.000 | 10.00 | - | 5.00 |"


class FakeServers:
    """Answers every load at once and keeps what was sent where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failed: int = 0) -> None:
        self.sent: list[tuple[str, list[dict[str, Any]]]] = []
        self.failed = failed
        self.processes = {
            ("1b", name): ServerProcess(f"http://{name}", SimpleNamespace(pid=os.getpid()))
            for name in ("before", "after")
        }
        monkeypatch.setattr(load, "send_all", self.send_all)
        monkeypatch.setattr("builds.SETTLE_SECONDS", 0)

    async def send_all(self, url: str, bodies: list[dict[str, Any]]) -> load.Rate:
        self.sent.append((url, bodies))
        return load.Rate(10, len(bodies), 1.0, 100, self.failed)

    def turns(self, *loads: str) -> Turns:
        options = SimpleNamespace(builds={"before": None, "after": None}, loads=loads, count=[("choices", 8)])
        return Turns(self.processes, ["1b"], options)  # type: ignore[arg-type]


def test_builds_get_the_same_requests_and_turns_get_new_ones(monkeypatch: pytest.MonkeyPatch):
    servers = FakeServers(monkeypatch)
    runs = [run for turn in servers.turns("choices").run(2, float("inf")) for run in turn]
    assert [(run.turn, run.build) for run in runs] == [(0, "before"), (0, "after"), (1, "after"), (1, "before")]
    assert {run.requests for run in runs} == {8 * REPEATS["choices"]}
    urls, bodies = zip(*servers.sent, strict=True)
    repeats = REPEATS["choices"]
    assert [url.split("/")[2] for url in urls[::repeats]] == ["before", "after", "after", "before"]
    assert bodies[:repeats] == bodies[repeats : 2 * repeats]
    prompts = [
        tuple(body["prompt"]) for sent in (*bodies[:repeats], *bodies[2 * repeats : 3 * repeats]) for body in sent
    ]
    assert len(set(prompts)) == len(prompts)


def test_turns_end_before_the_deadline_but_for_the_first(monkeypatch: pytest.MonkeyPatch):
    now = 0.0

    def slow(*_: Any, **__: Any) -> list[Run]:
        nonlocal now
        now += 10
        return []

    monkeypatch.setattr("builds.time", SimpleNamespace(monotonic=lambda: now))
    turns = FakeServers(monkeypatch).turns("score")
    monkeypatch.setattr(turns, "_turn", slow)
    assert len(list(turns.run(8, deadline=35.0))) == 3
    assert len(list(turns.run(8, deadline=35.0))) == 1
    assert len(list(turns.run(2, deadline=1000.0))) == 2


def test_a_failed_request_fails_the_run(monkeypatch: pytest.MonkeyPatch):
    servers = FakeServers(monkeypatch, failed=1)
    with pytest.raises(RuntimeError, match="failed"):
        servers.turns("choices").warm_up()


def test_every_load_has_a_size():
    assert set(COUNTS) == set(load.KINDS)
    assert all("8b" in counts for counts in COUNTS.values())
