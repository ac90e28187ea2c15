"""`/v1/kld`: what is refused, faults of a reference by name, and races, on an engine with real files."""

import asyncio
import base64
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from scoremode.kld import POSITION_DTYPES, statistics
from scoremode.wire.protocol import LOWEST_LOGPROB, ComputedBy
from scoremode_server.engine import engine as engine_module
from scoremode_server.errors import RequestError
from scoremode_server.references import comparison
from scoremode_server.references.comparer import Comparer
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference
from scoremode_server.rows import Rows
from tests.bad_inputs import KLD, REFERENCES
from tests.unit.server.engine.fake_engine import MAX_TOP, until
from tests.unit.server.light_app import check_error, client_of, error_of, events, light_app
from tests.unit.server.references.reference_engine import (
    HEAD_FORMAT,
    NUM_WINDOWS,
    TOKENS,
    ReferenceEngine,
    client_of_model,
    record,
)
from tests.unit.server.references.reference_setup import HEAD, create

BODY = {"reference": "base"}
BASE = f"{REFERENCES}/base"


@pytest.fixture
async def root(tmp_path: Path) -> Path:
    """A folder with a complete reference."""
    async with client_of_model(tmp_path) as client:
        await record(client)
    return tmp_path


async def post(engine: ReferenceEngine, **changes: Any) -> httpx.Response:
    """The answer of a server that has just started on the engine."""
    async with client_of(light_app(engine)) as client:
        return await client.post(KLD, json={**BODY, **changes})


async def compared(root: Path, **changes: Any) -> dict[str, Any]:
    """The answer of another model."""
    return (await post(ReferenceEngine(root, noise=0.1, fingerprint="of another"), **changes)).json()


def decoded(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


async def test_base64_has_the_values_of_json_to_the_last_bit(root):
    as_json = (await compared(root, top_logprobs=3))["data"]
    as_base64 = (await compared(root, top_logprobs=3, encoding_format="base64"))["data"]
    for plain, encoded in zip(as_json, as_base64, strict=True):
        assert plain.keys() == encoded.keys()
        for name, dtype in POSITION_DTYPES.items():
            assert decoded(encoded[name], dtype).astype(np.float64).tolist() == plain[name]
        for name in ("top_logprobs", "reference_top_logprobs"):
            assert encoded[name]["shape"] == [plain["num_scored"], 3]
            for field, dtype in (("token_ids", "<i4"), ("logprobs", "<f4")):
                values = decoded(encoded[name][field], dtype).reshape(-1, 3).tolist()
                assert values == [[entry[field.removesuffix("s")] for entry in row] for row in plain[name]]
            assert [row[0]["token_id"] for row in plain[name]] == plain[name.replace("logprobs", "token_ids")]


async def test_streams_parts_and_single_windows_are_the_whole(root, monkeypatch):
    """The client asks for one window at a time: a server reads the tokens once, and asks its workers once."""
    whole = await compared(root)
    assert (whole["windows"], whole["fingerprint"]) == ([0, NUM_WINDOWS], "of another")
    assert [window["index"] for window in whole["data"]] == list(range(NUM_WINDOWS))
    assert whole["num_scored"] == sum(window["num_scored"] for window in whole["data"]) == len(TOKENS) - 1
    assert whole["usage"]["prompt_tokens"] == 8 * (NUM_WINDOWS - 1) + len(TOKENS)
    part = await compared(root, windows=[2, 4])
    assert (part["data"], part["windows"], part["usage"]["prompt_tokens"]) == (whole["data"][2:4], [2, 4], 32)
    assert {position["window"] for position in part["statistics"]["most_divergent"]} == {2, 3}
    *windows, result = events(await post(ReferenceEngine(root, noise=0.1), stream=True))
    assert (windows, result["statistics"], "data" in result) == (whole["data"], whole["statistics"], False)
    engine, read, text = ReferenceEngine(root, noise=0.1), [], StoredReference.text.func
    monkeypatch.setattr(StoredReference.text, "func", lambda reference: read.append(reference) or text(reference))
    async with client_of(light_app(engine)) as client:
        for index in range(NUM_WINDOWS):
            answer = await client.post(KLD, json={**BODY, "windows": [index, index + 1]})
            assert answer.json()["data"] == whole["data"][index : index + 1]
    assert len(read) == 1


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_the_arrays_of_a_window_are_freed_when_it_is_written(root, monkeypatch, encoding_format):
    """Packed, they have the top tokens of every position; the last window's may still be there."""
    arrays, alive, received = list[weakref.ref[np.ndarray]](), list[int](), engine_module.received_rows

    def rows_received(*arguments: Any) -> Rows:
        rows = received(*arguments)
        arrays.append(weakref.ref(rows.table))
        return rows

    def counted(*values: Any) -> Any:
        alive.append(sum(array() is not None for array in arrays))
        return statistics(*values)

    monkeypatch.setattr(engine_module, "received_rows", rows_received)
    monkeypatch.setattr(comparison, "statistics", counted)
    whole = await compared(root, top_logprobs=3, encoding_format=encoding_format)
    assert (len(whole["data"]), len(arrays)) == (NUM_WINDOWS, NUM_WINDOWS)
    assert alive[0] <= 1


@pytest.mark.parametrize(
    ("field", "value", "more"),
    [
        *(("windows", value, {}) for value in ([0, 0], [-1, 2], [2, 1], [0, NUM_WINDOWS + 1], [7, 8])),
        *(("windows", [0, 1], {"as_noise_floor": True}), ("top_logprobs", MAX_TOP + 1, {})),
    ],
)
async def test_fields_that_do_not_fit_the_reference_are_refused(root, field, value, more):
    assert error_of(await post(ReferenceEngine(root), **{field: value}, **more))[:2] == (400, field)


def of_head(field: str, value: int) -> dict[str, Any]:
    """A change of a manifest."""
    return {"head": HEAD_FORMAT.model_copy(update={field: value})}


@pytest.mark.parametrize(
    ("changes", "longest", "identity", "status", "message"),
    [
        (of_head("vocab_size", 10**12), 16, {}, 400, f"a vocabulary of {10**12} tokens"),
        ({"result": None}, 16, {}, 400, "is not complete"),
        ({"head": HEAD}, 16, {}, 400, "has a vocabulary of 100 tokens, and the served model one of 1000"),
        (
            {},
            16,
            {"tokenizer_fingerprint": "another"},
            400,
            "another tokenizer: serve the model with --tokenizer ORIGINAL",
        ),
        ({}, 15, {}, 400, "has windows of 16 tokens, and the served model takes 15"),
        # It is the windows' files that do not fit their reference.
        *(
            (of_head("hidden_size", size), 16, {}, 409, "cannot be read")
            for size in (HEAD_FORMAT.hidden_size + 1, 10**12)
        ),
    ],
)
async def test_references_that_do_not_fit_the_server_are_refused(root, changes, longest, identity, status, message):
    reference = ReferenceDirectory(root).open("base")
    reference.save(reference.manifest.model_copy(update=changes))
    app = light_app(engine := ReferenceEngine(root, **identity))
    app.state.scoremode.limits = replace(app.state.scoremode.limits, max_model_len=longest)
    async with client_of(app) as client:
        check_error(await client.post(KLD, json=BODY), status, "reference", message)
    # Workers, which answer between two steps, are asked for files alone.
    assert bool(engine.asked) == (status == 409)


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("name", ["windows/000003.safetensors", "lm_head.safetensors", "tokens.safetensors"])
async def test_an_error_names_the_damaged_file(root, name, is_missing):
    path = root / "base" / name
    content = path.read_bytes()
    path.unlink() if is_missing else path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    status, param, message = error_of(await post(ReferenceEngine(root)))
    assert (status, param) == (409, "reference")
    assert message.startswith(f"reference 'base' cannot be read: {name}")
    if name.startswith("windows"):
        assert events(await post(ReferenceEngine(root), stream=True))[-1]["error"]["message"] == message
        assert (await compared(root, windows=[0, 3]))["num_scored"] == 15 + 8 + 8


async def test_nan_of_the_served_model_is_not_blamed_on_the_reference(root):
    engine = ReferenceEngine(root)
    engine.nan_at = 2
    # The ninth of a window's 16 tokens is the first target.
    check_error(await post(engine, windows=[1, 2]), 500, None, "for the token at position 10")


async def test_infinite_divergences_are_null(root):
    """Where the served model gives a target no probability, its logprob is minus infinity too."""
    engine, banned = ReferenceEngine(root), torch.tensor([TOKENS[20]])
    project = engine.model.project
    engine.model.project = lambda hidden_states: project(hidden_states).index_fill(1, banned, -math.inf)
    plain = (await post(engine, windows=[1, 3])).json()
    assert all(value is None for window in plain["data"] for value in window["kld"])
    assert all(math.isfinite(value) for window in plain["data"] for value in window["reverse_kld"])
    assert (plain["statistics"]["num_infinite_kld"], plain["statistics"]["kld"]["mean"]) == (16, None)
    assert min(value for window in plain["data"] for value in window["logprobs"]) == LOWEST_LOGPROB
    encoded = (await post(engine, windows=[1, 3], encoding_format="base64")).json()
    assert all(np.isinf(decoded(window["kld"], "<f4")).all() for window in encoded["data"])
    assert error_of(await post(engine, as_noise_floor=True))[:2] == (400, "as_noise_floor")


async def test_a_noise_floor_is_stored_with_its_own_models_reference(root, monkeypatch):
    orders, compare = [], Comparer.compare

    def note_order(comparer, reference, windows, settings, most):
        windows = list(windows)
        orders.append([window.mark.index for window in windows])
        return compare(comparer, reference, windows, settings, most)

    monkeypatch.setattr(Comparer, "compare", note_order)
    async with client_of_model(root) as client:
        refused = await post(ReferenceEngine(root, fingerprint="of another"), as_noise_floor=True)
        assert error_of(refused)[:2] == (400, "as_noise_floor")
        before = (await client.get(BASE)).json()
        figures = (await client.post(KLD, json={**BODY, "as_noise_floor": True})).json()["statistics"]["kld"]
        after = (await client.get(BASE)).json()
        decoded = await client.post(KLD, json={**BODY, "as_noise_floor": True, "lane": "decode"})
        of_lanes = (await client.get(BASE)).json()
    assert of_lanes["lane_noise_floors"]["decode"]["mean"] == decoded.json()["statistics"]["kld"]["mean"]
    assert {**of_lanes, "lane_noise_floors": {}, "disk_bytes": after["disk_bytes"]} == after
    # Next to others than when they were recorded.
    assert orders == [list(reversed(range(NUM_WINDOWS)))] * 2
    stored = [after["noise_floor"][name] for name in ("mean", "p99", "max", "num_scored")]
    assert stored == [figures["mean"], figures["p99"], figures["max"], len(TOKENS) - 1]
    assert {**after, "noise_floor": None, "disk_bytes": before["disk_bytes"]} == before


@pytest.mark.parametrize(
    ("num_tokens", "lane", "recorded", "compared"),
    [(60, "prefill", 7, 2), (24, "prefill", 2, 1), (16, "prefill", 1, 1), (60, "decode", 7, 7)],
)
async def test_a_noise_floor_has_fewer_windows_in_flight_than_its_recording(
    tmp_path, monkeypatch, num_tokens, lane, recorded, compared
):
    """In another lane the kernels are others anyway, and need many sequences."""
    now, most, compute = 0, 0, ReferenceEngine._compute

    async def counted(engine, *arguments):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        output = await compute(engine, *arguments)
        now -= 1
        return output

    monkeypatch.setattr(ReferenceEngine, "_compute", counted)
    async with client_of_model(tmp_path) as client:
        await record(client, prompt=TOKENS[:num_tokens])
        of_recording, most = most, 0
        await client.post(KLD, json={**BODY, "as_noise_floor": True, "lane": lane})
    assert (of_recording, most) == (recorded, compared)


@pytest.mark.parametrize(
    ("identity", "most"),
    [({"dtype": "float32"}, 0.05), ({"dtype": "bfloat16"}, 0.2), ({"dtype": "float32", "quantization": "fp8"}, 0.2)],
)
@pytest.mark.parametrize(("share", "status"), [(0.9, 200), (1.1, 400)])
async def test_what_rounding_cannot_do_is_no_noise_floor(tmp_path, identity, most, share, status):
    """The same fingerprint on a server that computes otherwise, by more noise the more nats."""
    native, other = (ComputedBy(device="cpu", implementation=name) for name in ("vllm", "transformers"))
    async with client_of_model(tmp_path, computed_by=native, **identity) as client:
        await record(client)
    # KL divergence is a square of small noise.
    async with client_of_model(tmp_path, 0.01, **identity) as client:
        mean = (await client.post(KLD, json=BODY)).json()["statistics"]["kld"]["mean"]
    noise = 0.01 * math.sqrt(share * most / mean)
    async with client_of_model(tmp_path, noise, computed_by=other, **identity) as client:
        answer = await client.post(KLD, json={**BODY, "as_noise_floor": True})
        floor = (await client.get(BASE)).json()["noise_floor"]
    assert (answer.status_code, floor is None) == (status, status == 400)
    if floor is None:
        message = error_of(answer)[2]
        assert f"in {identity['dtype']} gives at most {most}, so this is not a noise floor" in message
        assert "as it was recorded (implementation is 'transformers' instead of 'vllm')" in message


async def test_noise_floors_of_two_lanes_measured_at_once_are_both_stored(root):
    app = light_app(engine := ReferenceEngine(root))
    app.state.scoremode.lanes = {"prefill": 0, "decode": 1, "verify": 3}
    engine.let_go.clear()
    async with client_of(app) as client:
        bodies = [{**BODY, "as_noise_floor": True, "lane": lane} for lane in ("decode", "verify")]
        measuring = [asyncio.create_task(client.post(KLD, json=body)) for body in bodies]
        await until(engine.has_any.is_set)
        # Both read the reference before the engine has answered either.
        await asyncio.sleep(0.1)
        engine.let_go.set()
        means = [answer.json()["statistics"]["kld"]["mean"] for answer in await asyncio.gather(*measuring)]
        floors = (await client.get(BASE)).json()["lane_noise_floors"]
    assert {lane: floor["mean"] for lane, floor in floors.items()} == dict(
        zip(("decode", "verify"), means, strict=True)
    )


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_reference_may_be_deleted_or_replaced_while_it_is_compared(root, replaced):
    engine = ReferenceEngine(root)
    engine.let_go.clear()
    async with client_of(light_app(engine)) as client:
        comparing = asyncio.create_task(client.post(KLD, json=BODY))
        await until(engine.has_any.is_set)
        await client.delete(BASE)
        if replaced:
            create(root, "base", "two")
        engine.let_go.set()
        assert error_of(await comparing)[:2] == (404, "reference")


async def test_a_new_reference_of_the_same_name_is_read_and_left_alone(root):
    async with client_of(app := light_app(ReferenceEngine(root))) as client:
        stored = app.state.scoremode_references.stored
        old = await stored.open("base")
        for num_tokens in (60, 50):
            await client.delete(BASE)
            new = await record(client, prompt=TOKENS[:num_tokens])
            with pytest.raises(RequestError, match="deleted meanwhile"):
                await stored.save(old, lambda _: {"noise_floor": None})
            assert (await client.get(BASE)).json() == new
            assert (await client.post(KLD, json=BODY)).json()["num_scored"] == num_tokens - 1
