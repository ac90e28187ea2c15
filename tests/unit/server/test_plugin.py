"""The general plugin, which vLLM calls in every process of an environment that Scoremode is installed in."""

import os
import subprocess
import sys

import pytest

CALL = """
import sys
from scoremode_server.plugin import general_plugin
general_plugin()
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"vllm", "torch", "fastapi", "numpy"}))
print(*[name for name in sys.modules if name.startswith("scoremode")])
"""


@pytest.mark.processes
@pytest.mark.parametrize("plugins", [None, "", "lora", "scoremode-extras"])
def test_unless_it_is_named_it_prints_and_imports_nothing(plugins):
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
    assert not done.stderr
    imported, ours = done.stdout.splitlines()
    assert not imported
    assert ours.split() == ["scoremode_server", "scoremode_server.settings", "scoremode_server.plugin"]
