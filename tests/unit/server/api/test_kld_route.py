"""`/v1/kld`: comparing, refusing, and naming a reference's fault, on an engine with real files."""

import asyncio
import base64
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from scoremode.kld import POSITION_DTYPES
from scoremode.protocol import LOWEST_LOGPROB
from scoremode_server.references.directory import ReferenceDirectory, StoredReference
from tests.bad_inputs import KLD
from tests.unit.server.api.calls import (
    NUM_WINDOWS,
    TOKENS,
    app_of,
    client_of,
    error_of,
    events,
    is_idle,
    leaving,
    record,
)
from tests.unit.server.prefix_cache.fake_engine import MAX_TOP
from tests.unit.server.references.reference_setup import HEAD, create
from tests.unit.server.scoring.fake_reference_engine import HEAD_FORMAT, ReferenceEngine

BODY: dict[str, Any] = {"reference": "base"}


@pytest.fixture
async def root(tmp_path: Path) -> Path:
    """A folder with a complete reference."""
    async with client_of(app_of(ReferenceEngine(tmp_path))) as client:
        await record(client)
    return tmp_path


async def post(engine: ReferenceEngine, identity: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    """The answer of a server that has just started on the engine."""
    async with client_of(app_of(engine, **(identity or {}))) as client:
        return await client.post(KLD, json={**BODY, **changes})


async def compared(root: Path, noise: float = 0.0, **changes: Any) -> dict[str, Any]:
    answer = await post(ReferenceEngine(root, noise), {"fingerprint": f"noise {noise}"}, **changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


def decoded(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_base64_has_the_values_of_json_to_the_last_bit(root, top):
    as_json = (await compared(root, 0.1, top_logprobs=top))["data"]
    as_base64 = (await compared(root, 0.1, top_logprobs=top, encoding_format="base64"))["data"]
    for plain, encoded in zip(as_json, as_base64, strict=True):
        assert plain.keys() == encoded.keys()
        for name, dtype in POSITION_DTYPES.items():
            assert decoded(encoded[name], dtype).astype(np.float64).tolist() == plain[name]
        assert ("top_logprobs" in plain) == (top > 0)
        for name in ("top_logprobs", "reference_top_logprobs") if top else ():
            assert encoded[name]["shape"] == [plain["num_scored"], top]
            for field, dtype in (("token_ids", "<i4"), ("logprobs", "<f4")):
                values = decoded(encoded[name][field], dtype).reshape(encoded[name]["shape"]).tolist()
                assert values == [[entry[field.removesuffix("s")] for entry in row] for row in plain[name]]
            first = [row[0]["token_id"] for row in plain[name]]
            assert first == plain[name.replace("logprobs", "token_ids")]


async def test_streams_parts_and_single_windows_are_the_whole(root):
    """The client asks for one window at a time: a server then reads the tokens once, and asks its workers once."""
    whole = await compared(root, 0.1)
    assert (whole["windows"], whole["fingerprint"]) == ([0, NUM_WINDOWS], "noise 0.1")
    assert [window["index"] for window in whole["data"]] == list(range(NUM_WINDOWS))
    assert whole["num_scored"] == sum(window["num_scored"] for window in whole["data"]) == len(TOKENS) - 1
    assert whole["usage"]["prompt_tokens"] == 16 * (NUM_WINDOWS - 1) + len(TOKENS) - 8 * (NUM_WINDOWS - 1)
    *windows, result = events(await post(ReferenceEngine(root, 0.1), stream=True))
    assert windows == whole["data"]
    assert "data" not in result
    assert result["statistics"] == whole["statistics"]
    part = await compared(root, 0.1, windows=[2, 4])
    assert (part["data"], part["windows"], part["usage"]["prompt_tokens"]) == (whole["data"][2:4], [2, 4], 32)
    assert {position["window"] for position in part["statistics"]["most_divergent"]} == {2, 3}
    engine, read = ReferenceEngine(root, 0.1), []
    with pytest.MonkeyPatch.context() as patch:
        text = StoredReference.text.func
        patch.setattr(StoredReference.text, "func", lambda reference: read.append(reference) or text(reference))
        async with client_of(app_of(engine)) as client:
            for index in range(NUM_WINDOWS):
                answer = await client.post(KLD, json={**BODY, "windows": [index, index + 1]})
                assert answer.json()["data"] == whole["data"][index : index + 1]
    assert (len(read), engine.asked.count("scoremode_head_bytes")) == (1, 1)


OUTSIDE = f"within the {NUM_WINDOWS} of the reference, not "


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        *(
            ({"windows": windows}, "windows", f"{OUTSIDE}{windows}")
            for windows in ([0, 0], [-1, 2], [2, 1], [0, NUM_WINDOWS + 1], [NUM_WINDOWS, NUM_WINDOWS + 1])
        ),
        ({"windows": [0, 1], "as_noise_floor": True}, "windows", "a noise floor is of all windows"),
        ({"top_logprobs": MAX_TOP + 1}, "top_logprobs", str(MAX_TOP)),
    ],
)
async def test_fields_that_do_not_fit_the_reference_are_refused(root, fields, param, message):
    status, name, text = error_of(await post(ReferenceEngine(root), **fields))
    assert (status, name) == (400, param)
    assert message in text


@pytest.mark.parametrize(
    ("changes", "longest", "identity", "message"),
    [
        ({"result": None}, 16, {}, "reference 'base' is not complete"),
        ({"head": None}, 16, {}, "reference 'base' is not complete"),
        ({"head": HEAD}, 16, {}, "has a vocabulary of 100 tokens, and the served model one of 1000"),
        ({"head": HEAD_FORMAT.model_copy(update={"hidden_size": 9})}, 16, {}, "bytes, and this server reserved 32000"),
        ({}, 16, {"tokenizer_fingerprint": "another"}, "was made with another tokenizer"),
        ({}, 15, {}, "has windows of 16 tokens, and the served model takes 15"),
    ],
)
async def test_references_that_do_not_fit_the_server_are_refused(root, changes, longest, identity, message):
    reference = ReferenceDirectory(root).open("base")
    reference.save(reference.manifest.model_copy(update=changes))
    app = app_of(ReferenceEngine(root), **identity)
    app.state.scoremode.limits = replace(app.state.scoremode.limits, max_model_len=longest)
    async with client_of(app) as client:
        status, param, text = error_of(await client.post(KLD, json=BODY))
    assert (status, param) == (400, "reference")
    assert message in text


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", [cut, flip_a_bit, Path.unlink])
@pytest.mark.parametrize(
    "name", ["windows/000003.safetensors", "lm_head.safetensors", "tokens.safetensors", "manifest.json"]
)
async def test_an_error_names_the_damaged_file(root, damage, name):
    damage(root / "base" / name)
    status, param, message = error_of(await post(ReferenceEngine(root)))
    assert param == "reference"
    if (name, damage) == ("manifest.json", Path.unlink):
        assert (status, message) == (404, "there is no reference 'base'")
        return
    assert status == 409
    assert message.startswith(f"reference 'base' is damaged: {name}")
    streamed = await post(ReferenceEngine(root), stream=True)
    error = events(streamed)[-1]["error"] if streamed.status_code == 200 else streamed.json()["error"]
    assert error["message"] == message
    if name.startswith("windows"):
        assert (await compared(root, windows=[0, 3]))["num_scored"] == 15 + 8 + 8


async def test_nan_of_the_served_model_is_not_blamed_on_the_reference(root):
    engine = ReferenceEngine(root)
    engine.nan_at = 2
    status, _, message = error_of(await post(engine, windows=[1, 2]))
    assert status == 500
    # The ninth of a window's 16 tokens is the first target.
    assert message.endswith("for the token at position 10")


async def test_infinite_divergences_are_null(root):
    """Where the served model gives a target no probability, its logprob is minus infinity too."""
    engine, banned = ReferenceEngine(root), torch.tensor([TOKENS[20]])
    project = engine.model.project
    engine.model.project = lambda hidden_states: project(hidden_states).index_fill(1, banned, -math.inf)
    plain = (await post(engine, windows=[1, 3])).json()
    assert all(value is None for window in plain["data"] for value in window["kld"])
    assert all(math.isfinite(value) for window in plain["data"] for value in window["reverse_kld"])
    assert plain["statistics"]["num_infinite_kld"] == plain["num_scored"] == 16
    assert plain["statistics"]["kld"]["mean"] is None
    assert min(value for window in plain["data"] for value in window["logprobs"]) == LOWEST_LOGPROB
    encoded = (await post(engine, windows=[1, 3], encoding_format="base64")).json()
    assert all(np.isinf(decoded(window["kld"], "<f4")).all() for window in encoded["data"])
    answer = error_of(await post(engine, as_noise_floor=True))
    assert answer == (400, "as_noise_floor", "the noise floor is infinite")


async def test_a_noise_floor_is_stored_with_its_own_model_s_reference(root):
    engine = ReferenceEngine(root)
    async with client_of(app_of(engine)) as client:
        before = (await client.get("/v1/references/base")).json()
        status, param, message = error_of(await post(engine, {"fingerprint": "another"}, as_noise_floor=True))
        assert (status, param) == (400, "as_noise_floor")
        assert "this server serves another" in message
        assert (await client.get("/v1/references/base")).json() == before
        answer = (await client.post(KLD, json={**BODY, "as_noise_floor": True})).json()
        after = (await client.get("/v1/references/base")).json()
    assert [window["index"] for window in answer["data"]] == list(range(NUM_WINDOWS))
    floor, figures = after["noise_floor"], answer["statistics"]["kld"]
    assert [floor[name] for name in ("mean", "p99", "max")] == [figures[name] for name in ("mean", "p99", "max")]
    assert floor["num_scored"] == len(TOKENS) - 1
    changed = {"noise_floor": None, "disk_bytes": before["disk_bytes"]}
    assert {**after, **changed} == before


DELETED = "'base' was deleted meanwhile, and another has its name now"


@pytest.mark.parametrize("again", [False, True])
async def test_a_reference_may_be_deleted_during_a_comparison(root, again):
    """And another may have its name by then."""
    engine = ReferenceEngine(root)
    engine.held.clear()
    async with client_of(app_of(engine)) as client:
        comparing = asyncio.create_task(client.post(KLD, json=BODY))
        await engine.has_any.wait()
        await client.delete("/v1/references/base")
        if again:
            create(root, "base", "two")
        engine.held.set()
        status, param, message = error_of(await comparing)
    assert (status, param) == (409 if again else 404, "reference")
    assert message == (f"reference {DELETED}" if again else "there is no reference 'base'")


async def test_a_new_reference_of_the_same_name_is_read_and_left_alone(root):
    async with client_of(app := app_of(ReferenceEngine(root))) as client:
        stored = app.state.scoremode.references.stored
        old, first = await stored.open("base"), (await client.post(KLD, json=BODY)).json()
        await client.delete("/v1/references/base")
        new = await record(client, prompt=TOKENS[10:])
        with pytest.raises(Exception, match=DELETED):
            await stored.save(old, {"noise_floor": None})
        assert (await client.get("/v1/references/base")).json() == new
        second = (await client.post(KLD, json=BODY)).json()
    assert second["num_scored"] == first["num_scored"] - 10
    assert second["data"][0]["token_ids"][0] == TOKENS[11]


async def test_a_client_that_leaves_ends_its_comparison(root):
    engine, leave = ReferenceEngine(root), asyncio.Event()
    engine.held.clear()
    serving = asyncio.create_task(leaving(app := app_of(engine), KLD, BODY, leave))
    await engine.has_any.wait()
    assert not is_idle(app)
    leave.set()
    await serving
    while not is_idle(app):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert engine.aborted
    assert not engine.computed
