"""Servers that answer 504 are sent fewer requests at once, until these are answered in time or even one is not."""

import json
from asyncio import sleep

import pytest
from fake_server import FakeServer, StoredReference, client_of, copy_of, error

from scoremode import ServerError
from scoremode.corpus.documents import Document, DocumentScorer
from scoremode.runs.corpora import Corpus
from scoremode.runs.divergence import measure_kld
from scoremode.runs.evaluate import evaluate
from scoremode.runs.pool import Pool
from scoremode.runs.recording import record_reference

CORPUS = Corpus("fox", "The quick brown fox jumps over the lazy dog, and on it goes. " * 2, "made up", 1)
WINDOWS = {"context_length": 4, "stride": 2}
MESSAGE = {"message": "the request was not scored within 5 s (--request-timeout)", "type": "GatewayTimeoutError"}
TIMED_OUT = error(504, **MESSAGE)
WHAT_TO_CHANGE = r"--request-timeout.*make the windows smaller \(--context-length\)"


class Overloaded:
    """Answers all requests that are in flight together with 504, if there are more than it scores in time."""

    def __init__(self, at_once, references=()):
        self.at_once, self.fake = at_once, FakeServer(dict(references))
        self.in_flight, self.late = set(), set()
        self.num_timeouts = self.most_in_time = 0

    async def __call__(self, request):
        if request.method == "GET" or request.url.path not in ("/v1/score", "/v1/kld", "/v1/references"):
            return self.fake(request)
        self.in_flight.add(request)
        if len(self.in_flight) > self.at_once:
            self.late |= self.in_flight
        num_together = len(self.in_flight)
        # Until all that are sent together are in flight.
        for _ in range(99):
            await sleep(0)
            num_together = max(num_together, len(self.in_flight))
        self.in_flight.remove(request)
        if request in self.late:
            self.num_timeouts += 1
            return copy_of(TIMED_OUT)
        self.most_in_time = max(self.most_in_time, num_together)
        return self.fake(request)


def client_that_waits(server):
    return client_of(server, retry_for=600)


async def perplexity(client):
    return (await evaluate(client, CORPUS, **WINDOWS, concurrency=32)).windows


async def kld(client):
    return (await measure_kld(client, "base", concurrency=32)).positions.kld.tolist()


@pytest.fixture
def references():
    stored = StoredReference({"name": "base", "prompt": CORPUS.text, "method": "sliding", **WINDOWS})
    stored.recorded |= {*range(len(stored.windows))}
    return {"base": stored}


@pytest.mark.parametrize("run", [perplexity, kld])
@pytest.mark.parametrize(("at_once", "num_timeouts", "in_flight"), [(12, 32 + 16, 8), (1, 32 + 16 + 8 + 4 + 2, 1)])
async def test_half_as_many_are_sent_until_they_are_answered_in_time(
    waits, clock, references, run, at_once, num_timeouts, in_flight
):
    server = Overloaded(at_once, references)
    client = client_that_waits(server)
    assert await run(client) == await run(client_of(FakeServer(references)))
    assert (server.num_timeouts, server.most_in_time, waits) == (num_timeouts, in_flight, [])
    assert [path for method, path, _ in server.fake.requests if method == "GET"].count("/v1/score") > 1, (
        "a server that a proxy answered for may be another now"
    )
    assert not client.retries.raises_timeouts


@pytest.mark.parametrize("run", [perplexity, kld])
async def test_one_that_is_alone_and_late_three_times_ends_the_run(waits, clock, references, run):
    server = Overloaded(0, references)
    with pytest.raises(ServerError, match=WHAT_TO_CHANGE):
        await run(client_that_waits(server))
    assert (server.num_timeouts, len(waits)) == (32 + 16 + 8 + 4 + 2 + 3, 2)


async def test_a_recording_ends_when_nothing_of_it_is_recorded_in_time(waits, clock):
    server = Overloaded(0)
    with pytest.raises(ServerError, match=WHAT_TO_CHANGE):
        await record_reference(client_that_waits(server), CORPUS, "base", **WINDOWS)
    assert server.num_timeouts == 3


@pytest.mark.parametrize(
    "texts", [[f"document {index}" for index in range(16)], ["x" * 16 * 63]], ids=["texts", "windows"]
)
async def test_a_request_of_several_that_is_late_alone_is_halved(waits, clock, texts):
    """Until two are not too many, and with what follows as well."""
    fake, sizes = FakeServer(), []

    def slow(request):
        body = json.loads(request.content or "{}")
        num_sequences = (
            len(body.get("continuations") or body["prompt"]) if request.url.path == "/v1/score" and body else 0
        )
        sizes.append(num_sequences)
        return copy_of(TIMED_OUT) if num_sequences > most else fake(request)

    async def score(most_in_flight):
        pool = await Pool.connect([client_that_waits(slow)], most_in_flight)
        with pool.taking_over():
            scorer = DocumentScorer(pool)
            documents = [Document(text, len(text)) for text in texts]
            return [[result.nll for result in await scorer.score(documents)] for _ in range(2)]

    most = 16
    expected = await score(4)
    sizes.clear()
    most = 2
    assert await score(4) == expected
    # Four and then two in flight; alone each size has three attempts.
    assert [size for size in sizes if size > 2] == [16] * 5 + [8] * 3 + [4] * 3
    assert max(sizes[-8:]) == 2
    most = 0
    with pytest.raises(ServerError, match=WHAT_TO_CHANGE):
        await score(4)
