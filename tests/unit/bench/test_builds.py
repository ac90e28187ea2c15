"""The table of builds: its ratios pair turns."""

from builds import Run, report


def run(build: str, turn: int, seconds: float, *, load: str = "echo", api: float = 1.0) -> Run:
    return Run("1b", load, turn, build, 100, 70_100, seconds, 5, api, 0.5)


def test_ratios_are_those_of_paired_turns():
    runs = [run("before", 0, 1.0), run("after", 0, 0.5, api=2.0), run("after", 1, 1.0, api=4.0), run("before", 1, 4.0)]
    before, after = report(runs, "before").splitlines()[2:]
    assert before == "| 1b | echo | before | 2 | 62.5 | 43,812 | - | - | 10.00 | - | 5.00 | - |"
    # Twice and four times as fast is 2 sqrt(2) in the mean, within a factor of exp(12.7062 ln(2) / 2).
    ratio, one = "2.828 [0.035, 231.217]", "1.000 [1.000, 1.000]"
    assert after == f"| 1b | echo | after | 2 | 150.0 | 105,150 | {ratio} | - | 30.00 | {ratio} | 5.00 | {one} |"


def test_a_load_is_compared_with_its_floor_on_the_same_build():
    runs = [run("before", 0, 1.0, load="prefill"), run("before", 0, 2.0, api=0)]
    prefill, echo = report(runs, "before").splitlines()[2:]
    assert prefill == "| 1b | prefill | before | 1 | 100.0 | 70,100 | - | - | 10.00 | - | 5.00 | - |"
    assert echo == "| 1b | echo | before | 1 | 50.0 | 35,050 | - | 0.500 | 0.00 | - | 5.00 | - |"
