"""The methods of both clients that record references and compare with them."""

import base64
import json
import math

import httpx
import numpy as np
import pytest
from fake_references import FINGERPRINT, CutShort, KldServer, compare, encoded
from fake_scoremode import BOS, copy_of, error, events

from scoremode import APIStatusError, NotFoundError, ResponseError, TransportError
from scoremode.kld import POSITION_DTYPES
from scoremode.protocol import KldRequest, ReferenceRequest

TEXT = "Hello, world"
TOKENS = [BOS, *TEXT.encode()]
WINDOWS = [TOKENS[start : start + 4] for start in (0, 4, 8)]
SETTINGS = {"method": "disjoint", "context_length": 4}


@pytest.fixture
def references(call):
    """What a server keeps that has recorded `TEXT` as `base`."""
    server = KldServer()
    call(server, "record_reference", "base", TEXT, **SETTINGS)
    return server.references


def test_recording_gives_the_reference_and_each_window(call):
    server, windows = KldServer(), []
    reference = call(server, "record_reference", "base", TEXT, **SETTINGS, on_window=windows.append)
    assert (reference.name, reference.complete, reference.num_windows, reference.num_scored) == ("base", True, 3, 9)
    assert [(window.index, window.num_scored, window.total_scored) for window in windows] == [
        (0, 3, 3),
        (1, 3, 6),
        (2, 3, 9),
    ]
    assert reference.perplexity == pytest.approx(math.exp(sum(window.nll_sum for window in windows) / 9))
    assert windows[-1].perplexity == pytest.approx(reference.perplexity)


def test_bodies_are_what_the_protocol_accepts(call, references):
    server = KldServer(references)
    call(server, "record_reference", "base", TEXT, **SETTINGS, client={"model": "m"})
    (request,) = [body for method, path, body in server.requests if path == "/v1/references"]
    recorded = ReferenceRequest.model_validate(request)
    assert (recorded.name, recorded.prompt, recorded.stream, recorded.model) == ("base", TEXT, True, "m")
    server = KldServer(references, noise=0.5)
    call(server, "kld", "base", (1, 2), top_logprobs=2, model="m")
    assert KldRequest.model_validate(server.requests[0][2]).model_dump() == {
        "model": "m",
        "reference": "base",
        "windows": [1, 2],
        "top_logprobs": 2,
        "encoding_format": "base64",
        "as_noise_floor": False,
        "stream": False,
    }


def test_a_recording_whose_connection_is_lost_is_sent_again_and_goes_on(call, waits):
    server, windows = KldServer(allowed=2), []
    reference = call(server, "record_reference", "base", TEXT, **SETTINGS, on_window=windows.append)
    assert reference.complete
    assert [window.index for window in windows] == [0, 1, 2], "each once"
    assert len(server.requests) == 2
    assert server.requests[0] == server.requests[1]
    assert len(waits) == 1


def test_references_are_listed_looked_up_and_deleted(call, references):
    server = KldServer(references)
    assert [reference.name for reference in call(server, "references")] == ["base"]
    assert call(server, "reference", "base").fingerprint == FINGERPRINT
    assert call(server, "delete_reference", "base") is None
    assert call(server, "references") == []
    for method in ("reference", "delete_reference"):
        with pytest.raises(NotFoundError, match="no reference 'base'"):
            call(server, method, "base")


def test_a_name_is_one_part_of_the_path(call):
    paths = []

    def note(request):
        paths.append(request.url.raw_path)
        return error(404, "no")

    for method in ("reference", "delete_reference"):
        with pytest.raises(NotFoundError):
            call(note, method, "a/b?c")
    assert paths == [b"/v1/references/a%2Fb%3Fc"] * 2


@pytest.mark.parametrize(
    ("method", "arguments"), [("reference", ["base"]), ("references", []), ("kld", ["base"])], ids=str
)
def test_a_server_without_the_routes_is_probably_not_scoremode(call, method, arguments):
    for answer_of_server in ({"detail": "Not Found"}, {"error": {"message": "Not Found", "code": 404}}):
        response = httpx.Response(404, json=answer_of_server)
        with pytest.raises(NotFoundError, match="probably not Scoremode"):
            call(lambda request, response=response: copy_of(response), method, *arguments)
    with pytest.raises(NotFoundError, match=r"^no reference here \(HTTP 404\)$"):
        call(lambda request: error(404, "no reference here"), method, *arguments)


def test_other_content_under_the_same_name_is_an_error(call, references):
    with pytest.raises(APIStatusError, match="other content") as caught:
        call(KldServer(references), "record_reference", "base", "another text", **SETTINGS)
    assert (caught.value.status_code, caught.value.param) == (409, "name")


@pytest.mark.parametrize("stream", [False, True])
def test_the_arrays_are_those_that_were_computed(call, references, stream):
    seen = []
    options = {"on_window": lambda window: seen.append(window.index)} if stream else {}
    result = call(KldServer(references, noise=0.5), "kld", "base", **options)
    assert [window.index for window in result.data] == [0, 1, 2]
    assert seen == ([2, 1, 0] if stream else []), "as they end"
    for window, tokens in zip(result.data, WINDOWS, strict=True):
        expected = compare(tokens, 1, 0.5)
        for name, dtype in POSITION_DTYPES.items():
            values = getattr(window.positions, name)
            assert values.dtype == np.dtype(dtype)
            assert values.tolist() == getattr(expected, name).tolist(), name
        assert window.num_scored == 3
        assert window.top_logprobs is None
    assert (result.windows, result.num_scored, result.fingerprint) == ((0, 3), 9, "noise 0.5")
    kld = np.concatenate([window.positions.kld for window in result.data])
    assert result.statistics["kld"]["mean"] == pytest.approx(kld.mean(), rel=1e-6)


def test_some_windows_only(call, references):
    result = call(KldServer(references, noise=0.5), "kld", "base", (1, 3))
    assert [window.index for window in result.data] == [1, 2]
    assert {position["window"] for position in result.statistics["most_divergent"]} == {1, 2}


def test_the_likeliest_tokens_of_both(call, references):
    [window] = call(KldServer(references, noise=0.5), "kld", "base", (0, 1), top_logprobs=2).data
    assert window.top_logprobs.token_ids.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert window.top_logprobs.logprobs.tolist() == [[0, -0.125], [-0.125, -0.25], [-0.25, -0.375]]
    assert window.reference_top_logprobs.logprobs.tolist() == [[0, -0.25], [-0.25, -0.5], [-0.5, -0.75]]


def test_a_noise_floor_is_kept_with_the_reference_of_the_same_model_only(call, references):
    result = call(KldServer(references), "kld", "base", as_noise_floor=True)
    assert result.statistics["kld"]["mean"] == 0
    floor = call(KldServer(references), "reference", "base").noise_floor
    assert (floor.mean, floor.max, floor.num_scored) == (0, 0, 9)
    with pytest.raises(APIStatusError, match="not the reference's"):
        call(KldServer(references, noise=0.5), "kld", "base", as_noise_floor=True)


def test_infinity_and_a_figure_that_is_null_come_through(call, references):
    server = KldServer(references, noise=0.5)

    def infinite(request):
        content = server(request).json()
        content["data"][0]["kld"] = encoded(np.array([1, np.inf, 2]), "<f4")
        content["statistics"]["kld"]["mean"] = None
        return httpx.Response(200, json=content)

    result = call(infinite, "kld", "base", (0, 1))
    assert result.data[0].positions.kld.tolist() == [1, math.inf, 2]
    assert result.statistics["kld"]["mean"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kld": "no base64"}, "kld are not float32 in base64"),
        ({"kld": base64.b64encode(b"12345").decode()}, "kld are not float32 in base64"),
        ({"ranks": base64.b64encode(b"12345").decode()}, "ranks are not int32 in base64"),
        ({"kld": [0.5, 0.5, 0.5]}, "kld are not in base64"),
        ({"kld": encoded(np.zeros(2), "<f4")}, "different shapes"),
        ({"kld": encoded(np.array([0, np.nan, 0]), "<f4")}, "NaN in the server's kld"),
        ({"num_scored": 4}, "3 positions for the 4 of window 0"),
        ({"top_logprobs": {"shape": [3, 2], "token_ids": "", "logprobs": ""}}, r"not of shape \[3, 2\]"),
    ],
)
def test_arrays_that_are_not_what_the_protocol_says(call, references, change, message):
    server = KldServer(references, noise=0.5)

    def wrong(request):
        content = server(request).json()
        content["data"][0] |= change
        return httpx.Response(200, json=content)

    with pytest.raises(ResponseError, match=message):
        call(wrong, "kld", "base", (0, 1))


def test_a_comparison_whose_connection_is_lost_after_a_window_is_not_reported_twice(call, references):
    server = KldServer(references, noise=0.5)
    calls = []

    def lost(request):
        calls.append(request)
        first, *_ = server(request).content.split(b"\n\n")
        return CutShort([json.loads(first.removeprefix(b"data: "))])

    with pytest.raises(TransportError, match="connection lost"):
        call(lost, "kld", "base", on_window=lambda window: None)
    assert len(calls) == 1


def test_an_unknown_event_and_a_stream_without_a_result(call, references):
    for content, message in [
        (events({"object": "score"}), "unknown event"),
        (events(), "ended without a result"),
        (b"data: 7\n\n", "unknown event"),
        (events({"object": "kld"}), "not what the protocol says"),
    ]:
        response = httpx.Response(200, content=content)
        with pytest.raises(ResponseError, match=message):
            call(lambda request, response=response: copy_of(response), "kld", "base", as_noise_floor=True)


def test_statistics_on_the_wire_are_json(call, references):
    result = call(KldServer(references, noise=0.5), "kld", "base")
    assert json.loads(json.dumps(result.statistics, allow_nan=False)) == result.statistics
