"""`/v1/kld`: comparing, refusing, and what is told of a reference that is at fault, on an engine with real files."""

import asyncio
import base64
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.kld import POSITION_DTYPES, KldPositions, statistics
from scoremode.protocol import LOWEST_LOGPROB
from scoremode_server.references.directory import ReferenceDirectory, StoredReference
from tests.unit.server.api.light_app import light_app
from tests.unit.server.api.reference_requests import (
    NUM_WINDOWS,
    TOKENS,
    app_of,
    client_of,
    error_of,
    events,
    is_idle,
    record,
)
from tests.unit.server.prefix_cache.fake_engine import MAX_TOP
from tests.unit.server.references.reference_setup import HEAD, create
from tests.unit.server.scoring.fake_reference_engine import HEAD_FORMAT, LinearModel, ReferenceEngine

KLD = "/v1/kld"
BODY: dict[str, Any] = {"reference": "base"}


@pytest.fixture
async def root(tmp_path: Path) -> Path:
    """A folder with a complete reference."""
    async with client_of(app_of(ReferenceEngine(tmp_path))) as client:
        await record(client)
    return tmp_path


def expected(root: Path, noise: float) -> list[dict[str, np.ndarray]]:
    """KL divergences and logprobs of each window in float64, over the whole vocabulary."""
    base, served, reference = LinearModel(0.0), LinearModel(noise), ReferenceDirectory(root).open("base")
    windows = []
    for index in range(NUM_WINDOWS):
        token_ids, first = reference.text.window(index)
        p, q = (
            (model.hidden_states(token_ids[:-1])[first - 1 :].double() @ model.weight.double().T).log_softmax(1).numpy()
            for model in (base, served)
        )
        targets = np.array(token_ids[first:])
        rows = np.arange(len(targets))
        windows.append(
            {
                "token_ids": targets,
                "kld": (np.exp(p) * (p - q)).sum(1),
                "reverse_kld": (np.exp(q) * (q - p)).sum(1),
                "acceptance": np.minimum(np.exp(p), np.exp(q)).sum(1),
                "logprobs": q[rows, targets],
                "reference_logprobs": p[rows, targets],
                "ranks": (q >= q[rows, targets][:, None]).sum(1),
                "reference_ranks": (p >= p[rows, targets][:, None]).sum(1),
                "top_token_ids": q.argmax(1),
                "reference_top_token_ids": p.argmax(1),
                "reference_confidence": np.exp(p.max(1)),
            }
        )
    return windows


def decoded(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


async def compared(root: Path, noise: float = 0.0, **changes: Any) -> dict[str, Any]:
    async with client_of(app := app_of(ReferenceEngine(root, noise), fingerprint=f"noise {noise}")) as client:
        answer = await client.post(KLD, json={**BODY, **changes})
    assert answer.status_code == 200, answer.text
    assert is_idle(app)
    return answer.json()


async def test_divergences_are_those_of_both_whole_distributions(root: Path):
    answer = await compared(root, 0.1)
    assert (answer["windows"], answer["fingerprint"]) == ([0, NUM_WINDOWS], "noise 0.1")
    assert [window["index"] for window in answer["data"]] == list(range(NUM_WINDOWS))
    for window, values in zip(answer["data"], expected(root, 0.1), strict=True):
        assert window["num_scored"] == len(values["kld"])
        for name, array in values.items():
            assert np.allclose(window[name], array, rtol=1e-4, atol=1e-5), name
    positions = [
        KldPositions(**{name: np.array(window[name], dtype) for name, dtype in POSITION_DTYPES.items()})
        for window in answer["data"]
    ]
    sizes = list(map(len, positions))
    assert answer["statistics"] == statistics(KldPositions.concatenate(positions), sizes)
    assert answer["num_scored"] == sum(sizes) == len(TOKENS) - 1
    assert answer["usage"]["prompt_tokens"] == 16 * (NUM_WINDOWS - 1) + len(TOKENS) - 8 * (NUM_WINDOWS - 1)


async def test_a_model_does_not_diverge_from_itself(root: Path):
    for window in (await compared(root))["data"]:
        assert set(window["kld"]) == set(window["reverse_kld"]) == {0.0}
        assert window["logprobs"] == window["reference_logprobs"]
        assert window["top_token_ids"] == window["reference_top_token_ids"]


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_base64_is_what_json_is(root: Path, top: int):
    as_json = (await compared(root, 0.1, top_logprobs=top))["data"]
    as_base64 = (await compared(root, 0.1, top_logprobs=top, encoding_format="base64"))["data"]
    for plain, encoded in zip(as_json, as_base64, strict=True):
        assert plain.keys() == encoded.keys()
        for name, dtype in POSITION_DTYPES.items():
            # To the last bit, as float64 too.
            assert decoded(encoded[name], dtype).astype(np.float64).tolist() == plain[name]
        for name in ("top_logprobs", "reference_top_logprobs") if top else ():
            assert encoded[name]["shape"] == [plain["num_scored"], top]
            for field, dtype in (("token_ids", "<i4"), ("logprobs", "<f4")):
                values = decoded(encoded[name][field], dtype).reshape(encoded[name]["shape"]).tolist()
                assert values == [[entry[field.removesuffix("s")] for entry in row] for row in plain[name]]
        if top:
            assert [row[0]["token_id"] for row in plain["top_logprobs"]] == plain["top_token_ids"]
        else:
            assert "top_logprobs" not in plain


async def test_a_stream_has_the_same_windows_and_the_result_last(root: Path):
    whole = await compared(root, 0.1)
    async with client_of(app_of(ReferenceEngine(root, 0.1))) as client:
        *windows, result = events(await client.post(KLD, json={**BODY, "stream": True}))
    assert windows == whole["data"]
    assert "data" not in result
    assert result["statistics"] == whole["statistics"]


async def test_a_part_of_the_windows(root: Path):
    whole, part = await compared(root, 0.1), await compared(root, 0.1, windows=[2, 4])
    assert part["data"] == whole["data"][2:4]
    assert part["windows"] == [2, 4]
    assert part["usage"]["prompt_tokens"] == 32
    assert {position["window"] for position in part["statistics"]["most_divergent"]} == {2, 3}


@pytest.mark.parametrize("windows", [[0, 0], [-1, 2], [2, 1], [0, NUM_WINDOWS + 1], [NUM_WINDOWS, NUM_WINDOWS + 1]])
async def test_windows_that_are_not_there(root: Path, windows: list[int]):
    async with client_of(app_of(ReferenceEngine(root))) as client:
        status, param, message = error_of(await client.post(KLD, json={**BODY, "windows": windows}))
    assert (status, param) == (400, "windows")
    assert f"within the {NUM_WINDOWS} of the reference, not {windows}" in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"windows": [1]}, "windows"),
        ({"windows": [0, 1, 2]}, "windows"),
        ({"reference": "../base"}, "reference"),
        ({"reference": None}, "reference"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": MAX_TOP + 1}, "top_logprobs"),
        ({"top_logprobs": 257}, "top_logprobs"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"windows": [0, 1], "as_noise_floor": True}, "windows"),
    ],
)
async def test_fields_that_are_none(root: Path, body: dict[str, Any], param: str):
    async with client_of(app_of(ReferenceEngine(root))) as client:
        answer = error_of(await client.post(KLD, json={**BODY, **body}))
    assert answer[:2] == (400, param)


async def test_a_reference_that_is_not_there(root: Path):
    async with client_of(app_of(ReferenceEngine(root))) as client:
        answer = error_of(await client.post(KLD, json={"reference": "other"}))
    assert answer == (404, "reference", "there is no reference 'other'")


def changed(root: Path, **changes: Any) -> None:
    reference = ReferenceDirectory(root).open("base")
    reference.save(reference.manifest.model_copy(update=changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"result": None}, "is not complete: record it again, and it goes on"),
        ({"head": None}, "is not complete"),
        ({"head": HEAD}, "has a vocabulary of 100 tokens, and the served model one of 1000"),
        ({"head": HEAD_FORMAT.model_copy(update={"hidden_size": 9})}, "bytes, and this server reserved 32000"),
    ],
)
async def test_references_that_cannot_be_compared_with(root: Path, changes: dict[str, Any], message: str):
    changed(root, **changes)
    async with client_of(app_of(ReferenceEngine(root))) as client:
        status, param, text = error_of(await client.post(KLD, json=BODY))
    assert (status, param) == (400, "reference")
    assert message in text


async def test_a_reference_of_another_tokenizer(root: Path):
    async with client_of(app_of(ReferenceEngine(root), tokenizer_fingerprint="another")) as client:
        answer = error_of(await client.post(KLD, json=BODY))
    assert answer == (400, "reference", "reference 'base' was made with another tokenizer")


async def test_windows_longer_than_the_model_takes(root: Path):
    app = app_of(ReferenceEngine(root))
    limits = app.state.scoremode.limits
    app.state.scoremode.limits = type(limits)(15, *(getattr(limits, name) for name in limits.__slots__[1:]))
    async with client_of(app) as client:
        answer = error_of(await client.post(KLD, json=BODY))
    assert answer == (
        400,
        "reference",
        "reference 'base' has windows of 16 tokens, and the served model takes 15",
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def turned(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("harm", [cut, turned, Path.unlink])
@pytest.mark.parametrize(
    "name", ["windows/000003.safetensors", "lm_head.safetensors", "tokens.safetensors", "manifest.json"]
)
async def test_what_was_damaged_is_named(root: Path, harm: Callable[[Path], None], name: str):
    harm(root / "base" / name)
    app = app_of(ReferenceEngine(root))
    async with client_of(app) as client:
        status, param, message = error_of(await client.post(KLD, json=BODY))
        streamed = await client.post(KLD, json={**BODY, "stream": True})
    assert param == "reference"
    if (name, harm) == ("manifest.json", Path.unlink):
        assert (status, message) == (404, "there is no reference 'base'")
        return
    assert status == 409
    assert message.startswith(f"reference 'base' is damaged: {name}")
    error = events(streamed)[-1]["error"] if streamed.status_code == 200 else streamed.json()["error"]
    assert error["message"] == message
    assert is_idle(app)


async def test_windows_that_are_whole_can_be_compared_beside_a_damaged_one(root: Path):
    cut(root / "base" / "windows" / "000003.safetensors")
    assert (await compared(root, windows=[0, 3]))["num_scored"] == 15 + 8 + 8


async def test_nan_of_the_served_model_is_no_fault_of_the_reference(root: Path):
    engine = ReferenceEngine(root)
    engine.nan_at = 2
    async with client_of(app := app_of(engine)) as client:
        status, _, message = error_of(await client.post(KLD, json={**BODY, "windows": [1, 2]}))
    assert status == 500
    # Of a window's 16 tokens the ninth is the first target.
    assert message.endswith("for the token at position 10")
    assert is_idle(app)


async def test_infinite_divergences_are_null(root: Path):
    """Where the served model gives no probability to a target, its logprob is minus infinity too."""
    engine = ReferenceEngine(root)
    banned = TOKENS[20]
    weight = engine.model.weight
    engine.model.project = lambda hidden_states: (hidden_states @ weight.T).index_fill(
        1, torch.tensor([banned]), -math.inf
    )
    async with client_of(app_of(engine)) as client:
        plain = (await client.post(KLD, json={**BODY, "windows": [1, 3]})).json()
        encoded = (await client.post(KLD, json={**BODY, "windows": [1, 3], "encoding_format": "base64"})).json()
    assert all(value is None for window in plain["data"] for value in window["kld"])
    assert all(math.isfinite(value) for window in plain["data"] for value in window["reverse_kld"])
    assert plain["statistics"]["num_infinite_kld"] == plain["num_scored"] == 16
    assert plain["statistics"]["kld"]["mean"] is None
    assert min(value for window in plain["data"] for value in window["logprobs"]) == LOWEST_LOGPROB
    assert all(np.isinf(decoded(window["kld"], "<f4")).all() for window in encoded["data"])


async def test_a_noise_floor_is_kept_with_the_reference(root: Path):
    """Windows run the other way round, and are told in order."""
    engine = ReferenceEngine(root)
    async with client_of(app_of(engine)) as client:
        before = (await client.get("/v1/references/base")).json()
        answer = (await client.post(KLD, json={**BODY, "as_noise_floor": True})).json()
        after = (await client.get("/v1/references/base")).json()
    assert [window["index"] for window in answer["data"]] == list(range(NUM_WINDOWS))
    floor = after.pop("noise_floor")
    del before["noise_floor"], before["disk_bytes"], after["disk_bytes"]
    assert after == before
    figures = answer["statistics"]["kld"]
    assert {name: floor[name] for name in ("mean", "p99", "max")} == {
        name: figures[name] for name in ("mean", "p99", "max")
    }
    assert floor["num_scored"] == len(TOKENS) - 1


async def test_the_noise_floor_of_another_model_is_refused(root: Path):
    async with client_of(app_of(ReferenceEngine(root, 0.1), fingerprint="another")) as client:
        status, param, message = error_of(await client.post(KLD, json={**BODY, "as_noise_floor": True}))
        assert (status, param) == (400, "as_noise_floor")
        assert "this server serves another" in message
        assert (await client.get("/v1/references/base")).json()["noise_floor"] is None


async def test_an_infinite_noise_floor_is_refused(root: Path):
    engine = ReferenceEngine(root)
    project = engine.model.project
    engine.model.project = lambda hidden_states: project(hidden_states).index_fill(1, torch.tensor([5]), -math.inf)
    async with client_of(app_of(engine)) as client:
        answer = error_of(await client.post(KLD, json={**BODY, "as_noise_floor": True}))
    assert answer == (400, "as_noise_floor", "the noise floor is infinite")


@pytest.mark.parametrize("again", [False, True])
async def test_a_reference_that_is_deleted_meanwhile(root: Path, again: bool):
    """Also if another has its name by then."""
    engine = ReferenceEngine(root)
    engine.held.clear()
    async with client_of(app := app_of(engine)) as client:
        comparing = asyncio.create_task(client.post(KLD, json=BODY))
        await engine.has_any.wait()
        await client.delete("/v1/references/base")
        if again:
            create(root, "base", "two")
        engine.held.set()
        status, param, message = error_of(await comparing)
    assert param == "reference"
    assert (status, message) == (
        (409, "reference 'base' was deleted meanwhile, and another has its name now")
        if again
        else (404, "there is no reference 'base'")
    )
    assert is_idle(app)


async def test_a_floor_is_not_kept_with_another_reference_of_the_name(root: Path):
    engine = ReferenceEngine(root)
    async with client_of(app_of(engine)) as client:
        references = light_app(engine=engine, references=engine.references()).state.scoremode.references.stored
        old = await references.open("base")
        await client.delete("/v1/references/base")
        new = await record(client, prompt=TOKENS[10:])
        with pytest.raises(Exception, match="another has its name now"):
            await references.save(old, {"noise_floor": None})
        assert (await client.get("/v1/references/base")).json() == new


async def test_a_client_that_leaves_ends_its_comparison(root: Path):
    engine = ReferenceEngine(root)
    engine.held.clear()
    app = app_of(engine)
    leave = asyncio.Event()
    body = [{"type": "http.request", "body": b'{"reference": "base"}'}]

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None: ...

    scope = {"type": "http", "method": "POST", "path": KLD, "query_string": b""}
    serving = asyncio.create_task(app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send))
    await engine.has_any.wait()
    assert not is_idle(app)
    leave.set()
    await serving
    while not is_idle(app):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert engine.aborted
    assert not engine.computed


async def test_windows_that_are_asked_for_one_by_one(root: Path, monkeypatch: pytest.MonkeyPatch):
    """The client does so: the tokens are read once, and the workers asked once."""
    engine, read = ReferenceEngine(root), []
    text = StoredReference.text.func

    def counted(reference: StoredReference) -> Any:
        read.append(reference.name)
        return text(reference)

    monkeypatch.setattr(StoredReference.text, "func", counted)
    async with client_of(app_of(engine)) as client:
        windows = []
        for index in range(NUM_WINDOWS):
            windows += (await client.post(KLD, json={**BODY, "windows": [index, index + 1]})).json()["data"]
    assert windows == (await compared(root))["data"]
    assert engine.asked == ["scoremode_head_bytes"]
    assert read == ["base"] * 2


async def test_a_reference_that_was_recorded_anew_is_read_anew(root: Path):
    engine = ReferenceEngine(root)
    async with client_of(app_of(engine)) as client:
        first = (await client.post(KLD, json=BODY)).json()
        await client.delete("/v1/references/base")
        await record(client, prompt=TOKENS[10:])
        second = (await client.post(KLD, json=BODY)).json()
    assert second["num_scored"] == first["num_scored"] - 10
    assert second["data"][0]["token_ids"][0] == TOKENS[11]
