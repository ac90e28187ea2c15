"""References with layers over HTTP: recorded, checked, resumed from, and refused, on an engine with real files."""

import numpy as np
import pytest

from scoremode.wire.references import LayerBlock
from scoremode_server.references import service
from tests.bad_inputs import KLD, REFERENCES
from tests.unit.server.light_app import check_error, client_of, error_of, events, light_app
from tests.unit.server.references.reference_engine import (
    BODY,
    LAYERS,
    NUM_WINDOWS,
    ReferenceEngine,
    record,
)
from tests.unit.server.references.reference_setup import HIDDEN, MODEL, files

BASE = f"{REFERENCES}/base"
LAYERED = {**BODY, "layers": True}
NUM_BOUNDARIES = 3
THIRD = [LayerBlock(modules=["model.layers.1.mlp"], kind="mlp")]
WINDOW_TOKENS = 15
"""The number of tokens of each window that are fed."""


async def test_a_recording_keeps_the_stream_and_its_floor(engine, client):
    described = (await client.get("/v1/layers")).json()
    assert described.pop("free_bytes") > 0
    assert described == {"object": "layers", **LAYERS.model_dump()}
    recorded = await record(client, layers=True)
    assert recorded["layers"] == {**LAYERS.model_dump(), "floor": [0.0] * NUM_BOUNDARIES}
    reference = engine.directory.open("base")
    for index in range(NUM_WINDOWS):
        tokens, first = reference.text.window(index)
        states = engine.model.hidden_states(tokens[:-1])
        assert np.array_equal(reference.read_shard(index)[0], states[first - 1 :])
        for boundary in range(NUM_BOUNDARIES):
            assert np.array_equal(reference.read_stream(index, boundary), states)
    # The check of the first window is fed other tokens, first without the stream.
    assert engine.computed[NUM_WINDOWS:] == [0] * (1 + NUM_BOUNDARIES)
    other, (window, _) = engine.requests[-1][0], reference.text.window(0)
    assert len(other) == WINDOW_TOKENS
    assert not (np.array(other) == window[:-1]).any()
    engine.computed.clear()
    assert events(await client.post(REFERENCES, json={**LAYERED, "stream": True})) == [recorded]
    assert engine.computed == []


async def test_damaged_streams_are_recorded_again(engine, client):
    await record(client, layers=True)
    before, reference = files(engine.directory.root), engine.directory.open("base")
    reference.stream(2, 1).unlink()
    path = reference.stream(3, 0)
    path.write_bytes(path.read_bytes()[:-1])
    assert error_of(await client.post(KLD, json={"reference": "base", "from_boundary": 1}))[:2] == (409, "reference")
    engine.computed.clear()
    await record(client, layers=True)
    assert sorted(engine.computed) == [2, 3]
    assert files(engine.directory.root) == before


@pytest.mark.parametrize(
    ("fault", "status", "param", "message"),
    [
        ("leak", 400, "layers", "layers: LinearLayer cannot be measured: resumed from boundary"),
        ("calls_no_hooks", 507, "name", "0 of 15 tokens passed boundary 0"),
    ],
)
async def test_a_model_that_the_stream_does_not_determine_is_refused(engine, client, fault, status, param, message):
    """The error names its layers' class, and the reference stays incomplete."""
    setattr(engine.model, fault, True)
    check_error(await client.post(REFERENCES, json=LAYERED), status, param, message)
    assert (await client.get(BASE)).json()["complete"] is False
    assert error_of(await client.post(KLD, json={"reference": "base", "from_boundary": 0}))[:2] == (400, "reference")


async def test_a_window_whose_stream_is_not_replaced_has_no_divergence(engine, client):
    await record(client, layers=True)
    engine.model.calls_no_hooks = True
    check_error(await client.post(KLD, json={"reference": "base", "from_boundary": 0}), 500, None, "position 1")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"from_boundary": 3}, "from_boundary: 3 is not from 0 to 2, the boundaries of reference 'base'"),
        ({"from_boundary": 0, "lane": "decode"}, "from_boundary: the lane must be prefill, not decode"),
        ({"from_boundary": 0, "as_noise_floor": True}, "from_boundary: a noise floor needs the whole model"),
    ],
)
async def test_requests_that_cannot_be_resumed_are_refused(client, body, message):
    await record(client, layers=True)
    refused = await client.post(KLD, json={"reference": "base", **body})
    assert error_of(refused) == (400, "from_boundary", message)


async def test_a_reference_without_layers_is_not_resumed_from(client):
    await record(client)
    resumed = await client.post(KLD, json={"reference": "base", "from_boundary": 0})
    check_error(resumed, 400, "from_boundary", "was recorded without layers")
    check_error(await client.post(REFERENCES, json=LAYERED), 409, "layers", "recorded without layers: delete it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": [*LAYERS.blocks, *THIRD]}, f"the served model is of 3 blocks with a hidden size of {HIDDEN}"),
        ({"hidden_size": 2 * HIDDEN}, f"the served model is of 2 blocks with a hidden size of {2 * HIDDEN}"),
        ({"blocks": LAYERS.blocks[::-1]}, "the served model is cut at boundaries [0, 2] of it alone"),
    ],
)
async def test_another_models_layers_are_refused(tmp_path, client, changes, message):
    await record(client, layers=True)
    other = ReferenceEngine(tmp_path, fingerprint="of another")
    other.layers = LAYERS.model_copy(update=changes).model_dump()
    async with client_of(light_app(other)) as of_other:
        refused = error_of(await of_other.post(KLD, json={"reference": "base", "from_boundary": 1}))
    start = f"from_boundary: reference 'base' is of 2 blocks with a hidden size of {HIDDEN}, and "
    assert refused == (400, "from_boundary", f"{start}{message}")


async def test_models_cut_at_other_places_are_resumed_at_those_that_both_have(tmp_path, client):
    await record(client, layers=True)
    whole = ReferenceEngine(tmp_path, fingerprint="of another")
    whole.layers = LAYERS.merged([0, 2]).model_dump()
    crossed = []
    whole.model.through_layers = lambda stream, sink: crossed.append((sink.mark.boundaries, [*sink.streams])) or stream
    async with client_of(light_app(whole)) as of_whole:
        for boundary in (0, 2):
            await of_whole.post(KLD, json={"reference": "base", "windows": [0, 1], "from_boundary": boundary})
    assert crossed == [((0,), [0]), ((1,), [1])]


@pytest.mark.parametrize(("leak", "share"), [(0.0, 1.0), (0.5, 1.0), (0.0, 0.0)])
async def test_cuts_of_a_model_that_did_not_record_are_checked(tmp_path, engine, leak, share):
    """A reference without vLLM does not show whether the layers of vLLM's class follow from their stream, and from all
    of it."""
    engine.identity = MODEL.model_copy(update={"vllm_version": ""})
    async with client_of(light_app(engine)) as of_transformers:
        await record(of_transformers, layers=True)
    other = ReferenceEngine(tmp_path, 0.1, fingerprint="of another")
    other.model.leak, through_layers = leak, other.model.through_layers
    other.model.through_layers = lambda stream, sink: share * through_layers(stream, sink)
    async with client_of(light_app(other)) as of_other:
        answers = [await of_other.post(KLD, json={"reference": "base", "from_boundary": 1}) for _ in range(2)]
    if leak or not share:
        for answer in answers:
            check_error(answer, 400, "from_boundary", "from_boundary: LinearLayer cannot be measured: resumed from")
    else:
        # Once: the first window twice without a stream and from each boundary.
        assert len(other.computed) == 2 * NUM_WINDOWS + 2 * (1 + NUM_BOUNDARIES)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("model_config", "enforce_eager", False, "start the server with --enforce-eager"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
        ("parallel_config", "use_ubatching", True, "micro-batching"),
        ("", "speculative_config", object(), "speculative decoding"),
    ],
)
async def test_servers_that_call_no_hooks_on_whole_layers_are_refused(engine, client, part, name, value, message):
    setattr(getattr(engine.vllm_config, part) if part else engine.vllm_config, name, value)
    for answer in (await client.get("/v1/layers"), await client.post(REFERENCES, json=LAYERED)):
        check_error(answer, 400, "layers", message)
    check_error(await client.post(REFERENCES, json={**BODY, "routes": True}), 400, "routes", message)
    assert (await client.get(REFERENCES)).json()["data"] == []


async def test_routers_that_see_tokens_of_other_ranks_are_refused(engine, client):
    engine.vllm_config.parallel_config.data_parallel_size = 2
    check_error(await client.post(REFERENCES, json={**BODY, "routes": True}), 400, "routes", "data parallelism")


async def test_a_model_whose_layers_cannot_be_cut_is_refused_by_their_class(engine, client):
    engine.layers = "OddLayer: its residual has another shape than its hidden_states"
    message = f"layers: this model's layers cannot be cut: {engine.layers}"
    assert error_of(await client.post(REFERENCES, json=LAYERED)) == (400, "layers", message)


async def test_a_disk_without_space_is_refused_before_anything_is_recorded(engine, client, monkeypatch):
    # The last window has four tokens fewer.
    num_bytes = (NUM_WINDOWS * WINDOW_TOKENS - 4) * NUM_BOUNDARIES * HIDDEN * 2
    usage = type("Usage", (), {"free": num_bytes - 1})
    monkeypatch.setattr(service.shutil, "disk_usage", lambda root: usage)
    check_error(await client.post(REFERENCES, json=LAYERED), 507, "layers", "its layers need 0.0 GiB")
    assert (await client.get(REFERENCES)).json()["data"] == []
