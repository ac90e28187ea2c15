"""The methods of both clients that record references and compare with them."""

import base64
import math

import numpy as np
import pytest
from fake_server import FINGERPRINT, FakeServer, Outcomes, changed, encoded, error

from scoremode import NotFoundError, ResponseError
from scoremode.wire.protocol import KldRequest, ReferenceRequest

TEXT = "Hello, world"
SETTINGS = {"method": "disjoint", "context_length": 4}


@pytest.fixture
def server(call):
    """Has recorded `TEXT` as `base`, and then serves another model."""
    recording = FakeServer()
    call(recording, "record_reference", "base", TEXT, **SETTINGS)
    return FakeServer(recording.references, noise=0.5)


def test_a_recording_whose_connection_is_lost_is_resumed(call, waits):
    server, windows = FakeServer(allowed=2), []
    options = {**SETTINGS, "on_window": windows.append, "client": {"model": "m"}}
    assert call(server, "record_reference", "base", TEXT, **options).complete
    assert [window.index for window in windows] == [0, 1, 2], "each once"
    first, second = server.requests
    assert first == second
    sent = ReferenceRequest.model_validate(first[2])
    assert (sent.name, sent.prompt, sent.stream, sent.model) == ("base", TEXT, True, "m")
    assert len(waits) == 1


def test_references_are_listed_looked_up_and_deleted(call, server):
    assert [reference.name for reference in call(server, "references")] == ["base"]
    assert call(server, "reference", "base").fingerprint == FINGERPRINT
    assert call(server, "delete_reference", "base") is None
    assert call(server, "references") == []
    for method in ("reference", "delete_reference"):
        with pytest.raises(NotFoundError, match="no reference 'base'"):
            call(server, method, "base")
        server_of_name = Outcomes(error(404, "no"))
        with pytest.raises(NotFoundError):
            call(server_of_name, method, "a/b?c")
        assert server_of_name.requests[0].url.raw_path == b"/v1/references/a%2Fb%3Fc"


def test_some_windows_and_top_tokens_can_be_requested(call, server):
    result = call(server, "kld", "base", (1, 2), top_logprobs=2, model="m")
    defaults = {"encoding_format": "base64", "as_noise_floor": False, "stream": False}
    sent = KldRequest.model_validate(server.requests[0][2]).model_dump()
    assert sent == {"model": "m", "reference": "base", "windows": [1, 2], "top_logprobs": 2, **defaults}
    [window] = result.data
    assert (result.windows, window.index) == ((1, 2), 1)
    assert window.top_logprobs.token_ids.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert window.top_logprobs.logprobs.tolist() == [[0, -0.125], [-0.125, -0.25], [-0.25, -0.375]]
    assert window.reference_top_logprobs.logprobs.tolist() == [[0, -0.25], [-0.25, -0.5], [-0.5, -0.75]]


def test_streamed_windows_are_reported_as_they_end_and_given_in_order(call, server):
    seen = []
    result = call(server, "kld", "base", on_window=lambda window: seen.append(window.index))
    assert (seen, [window.index for window in result.data]) == ([2, 1, 0], [0, 1, 2])


def test_infinity_and_a_figure_that_is_null_are_read(call, server):
    def infinite(content):
        content["data"][0]["kld"] = encoded([1, np.inf, 2], "<f4")
        content["statistics"]["kld"]["mean"] = None

    result = call(changed(server, "/v1/kld", infinite), "kld", "base", (0, 1))
    assert result.data[0].positions.kld.tolist() == [1, math.inf, 2]
    assert result.statistics["kld"]["mean"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kld": "no base64"}, "kld are not float32 in base64"),
        ({"kld": base64.b64encode(b"12345").decode()}, "kld are not float32 in base64"),
        ({"ranks": base64.b64encode(b"12345").decode()}, "ranks are not int32 in base64"),
        ({"kld": [0.5, 0.5, 0.5]}, "kld are not in base64"),
        ({"kld": encoded([0, 0], "<f4")}, "different shapes"),
        ({"kld": encoded([0, np.nan, 0], "<f4")}, "NaN in the server's kld"),
        ({"num_scored": 4}, "3 positions for the 4 of window 0"),
        ({"top_logprobs": {"shape": [3, 2], "token_ids": "", "logprobs": ""}}, r"not of shape \[3, 2\]"),
    ],
)
def test_arrays_that_break_the_protocol_are_an_error(call, server, change, message):
    wrong = changed(server, "/v1/kld", lambda content: content["data"][0].update(change))
    with pytest.raises(ResponseError, match=message):
        call(wrong, "kld", "base", (0, 1))
