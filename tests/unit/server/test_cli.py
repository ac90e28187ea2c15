"""The command `scoremode`: the model that it serves, and what it sets for the processes of a server."""

import pytest
from vllm.entrypoints.cli.serve import ServeSubcommand

from scoremode_server.cli import (
    parse,
)


@pytest.mark.parametrize(("arguments", "config", "model"), [("m --port 1", "", "m"), ("", "model: n", "n")])
def test_a_model_is_named_by_arguments_or_a_config(tmp_path, arguments, config, model):
    (tmp_path / "config.yaml").write_text(f"port: 2\n{config}")
    given = [*arguments.split(), "--config", str(tmp_path / "config.yaml")]
    assert parse(ServeSubcommand(), given).model == model
