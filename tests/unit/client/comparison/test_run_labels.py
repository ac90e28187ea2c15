"""No two runs of a comparison are called the same."""

import pytest
from run_files import made_up_nlls, write_perplexity_run

from scoremode.comparison import load_runs
from scoremode.errors import RunError


def write(folder, *names_and_models):
    paths = []
    for name, model in names_and_models:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        paths.append(write_perplexity_run(path, made_up_nlls(1), model=model))
    return paths


def labels(paths, given=None):
    return [run.label for run in load_runs(paths, given)]


def test_a_model_that_one_run_has_is_its_label(tmp_path):
    assert labels(write(tmp_path, ("a.json", "org/base"), ("b.json", "org/int4"))) == ["org/base", "org/int4"]


def test_a_model_that_is_served_under_its_path_goes_by_its_folder(tmp_path):
    assert labels(write(tmp_path, ("a.json", "/models/base"), ("b.json", "/models/int4"))) == ["base", "int4"]


def test_runs_of_one_model_go_by_their_files(tmp_path):
    paths = write(tmp_path, ("fp8.json", "m"), ("int4.json", "m"), ("c.json", "other"))
    assert labels(paths) == ["fp8", "int4", "other"]


def test_files_of_one_name_go_by_their_paths(tmp_path):
    paths = write(tmp_path, ("a/run.json", "m"), ("b/run.json", "m"))
    assert labels(paths) == [str(path) for path in paths]


def test_a_file_twice_is_numbered(tmp_path):
    [path] = write(tmp_path, ("a.json", "m"))
    assert labels([path, path]) == [f"{path} (1)", f"{path} (2)"]


def test_labels_may_be_given(tmp_path):
    paths = write(tmp_path, ("a.json", "m"), ("b.json", "m"))
    assert labels(paths, ["one", "two"]) == ["one", "two"]
    with pytest.raises(RunError, match="1 labels for 2 runs"):
        load_runs(paths, ["one"])
