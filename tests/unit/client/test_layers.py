"""Costs of layers as a library and on the command line, against divergences that are worked out anew here."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from fake_server import (
    FLOOR,
    LAYERS,
    MODULES,
    NOISE,
    REST_OF_NOISE,
    TEXT,
    FakeServer,
    clients_of,
    compare,
    serve,
    with_reference,
)
from safetensors.numpy import save_file

from scoremode.cli.main import main
from scoremode.errors import RunError, ServersDifferError
from scoremode.runs import Cost, make_recipe, measure_layers, shares
from scoremode.wire.references import ReferenceLayers

NUM_PLACES = len(REST_OF_NOISE)


@pytest.fixture
async def server() -> FakeServer:
    return await with_reference(layers=True)


def sums_of(server: FakeServer) -> np.ndarray:
    """The sums of divergences [windows, places]."""
    windows = server.references["base"].windows
    return np.array([[compare(*each, NOISE * rest).kld.sum(dtype="f8") for rest in REST_OF_NOISE] for each in windows])


async def measure(*servers: FakeServer, **settings):
    return await measure_layers(clients_of(servers), "base", **settings)


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_costs_add_up_to_the_whole_divergence(server, num_servers):
    others = [FakeServer(server.references, noise=NOISE) for _ in range(num_servers - 1)]
    progress = []
    found = await measure(server, *others, on_progress=progress.append)
    sums, sizes = sums_of(server), [len(tokens) - first for tokens, first in server.references["base"].windows]
    assert np.allclose(found.kld_sums, sums, rtol=1e-12)
    whole = sums[:, 0].sum() / sum(sizes)
    assert found.whole.cost == pytest.approx(whole, rel=1e-12)
    assert sum(part.cost for part in found.parts) == pytest.approx(whole, rel=1e-12)
    divergences = [*(sums.sum(0) / sum(sizes)), 0]
    assert [part.cost for part in found.parts] == pytest.approx((-np.diff(divergences)).tolist(), rel=1e-9)
    assert [part.name for part in found.parts] == ["embeddings", *MODULES, "head"]
    assert [part.floor for part in found.parts] == [0, 0, 0, FLOOR[3], FLOOR[3], FLOOR[4]]
    # The third block has no noise of its own.
    assert [part.is_above_floor for part in found.parts] == [True, True, True, False, True, True]
    assert (progress[-1].windows_done, progress[-1].num_windows) == (len(sizes) * NUM_PLACES,) * 2


async def test_errors_are_paired_and_clustered_by_windows(server):
    found = await measure(server)
    sums, sizes = sums_of(server), np.array(found.window_sizes)
    # Cluster-robust, of the difference of two places in each window.
    residuals = (sums[:, 2] - sums[:, 3]) - found.blocks[1].cost * sizes
    count = len(sizes)
    expected = (count / (count - 1) * (residuals**2).sum()) ** 0.5 / sizes.sum()
    assert found.blocks[1].stderr == pytest.approx(expected, rel=1e-9)
    kept = found.without(found.blocks[1:2])
    assert kept.cost == pytest.approx(found.whole.cost - found.blocks[1].cost, rel=1e-9)


async def test_only_boundaries_that_the_served_model_has_too_are_measured(server):
    sums = sums_of(server)[:, [0, 1, 3, 5]]
    layers = ReferenceLayers.model_validate(LAYERS)
    server.served_layers = {"blocks": layers.merged([0, 2, 4]).model_dump()["blocks"]}
    found = await measure(server)
    assert np.allclose(found.kld_sums, sums, rtol=1e-12)
    assert [part.name for part in found.blocks] == [" + ".join(MODULES[:2]), " + ".join(MODULES[2:])]
    assert [(part.kind, part.floor) for part in found.blocks] == [("layer", 0), ("layer", FLOOR[4])]
    server.served_layers["hidden_size"] = 16
    with pytest.raises(RunError, match="is of 4 blocks with a hidden size of 8, and the served model of 2 blocks with"):
        await measure(server)


async def test_what_cannot_be_measured_is_refused(server):
    with pytest.raises(RunError, match="was recorded without layers: record it"):
        await measure(await with_reference())
    with pytest.raises(ServersDifferError, match="differs from that at"):
        await measure(server, await with_reference(layers=True, context_length=16))


def test_recording_says_what_it_takes_and_has_windows_of_its_own(capsys):
    with serve(server := FakeServer()) as url:
        options = ["--text", TEXT, "--reference", "base", "--layers", "--quiet", "--context-length", "16"]
        assert main(["record", "--url", url, *options]) == 0
    (body,) = [body for method, path, body in server.requests if (method, path) == ("POST", "/v1/references")]
    assert (body["layers"], body["method"], body["max_tokens"], body["context_length"]) == (True, "disjoint", 4097, 16)
    # Five boundaries of eight float32 for each token.
    assert f"take at most {4097 * 5 * 8 * 4 / 2**30:.2f} GiB" in capsys.readouterr().err


def test_an_interrupted_run_is_resumed(server, tmp_path: Path, capsys):
    output = tmp_path / "layers.json"
    server.allowed = 9
    command = ["layers", "--reference", "base", "--output", str(output), "--quiet", "--retry-for", "0"]
    with serve(server) as url:
        assert main([*command, "--url", url, "--concurrency", "1"]) == 1
        assert "windows: the same command with --resume resumes it" in capsys.readouterr().err
        server.allowed = 10**9
        assert main([*command, "--url", url, "--resume"]) == 0
    assert len(server.compared) == len(server.references["base"].windows) * NUM_PLACES
    table = capsys.readouterr().out
    assert table.index(MODULES[1]) < table.index(MODULES[0]) < table.index(MODULES[2])
    (line,) = [line for line in table.splitlines() if line.startswith(MODULES[2])]
    assert line.endswith("not above the floor")
    rows = [line.split() for line in table.split("so far\n")[1].split("\nshares")[0].splitlines()]
    own, so_far = zip(*([float(cell[:-1]) for cell in row if cell.endswith("%")] for row in rows), strict=True)
    # Each is rounded to 0.1.
    assert so_far == pytest.approx(np.cumsum(own), abs=0.3)
    assert so_far[-1] == 100
    assert "decide nothing" not in table, "it has four windows or more"


def test_no_share_exceeds_the_whole():
    """Where some costs are negative, the others sum up to more than the whole divergence."""
    parts = [Cost(cost, None) for cost in (0.06, 0.05, 0.0, -0.01)]
    assert shares(parts) == pytest.approx([6 / 11, 5 / 11, 0, 0])
    assert shares([Cost(0.0, None)]) == [0]


def checkpoint(folder: Path, sizes: dict[str, int]) -> Path:
    """A folder with tensors of these numbers of bytes, one per module."""
    folder.mkdir()
    save_file({f"{name}.weight": np.zeros(size, np.int8) for name, size in sizes.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    """The original and its quantized copy. The second block, with the largest cost, is a hundred times as large as the
    others; all have another prefix."""
    sizes = {f"language_{name}.proj": 10_000 if name == MODULES[1] else 100 for name in MODULES}
    quantized = {name: size // 4 for name, size in sizes.items()}
    return checkpoint(tmp_path / "base", sizes), checkpoint(tmp_path / "quantized", quantized)


async def test_a_recipe_keeps_the_most_nats_per_byte(server, checkpoints):
    found = await measure(server)
    one = make_recipe(found, *checkpoints, num_blocks=1)
    # The blocks above the floor are the first, second and fourth.
    per_byte = {0: found.blocks[0].cost / 75, 1: found.blocks[1].cost / 7500, 3: found.blocks[3].cost / 75}
    best = max(per_byte, key=lambda index: per_byte[index])
    assert best != 1
    assert [each.block.name for each in one.kept] == [MODULES[best]]
    assert one.extra_bytes == 75
    assert one.predicted.cost == pytest.approx(found.whole.cost - found.blocks[best].cost, rel=1e-9)
    # The module or what is below it: OPT's layers have linear layers of their own.
    pattern = MODULES[best].replace(".", r"\.") + r"(\..*)?$"
    assert one.ignore == ["lm_head", f"re:^language_{pattern}"]
    assert json.loads(one.quantization_config) == {"ignore": [f"re:^{pattern}"]}
    small = make_recipe(found, *checkpoints, extra_bytes=200)
    assert {each.block.name for each in small.kept} == {MODULES[0], MODULES[3]}
    assert len(make_recipe(found, *checkpoints, num_blocks=9).kept) == 3


async def test_checkpoints_that_do_not_fit_are_refused(server, checkpoints, tmp_path):
    found, (base_weights, weights) = await measure(server), checkpoints
    with pytest.raises(RunError, match="no block costs more than its floor and is smaller"):
        make_recipe(found, weights, weights, num_blocks=1)
    other = checkpoint(tmp_path / "other", {"model.layers.0.attn": 8})
    with pytest.raises(RunError, match=rf"has 0 modules that could be {MODULES[0]}"):
        make_recipe(found, other, weights, num_blocks=1)
    (weights / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes()[:60])
    with pytest.raises(RunError, match="is not a safetensors file, or is cut short"):
        make_recipe(found, base_weights, weights, num_blocks=1)


def test_a_recipe_is_printed(server, checkpoints, capsys):
    base_weights, weights = checkpoints
    folders = ["--base-weights", str(base_weights), "--weights", str(weights)]
    with serve(server) as url:
        command = ["layers", "--url", url, "--reference", "base", "--quiet", "--keep", "1", *folders]
        assert main(command) == 0
    printed = capsys.readouterr().out
    assert "Keep 1 blocks in 16 bits" in printed
    assert 'for an unknown scheme:\nignore: ["lm_head", "re:^language_model' in printed
    # A recipe of llm-compressor, which its own library of schemes reads.
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, group_size=64))}
    config = {
        "ignore": ["lm_head", "model.vision"],
        "config_groups": {"group_0": groups["group_0"].model_dump(mode="json")},
    }
    (weights / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "compressed-tensors", **config}})
    )
    with serve(server) as url:
        assert main([*command[:2], url, *command[3:]]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out.split("recipe.yaml:\n")[1].split("\n\n")[0])
    fields = recipe["quantization_stage"]["quantization_modifiers"]["QuantizationModifier"]
    assert {name: QuantizationScheme(**group) for name, group in fields["config_groups"].items()} == groups
    assert fields["ignore"][:2] == ["lm_head", "model.vision"]
    assert re.fullmatch(fields["ignore"][2].removeprefix("re:"), "language_" + MODULES[0] + ".proj")
    # Before anything is measured: there is no server.
    (weights / "model.safetensors").unlink()
    assert main(command) == 1
    assert "has no safetensors files" in capsys.readouterr().err
