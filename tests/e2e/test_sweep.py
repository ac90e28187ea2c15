"""`ppl-client sweep` over a model that it serves and another whose server is running already."""

import json

import yaml
from safetensors.numpy import load_file

from local_server import CPU_ENVIRONMENT, CPU_FLAGS, has_gpu
from scoremode import ScoreClient
from scoremode.cli.main import main
from tests import oracle
from tests.shared_servers import TO_END
from tests.texts import WIKITEXT


def test_two_models_make_two_runs_and_a_report(server, disturbed_model, servers, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    # The folder of the running server, which records into it.
    (runs / "references").symlink_to(servers.references("shared"))
    plan = {
        "output": "runs",
        "text": {"text_file": str(WIKITEXT), "max_tokens": 1000},
        "windows": {"method": "disjoint", "context_length": 64},
        "serve": [*TO_END.flags, *(() if has_gpu() else CPU_FLAGS)],
        "env": {} if has_gpu() else CPU_ENVIRONMENT,
        "models": [{"name": "base", "model": str(disturbed_model)}, {"name": "other", "url": server}],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["sweep", str(tmp_path / "plan.yaml"), "--quiet"]) == 0
    base, other = (json.loads((runs / f"{name}.json").read_text()) for name in ("base", "other"))
    with ScoreClient(server) as client:
        client.delete_reference(other["reference"]["name"])
    assert (base["kind"], other["kind"]) == ("perplexity", "kld")
    assert other["statistics"]["kld"]["mean"] > 1e-3
    assert other["statistics"]["num_windows"] == 15
    # The same positions, scored as prompts and from the reference's hidden states: sums in another order.
    compared, alone = (load_file(runs / f"{name}.safetensors") for name in ("other", "base"))
    oracle.assert_close(compared["reference_logprobs"], alone["logprobs"])
    assert (runs / "report.html").is_file()
