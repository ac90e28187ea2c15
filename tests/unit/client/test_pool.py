"""Windows spread over several servers: how many at once, and what happens when one fails or answers 504."""

from asyncio import Event, create_task, sleep

import httpx
import pytest
from fake_server import FINGERPRINT, FakeServer, Outcomes, client_of, error, ok, score_response

from scoremode import BadRequestError, ResponseError, ServerError, ServersDifferError
from scoremode.runs import Corpus, evaluate
from scoremode.runs.pool import GRACE, Pool

CORPUS = Corpus("fox", "The quick brown fox jumps over the lazy dog, and on it goes. " * 4, "made up", 1)
SETTINGS = {"context_length": 8, "stride": 4}
REFUSED = httpx.ConnectError("refused")


class Server(FakeServer):
    """Scores windows, and fails instead while `fails(number of windows scored)` is true."""

    def __init__(self, name="a", failure=REFUSED, fails=lambda num_scored: False, **settings):
        super().__init__(**settings)
        self.name, self.failing, self.fails = name, Outcomes(failure), fails

    async def __call__(self, request):
        await sleep(0)
        is_scoring = request.url.path == "/v1/score" and request.method == "POST"
        return self.failing(request) if is_scoring and self.fails(self.num_scored) else super().__call__(request)


async def run(*servers, retries=None, **settings):
    clients = [client_of(server, server.name, **retries or {}) for server in servers]
    return await evaluate(clients, CORPUS, **{**SETTINGS, **settings})


@pytest.fixture
async def expected():
    return (await run(Server())).windows


@pytest.mark.parametrize(
    "failure", [REFUSED, httpx.ReadTimeout("silent"), error(500, "dead"), error(429, "busy")], ids=repr
)
async def test_the_windows_of_a_failed_server_go_to_the_other(expected, caplog, failure):
    dying, other = Server("dying", failure, lambda num_scored: num_scored >= 3), Server("other")
    assert (await run(other, dying, concurrency=2)).windows == expected
    assert (dying.num_scored, other.num_scored) == (3, len(expected) - 3)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("http://dying is dropped")


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (error(400, "no such token"), BadRequestError, "no such token"),
        (ok(score_response([])), ResponseError, "did not score"),
    ],
)
async def test_a_request_at_fault_or_wrong_scores_end_the_run_on_every_server(answer, kind, message):
    with pytest.raises(kind, match=message):
        await run(Server("a", answer, lambda num_scored: True), Server("b"))


async def test_a_lost_server_has_a_grace_and_the_last_one_all_the_time(waits, clock, expected):
    dying = Server("dying", fails=lambda num_scored: True)
    last = Server("last", fails=lambda num_scored: num_scored == 5 and sum(waits) < 300)
    assert (await run(dying, last, retries={"retry_for": 600}, concurrency=1)).windows == expected
    assert sum(waits) > 300 > GRACE
    waits.clear()
    await run(dying, Server("other"), retries={"retry_for": 600}, concurrency=1)
    assert sum(waits) == pytest.approx(GRACE)


async def test_a_busy_server_is_not_dropped_after_the_grace(waits, clock, expected, caplog):
    busy = Server("busy", error(429, "busy"), lambda num_scored: num_scored == 5 and sum(waits) < 300)
    assert (await run(busy, Server("other"), retries={"retry_for": 600}, concurrency=1)).windows == expected
    assert "dropped" not in caplog.text


async def test_servers_that_differ_do_not_share_a_run():
    servers = Server("a"), Server("b", info={"fingerprint": "another"})
    what = f"fingerprint is 'another' instead of '{FINGERPRINT}'"
    with pytest.raises(ServersDifferError, match=f"^http://b does not serve .* that the run began with: {what}$"):
        await run(*servers)
    assert [server.num_scored for server in servers] == [0, 0]


async def test_a_server_that_restarts_must_have_the_same_model(waits, expected):
    def restarting():
        failures = iter([True])
        return Server(fails=lambda num_scored: num_scored == 5 and next(failures, False))

    assert (await run(restarting(), retries={"max_retries": 1})).windows == expected
    replaced = restarting()
    with pytest.raises(
        ServersDifferError, match="a does not serve the model that the run began with: quantization is 'fp8'"
    ):
        await run(
            replaced,
            retries={"max_retries": 1},
            concurrency=1,
            on_progress=lambda _: replaced.info.update(quantization="fp8"),
        )


class Overloaded(Server):
    """Answers all requests that are in flight together with 504, if there are more than it scores in time."""

    def __init__(self, at_once):
        super().__init__()
        self.at_once, self.in_flight, self.late = at_once, set(), set()
        self.num_timeouts = self.most_in_time = 0

    async def __call__(self, request):
        if request.method == "GET" or request.url.path != "/v1/score":
            return FakeServer.__call__(self, request)
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
            return error(504, "the request was not scored within 5 s (--request-timeout)", type="GatewayTimeoutError")
        self.most_in_time = max(self.most_in_time, num_together)
        return FakeServer.__call__(self, request)


@pytest.mark.parametrize(("at_once", "num_timeouts", "in_flight"), [(12, 32 + 16, 8), (1, 32 + 16 + 8 + 4 + 2, 1)])
async def test_half_as_many_are_sent_until_they_are_answered_in_time(
    waits, clock, expected, at_once, num_timeouts, in_flight
):
    server = Overloaded(at_once)
    assert (await run(server, retries={"retry_for": 600}, concurrency=32)).windows == expected
    assert (server.num_timeouts, server.most_in_time, waits) == (num_timeouts, in_flight, [])
    num_looks = [path for method, path, _ in server.requests if method == "GET"].count("/v1/score")
    assert num_looks > 1, "a server that a proxy answered for may be another now"


async def test_one_that_is_alone_and_late_three_times_ends_the_run(waits, clock):
    server = Overloaded(0)
    with pytest.raises(ServerError, match=r"--request-timeout.*make the windows smaller \(--context-length\)"):
        await run(server, retries={"retry_for": 600}, concurrency=32)
    assert (server.num_timeouts, len(waits)) == (32 + 16 + 8 + 4 + 2 + 3, 2)


async def test_a_single_request_goes_to_the_server_with_the_fewest():
    """Requests in flight count first, and then all requests."""
    asked, is_over = [], Event()

    async def ask(client, job):
        asked.append(client.address[-1])
        if job == "long":
            await is_over.wait()

    pool = await Pool.connect([client_of(Server(), name) for name in "ab"], 3)
    for job in range(2):
        await pool.ask(job, ask)
    long = create_task(pool.ask("long", ask))
    await sleep(0)
    for job in range(2):
        await pool.ask(job, ask)
    is_over.set()
    await long
    assert "".join(asked) == "ababb"


async def test_a_server_whose_logits_are_not_the_models_is_a_warning(caplog):
    by = {"device": "cpu", "implementation": "transformers", "wrong_logits": "no \x1b scale"}
    await run(Server("right"), Server("wrong", info={"computed_by": by}), Server("newer", info={"computed_by": by}))
    assert caplog.messages == [
        f"http://{name}: scores are not those of the model: no \\x1b scale" for name in ("wrong", "newer")
    ]


async def test_servers_of_other_versions_are_compared_by_what_both_know(caplog):
    newer = {"computed_by": {"device": "A100", "implementation": "vllm"}}
    await run(Server("older", info={"computed_by": {"device": "A100"}}), Server("newer", info=newer))
    assert not caplog.messages
    await run(Server("older", info={"computed_by": {"device": "H200"}}), Server("newer", info=newer))
    assert "device is 'A100' instead of 'H200'" in caplog.messages[0]
    assert "implementation" not in caplog.messages[0]
