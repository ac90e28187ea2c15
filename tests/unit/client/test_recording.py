"""Recording a corpus as a library does it: what it reports, and how it goes on after a failure."""

import httpx
import pytest
from fake_references import KldServer
from fake_scoremode import BOS, error, events

from scoremode import APIStatusError, AsyncScoreClient, BadRequestError, ServerError, TransportError
from scoremode.corpora import Corpus
from scoremode.recording import record_reference

TEXT = "The quick brown fox jumps over the lazy dog"
CORPUS = Corpus("fox", TEXT, "made up", 1)
SETTINGS = {"method": "disjoint", "context_length": 8}
NUM_WINDOWS = 5


async def record(server, **settings):
    async with AsyncScoreClient("http://fake", transport=httpx.MockTransport(server), max_retries=0) as client:
        return await record_reference(client, CORPUS, "base", **{**SETTINGS, **settings})


async def test_the_whole_corpus_is_recorded_under_the_name():
    server = KldServer()
    recording = await record(server, stride=8, max_tokens=30)
    assert (recording.reference.name, recording.reference.complete) == ("base", True)
    assert recording.reference.num_tokens == 30
    assert (recording.num_resumed, recording.num_recorded) == (0, recording.reference.num_windows)
    stored = server.references["base"]
    assert stored.windows[0] == ([BOS, *TEXT.encode()][:8], 1)
    assert stored.request["prompt"] == TEXT


async def test_progress_runs_to_the_reference():
    steps = []
    recording = await record(KldServer(), on_progress=steps.append)
    assert [(step.windows_done, step.num_windows, step.num_scored, step.num_resumed) for step in steps] == [
        (done, NUM_WINDOWS, 7 * done, 0) for done in range(1, NUM_WINDOWS + 1)
    ]
    assert steps[-1].perplexity == pytest.approx(recording.reference.perplexity)


async def test_a_recording_goes_on_as_long_as_each_request_records_something():
    server, steps = KldServer(allowed=2), []
    recording = await record(server, on_progress=steps.append)
    assert recording.reference.complete
    assert [step.windows_done for step in steps] == [1, 2, 3, 4, 5]
    bodies = [body for method, path, body in server.requests if (method, path) == ("POST", "/v1/references")]
    assert bodies == [bodies[0]] * 3, "the same request, for two, two and one"


async def test_a_server_that_records_nothing_more_is_given_up():
    with pytest.raises(TransportError, match="connection lost"):
        await record(KldServer(allowed=0))


async def test_an_error_in_the_middle_of_the_stream_is_tried_again_if_it_may_pass():
    server = KldServer(allowed=2)
    num_errors = 0

    def dying(request):
        nonlocal num_errors
        response = server(request)
        if request.method == "POST" and num_errors < 2:
            num_errors += 1
            windows = b"".join(response.stream_chunks)
            return httpx.Response(200, content=windows + events({"error": {"message": "it died", "code": code}}))
        return response

    code = 503
    assert (await record(dying)).reference.complete
    server, num_errors, code = KldServer(allowed=2), 0, 400
    with pytest.raises(BadRequestError, match="it died"):
        await record(dying)


async def test_windows_that_were_recorded_before_are_counted_and_not_recorded_again():
    references = {}
    with pytest.raises(TransportError):
        await record(KldServer(references, allowed=0))
    references["base"].recorded |= {0, 1, 2}
    steps = []
    recording = await record(KldServer(references), on_progress=steps.append)
    assert [(step.windows_done, step.num_scored, step.num_resumed) for step in steps] == [(4, 28, 21), (5, 35, 21)]
    assert (recording.num_resumed, recording.num_recorded) == (3, 2)


async def test_a_complete_reference_is_there_at_once():
    server = KldServer()
    await record(server)
    steps = []
    recording = await record(server, on_progress=steps.append)
    assert (steps, recording.num_recorded, recording.num_resumed) == ([], 0, NUM_WINDOWS)


async def test_another_reference_of_that_name_and_no_folder_for_references():
    server = KldServer()
    await record(server)
    with pytest.raises(APIStatusError, match="other content"):
        await record(server, context_length=4)
    without = "references are off: start the server with --reference-dir"
    with pytest.raises(APIStatusError, match=without):
        await record(lambda request: error(404, without))
    with pytest.raises(ServerError, match="disk is full"):
        await record(lambda request: error(404, "none") if request.method == "GET" else error(507, "disk is full"))
