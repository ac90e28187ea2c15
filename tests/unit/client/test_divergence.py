"""Recordings and comparisons as a library makes them, against divergences that are worked out anew here."""

import json
from contextlib import ExitStack, closing

import httpx
import numpy as np
import pytest
from fake_server import (
    NOISE,
    REST_IF_FORCED,
    TEXT,
    CutShort,
    FakeServer,
    changed,
    client_of,
    clients_of,
    compare,
    differing_routes,
    encoded,
    events,
    record,
    token_text,
    with_reference,
)

from scoremode import (
    METHODS,
    BadRequestError,
    OutputError,
    ResponseError,
    ServersDifferError,
    TransportError,
    measure_kld,
    measure_noise_floor,
    results,
)
from scoremode.errors import RunError
from scoremode.kld import POSITION_DTYPES, KldPositions
from scoremode.runs import Journal


@pytest.fixture
async def server() -> FakeServer:
    return await with_reference()


async def measure(*servers, **settings):
    return await measure_kld(clients_of(servers), "base", **settings)


def expected_positions(server) -> KldPositions:
    return KldPositions.concatenate([compare(*window, server.noise) for window in server.references["base"].windows])


def same_positions(found: KldPositions, expected: KldPositions) -> bool:
    pairs = [(getattr(found, name), getattr(expected, name)) for name in POSITION_DTYPES]
    return all(one.dtype == other.dtype and one.tolist() == other.tolist() for one, other in pairs)


@pytest.mark.parametrize("method", METHODS)
async def test_every_position_of_every_window_is_there_in_order(method):
    server, steps = await with_reference(method=method), []
    measurement = await measure(server, concurrency=3, on_progress=steps.append)
    expected = expected_positions(server)
    assert measurement.window_sizes == [len(tokens) - first for tokens, first in server.references["base"].windows]
    assert same_positions(measurement.positions, expected)
    assert measurement.statistics["kld"]["mean"] == pytest.approx(expected.kld.astype(float).mean(), rel=1e-12)
    assert steps[-1].mean == pytest.approx(measurement.statistics["kld"]["mean"])
    assert [step.windows_done for step in steps] == list(range(1, len(measurement.window_sizes) + 1))
    assert sorted(server.compared) == list(range(len(steps)))


async def test_each_window_is_compared_with_own_and_with_forced_experts():
    server = await with_reference(routes=True)
    servers, windows = [server, FakeServer(server.references, noise=NOISE)], server.references["base"].windows
    found = await measure(*servers, routes=True)
    forced = np.concatenate([compare(*each, NOISE * REST_IF_FORCED).kld for each in windows])
    differing = np.concatenate([differing_routes(*each, False) for each in windows], axis=1)
    assert same_positions(found.positions, expected_positions(server))
    assert found.arrays()["forced_kld"].tolist() == forced.tolist()
    assert found.arrays()["differing_layers"].tolist() == differing.sum(axis=0).tolist()
    assert [layer.overlap.mean for layer in found.routes.layers] == (1 - differing / 2).mean(axis=1).tolist()
    assert found.record([])["routes"]["layers"][1]["forced_same_set"] == {"mean": 1.0, "stderr": 0.0}
    sent = [body for each in servers for _, path, body in each.requests if path == "/v1/kld"]
    assert sorted((body["windows"][0], body["routes"]) for body in sent) == [
        (index, routes) for index in range(5) for routes in ("forced", "own")
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.pop("routes", None),
        lambda answer: answer.get("routes", {"shared": [0]})["shared"].pop(),
        lambda answer: answer.get("routes", {}).update(same_set=[1, 1]),
        # A window has seven targets.
        lambda answer: answer.get("routes", {}).update(
            same_set=[7, 7], differing_layers=encoded([-1, 1, *[0] * 5], "<i4")
        ),
        lambda answer: answer.get("routes", {}).update(same_set=[5, 6], differing_layers=encoded([3, *[0] * 6], "<i4")),
    ],
)
async def test_counts_of_experts_that_do_not_fit_end_the_run(change):
    with pytest.raises(ResponseError, match=r"routes do not fit window \d and the 2 layers"):
        await measure(changed(await with_reference(routes=True), "/v1/kld", change), routes=True)


async def test_a_reference_without_routes_is_refused_before_anything_is_compared(server):
    with pytest.raises(RunError, match=r"reference base was recorded without routes: .*record --routes"):
        await measure(server, routes=True)
    assert not server.compared


async def test_later_comparisons_are_multiples_of_the_noise_floor(server):
    assert (await measure(server)).kld_over_noise_floor is None
    steps, same_model = [], FakeServer(server.references)
    floor = await measure_noise_floor(client_of(same_model), "base", on_progress=steps.append)
    assert floor.as_noise_floor
    assert floor.statistics["kld"]["mean"] == floor.reference.noise_floor.mean == 0
    assert [step.windows_done for step in steps] == [1, 2, 3, 4, 5]
    assert same_positions(floor.positions, expected_positions(same_model))
    assert (await measure(server)).kld_over_noise_floor is None, "nothing is 0 times"
    server.references["base"].noise_floor["mean"] = 0.001
    later = await measure(server)
    assert later.kld_over_noise_floor == pytest.approx(later.statistics["kld"]["mean"] / 0.001)
    # Stored before it was refused.
    server.references["base"].noise_floor["mean"] = 0.8
    assert (await measure(server)).kld_over_noise_floor is None


async def test_servers_with_different_references_do_not_share_a_run(server):
    with pytest.raises(ServersDifferError, match="'base' at http://b differs from that at http://a") as caught:
        await measure(server, await with_reference(context_length=4))
    assert "num_windows is 10 instead of 5" in str(caught.value)


TOO_MANY = {"num_scored": 2**23 + 1, "context_length": 2**23 + 1}
REPLACED = iter([1, 1, 2])
"""When the reference was created, by three answers."""


@pytest.mark.parametrize(
    ("path", "change", "kind", "message"),
    [
        ("/v1/kld", lambda answer: answer.update(index=3), ResponseError, "did not compare the window"),
        ("/v1/kld", lambda answer: answer.update(fingerprint="x"), ServersDifferError, "its fingerprint is 'x'"),
        ("/v1/references/base", lambda answer: answer.update(num_scored=36), ResponseError, "35 positions for the 36"),
        (
            *("/v1/references/base", lambda answer: answer.update(created=next(REPLACED))),
            *(ResponseError, "replaced while the model was compared.*: created is"),
        ),
    ],
)
async def test_answers_that_do_not_fit_the_windows_end_the_run(server, path, change, kind, message):
    with pytest.raises(kind, match=message):
        await measure(changed(server, path, change), concurrency=1)


@pytest.mark.parametrize("measured", [measure, lambda server: measure_noise_floor(client_of(server), "base")])
@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/windows", lambda answer: answer["documents"].pop(), "does not fit the 5 of base"),
        ("/windows", lambda answer: answer.update(text_fingerprint="x" * 2**21), "is longer than the 1,070,060 bytes"),
        ("", lambda answer: answer.update(TOO_MANY), "8,388,609 positions to compare"),
    ],
)
async def test_nothing_is_compared_if_the_windows_cannot_be_read(server, measured, path, change, message):
    with pytest.raises(ResponseError, match=message):
        await measured(changed(server, f"/v1/references/base{path}", change))
    assert not server.compared


async def measure_with_journal(server, path, **settings):
    with ExitStack() as journals:
        return await measure(
            server, start_journal=lambda plan: journals.enter_context(closing(Journal(path, plan))), **settings
        )


async def test_a_resumed_run_compares_missing_windows_and_has_all_top_tokens(server, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "MAX_TOP_POSITIONS", 9)
    path, settings = tmp_path / "run.json.journal", {"top_logprobs": 5, "return_token_texts": True}
    lost = FakeServer(server.references, noise=NOISE, allowed=3)
    with pytest.raises(TransportError):
        await measure_with_journal(lost, path, concurrency=1, **settings)
    with pytest.raises(OutputError, match="top_logprobs is 5 instead of 2"):
        await measure_with_journal(server, path, top_logprobs=2)
    before, steps = path.read_bytes(), []
    *whole, last = before.splitlines(keepends=True)
    for change in ({"index": 9}, {"index": 0, "num_scored": 6}, {"positions": {}}):
        path.write_bytes(b"".join(whole) + json.dumps({**json.loads(last), **change}).encode() + b"\n")
        with pytest.raises(OutputError, match="damaged at line 4"):
            await measure_with_journal(server, path, **settings)
    path.write_bytes(before)
    measurement = await measure_with_journal(server, path, on_progress=steps.append, **settings)
    assert sorted(server.compared) == [3, 4]
    assert path.read_bytes().startswith(before)
    assert same_positions(measurement.positions, expected_positions(server))
    assert [(step.windows_done, step.num_resumed) for step in steps] == [(3, 3 * 7), (4, 3 * 7), (5, 3 * 7)]
    assert 0 < steps[0].seconds < steps[1].seconds < steps[2].seconds
    top, at = measurement.top_tokens, np.sort(np.argsort(-measurement.positions.kld)[:9])
    # The server's made-up values depend on the place in a window of seven.
    ids = (at % 7)[:, None, None] + np.tile(np.arange(5), (2, 1))
    assert (top.positions.tolist(), top.token_ids.tolist()) == (at.tolist(), ids.tolist())
    assert top.logprobs.tolist() == (-ids / [[8], [4]]).tolist()
    assert set(ids.ravel().tolist()) <= measurement.token_texts.keys()


async def test_a_run_that_compares_experts_resumes_only_as_such(tmp_path):
    server, path = await with_reference(routes=True), tmp_path / "run.json.journal"
    # The forced pass of the third window is lost.
    lost = FakeServer(server.references, noise=NOISE, allowed=5)
    with pytest.raises(TransportError):
        await measure_with_journal(lost, path, concurrency=1, routes=True)
    with pytest.raises(OutputError, match="routes is True instead of None"):
        await measure_with_journal(server, path)
    before = path.read_text()
    path.write_text(before.replace('"forced": {', '"other": {'))
    with pytest.raises(OutputError, match="damaged at line 2"):
        await measure_with_journal(server, path, routes=True)
    path.write_text(before)
    found = await measure_with_journal(server, path, routes=True)
    assert sorted(server.compared) == [2, 2, 3, 3, 4, 4]
    assert found.routes.model_dump() == (await measure(server, routes=True)).routes.model_dump()


@pytest.mark.parametrize("num_before", [0, 2])
async def test_the_text_before_a_token_crosses_windows_and_not_documents(monkeypatch, num_before):
    """So many windows are of another document than the rest."""
    server = await with_reference(method="sliding")
    reference = server.references["base"]
    origins = {
        **reference.origins(),
        "documents": [int(index >= num_before) for index in range(len(reference.windows))],
    }
    monkeypatch.setattr(reference, "origins", lambda: origins)
    start = sum(len(tokens) - first for tokens, first in reference.windows[:num_before])
    measurement = await measure(server)
    for token in measurement.most_divergent:
        begin = start if token.index >= start else 0
        assert token.text_before == TEXT[max(begin, token.index - 16) : token.index]


async def test_the_most_divergent_tokens_have_their_texts(server):
    measurement = await measure(server)
    targets = [token for tokens, first in server.references["base"].windows for token in tokens[first:]]
    assert len(measurement.most_divergent) == 20
    for token in measurement.most_divergent:
        assert token.token == token_text(targets[token.index])
        assert token.text_before == "".join(map(chr, targets[7 * token.window : token.index])), "of its own window"
        assert token.probability == pytest.approx(np.exp(float(measurement.positions.logprobs[token.index])))
        assert token.top_token == token_text(token.top_token_id)


async def test_an_error_within_the_stream_is_retried_if_it_may_pass():
    def failing(request):
        response = server(request)
        if not isinstance(response, CutShort):
            return response
        return httpx.Response(200, content=response.start + events({"error": {"message": "it died", "code": code}}))

    server, code = FakeServer(allowed=2), 503
    assert (await record(failing)).reference.complete
    server, code = FakeServer(allowed=2), 400
    with pytest.raises(BadRequestError, match="it died"):
        await record(failing)


async def test_windows_of_an_earlier_session_are_counted_and_not_recorded_again():
    references, steps = {}, []
    with pytest.raises(TransportError, match="connection lost"):
        await record(FakeServer(references, allowed=0))
    references["base"].recorded |= {0, 1, 2}
    recording = await record(FakeServer(references), on_progress=steps.append)
    assert [(step.windows_done, step.num_scored, step.num_resumed) for step in steps] == [(4, 28, 21), (5, 35, 21)]
    assert 0 < steps[0].seconds < steps[1].seconds
    assert (recording.num_resumed, recording.reference.num_recorded) == (3, 5)
