"""Recording a corpus as a library does it: what it reports, and how it resumes after a failure."""

import httpx
import pytest
from fake_server import CutShort, FakeServer, client_of, events

from scoremode import BadRequestError, TransportError
from scoremode.runs.corpora import Corpus
from scoremode.runs.recording import record_reference

TEXT = "The quick brown fox jumps over the lazy dog"
CORPUS = Corpus("fox", TEXT, "made up", 1)
NUM_WINDOWS = 5


async def record(server, **settings):
    async with client_of(server) as client:
        settings = {"method": "disjoint", "context_length": 8, **settings}
        return await record_reference(client, CORPUS, "base", **settings)


async def test_a_recording_is_resumed_while_each_request_records_something():
    server, steps = FakeServer(allowed=2), []
    recording = await record(server, on_progress=steps.append)
    assert recording.reference.complete
    progress = [(step.windows_done, step.num_windows, step.num_scored, step.num_resumed) for step in steps]
    assert progress == [(done, NUM_WINDOWS, 7 * done, 0) for done in range(1, NUM_WINDOWS + 1)]
    assert steps[-1].perplexity == pytest.approx(recording.reference.perplexity)
    bodies = [body for method, path, body in server.requests if (method, path) == ("POST", "/v1/references")]
    assert bodies == [bodies[0]] * 3, "the same request, for two, two and one"


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
    assert (recording.num_resumed, recording.num_recorded) == (3, 2)
    again = await record(FakeServer(references), on_progress=steps.append)
    assert (len(steps), again.num_recorded, again.num_resumed) == (2, 0, NUM_WINDOWS)
