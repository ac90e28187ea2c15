"""Windows spread over several servers: how many at once, and what happens when one of them fails."""

import asyncio
import json

import httpx
import pytest
from fake_scoremode import INFO, answer, copy_of, error

from scoremode import AsyncScoreClient, BadRequestError, ResponseError, ServerError, ServersDifferError, TransportError
from scoremode.corpora import Corpus
from scoremode.evaluate import evaluate
from scoremode.pool import GRACE, MAX_CONCURRENCY, Pool

CORPUS = Corpus("fox", "The quick brown fox jumps over the lazy dog, and on it goes. " * 4, "made up", 1)
SETTINGS = {"context_length": 8, "stride": 4}


class Server:
    """A server whose scoring can be made to fail, and that counts the windows it has scored."""

    def __init__(self, name="a", *, fail=None, scored_before=0, info=None):
        self.name = name
        self.num_scored = 0
        self._fail = fail
        self._scored_before = scored_before
        self._info = info or {}

    async def __call__(self, request):
        await asyncio.sleep(0)
        if request.url.path == "/v1/score" and request.method == "GET":
            return httpx.Response(200, json={**INFO, **self._info})
        if request.url.path != "/v1/score":
            return answer(request)
        if self._fail is not None and self.num_scored >= self._scored_before:
            if isinstance(self._fail, Exception):
                raise self._fail
            return copy_of(self._fail)
        self.num_scored += 1
        return answer(request)

    def client(self, **settings):
        settings = {"max_retries": 0, **settings}
        return AsyncScoreClient(f"http://{self.name}", transport=httpx.MockTransport(self), **settings)


async def run(*servers, **settings):
    clients = [server.client() for server in servers]
    return await evaluate(clients, CORPUS, **SETTINGS, **settings)


@pytest.fixture
async def expected():
    return (await run(Server())).windows


async def test_both_servers_take_their_part_and_the_windows_come_in_order(expected):
    servers = Server("a"), Server("b")
    evaluation = await run(*servers, concurrency=2)
    assert evaluation.windows == expected
    assert evaluation.concurrency == 4
    assert sum(server.num_scored for server in servers) == len(expected)
    assert min(server.num_scored for server in servers) > len(expected) / 4


@pytest.mark.parametrize(
    "fail",
    [httpx.ConnectError("refused"), httpx.ReadTimeout("silent"), error(500, "dead"), error(503, "down")],
    ids=repr,
)
async def test_a_server_that_dies_is_dropped_and_its_windows_go_to_the_other(expected, caplog, fail):
    dying, other = Server("dying", fail=fail, scored_before=3), Server("other")
    evaluation = await run(dying, other, concurrency=2)
    assert evaluation.windows == expected
    assert (dying.num_scored, other.num_scored) == (3, len(expected) - 3)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("http://dying is dropped")


async def test_windows_lost_when_the_other_server_has_finished_are_not_forgotten(expected):
    finished = asyncio.Event()

    class Late(Server):
        async def __call__(self, request):
            if request.url.path == "/v1/score" and request.method == "POST":
                await finished.wait()
                raise httpx.ReadError("died in the last window")
            return await super().__call__(request)

    other = Server("other")

    def note(progress):
        if progress.windows_done == progress.num_windows - 2:
            finished.set()

    evaluation = await run(Late("late"), other, concurrency=2, on_progress=note)
    assert evaluation.windows == expected
    assert other.num_scored == len(expected)


async def test_the_last_servers_failure_ends_the_run():
    with pytest.raises(ServerError, match="b died"):
        await run(
            Server("a", fail=error(500, "a died"), scored_before=2),
            Server("b", fail=error(500, "b died"), scored_before=9),
        )


async def test_a_request_at_fault_ends_the_run_on_every_server():
    with pytest.raises(BadRequestError, match="no such token"):
        await run(Server("a", fail=error(400, "no such token")), Server("b"))


async def test_a_server_that_is_down_has_a_grace_and_the_last_one_has_all_the_time(waits, clock, expected):
    refused = httpx.ConnectError("refused")
    dying = Server("dying", fail=refused)

    class Restarting(Server):
        async def __call__(self, request):
            if self.num_scored == 5 and sum(waits) < 300:
                raise refused
            return await super().__call__(request)

    last = Restarting("last")
    clients = [server.client(retry_for=600) for server in (dying, last)]
    evaluation = await evaluate(clients, CORPUS, **SETTINGS, concurrency=1)
    assert evaluation.windows == expected
    assert sum(waits) > 300 > GRACE


async def test_a_grace_is_over_long_before_retry_for(waits, clock, expected):
    servers = Server("dying", fail=httpx.ConnectError("refused")), Server("other")
    await evaluate([server.client(retry_for=600) for server in servers], CORPUS, **SETTINGS, concurrency=1)
    assert sum(waits) == pytest.approx(GRACE)


async def test_a_busy_server_is_not_dropped_after_the_grace(waits, clock, expected, caplog):
    class Busy(Server):
        async def __call__(self, request):
            if self.num_scored == 5 and sum(waits) < 300:
                return error(429, "busy")
            return await super().__call__(request)

    servers = Busy("busy"), Server("other")
    clients = [server.client(retry_for=600) for server in servers]
    evaluation = await evaluate(clients, CORPUS, **SETTINGS, concurrency=1)
    assert evaluation.windows == expected
    assert "dropped" not in caplog.text


@pytest.mark.parametrize(
    "difference",
    [
        {"model": "other"},
        {"dtype": "bfloat16"},
        {"quantization": "fp8"},
        {"scoremode_version": "9.9.8"},
        {"vllm_version": "0.33.0"},
        {"max_model_len": 128},
        {"vocab_size": 300},
        {"adds_bos": False},
    ],
    ids=str,
)
async def test_servers_that_differ_do_not_share_a_run(difference):
    servers = Server("a"), Server("b", info=difference)
    (name, value), *_ = difference.items()
    with pytest.raises(ServersDifferError) as caught:
        await run(*servers)
    what = f"{name} is {value!r} instead of {INFO[name]!r}"
    assert str(caught.value) == f"http://b does not serve the same as http://a: {what}"
    assert [server.num_scored for server in servers] == [0, 0]


async def test_servers_may_differ_in_how_much_they_do_at_once(expected):
    small, large = Server("a", info={"max_num_seqs": 3}), Server("b", info={"max_num_seqs": 5, "max_top_logprobs": 1})
    evaluation = await run(small, large)
    assert evaluation.windows == expected
    assert evaluation.concurrency == 8


@pytest.mark.parametrize(
    ("reported", "asked", "in_flight"),
    [(None, None, 8), (4, None, 4), (256, None, MAX_CONCURRENCY), (4, 12, 12), (None, 100, 100)],
)
async def test_as_many_windows_are_in_flight_as_the_server_runs_or_as_asked(reported, asked, in_flight):
    async with Server(info={"max_num_seqs": reported}).client() as client:
        assert (await Pool.connect([client], asked)).concurrency == in_flight


async def test_no_more_tasks_than_windows_in_flight():
    most = 0

    class Counting(Server):
        async def __call__(self, request):
            nonlocal most
            most = max(most, len(asyncio.all_tasks()))
            return await super().__call__(request)

    evaluation = await evaluate(Counting().client(), CORPUS, context_length=4, stride=1, concurrency=2)
    assert len(evaluation.windows) > 200
    assert most <= 4, "two that score, the run, and the test"


async def test_a_server_that_comes_back_with_another_model_ends_the_run():
    class Replaced(Server):
        away = False

        async def __call__(self, request):
            if self.num_scored == 5 and not self.away:
                self.away = True
                self._info = {"quantization": "fp8"}
                raise httpx.ConnectError("refused")
            return await super().__call__(request)

    with pytest.raises(ServersDifferError, match="a came back as another: quantization is 'fp8'"):
        await evaluate(Replaced().client(max_retries=1), CORPUS, **SETTINGS, concurrency=1)


async def test_a_server_that_comes_back_as_it_was_goes_on(expected):
    class Restarted(Server):
        failures = iter([httpx.ConnectError("refused")])

        async def __call__(self, request):
            if self.num_scored == 5 and (failure := next(self.failures, None)):
                raise failure
            return await super().__call__(request)

    evaluation = await evaluate(Restarted().client(max_retries=1), CORPUS, **SETTINGS)
    assert evaluation.windows == expected


async def test_one_server_that_dies_is_not_dropped_but_is_the_error(caplog):
    with pytest.raises(TransportError, match="refused"):
        await run(Server(fail=httpx.ConnectError("refused")))
    assert "dropped" not in caplog.text


async def test_wrong_scores_end_the_run_on_every_server():
    class Wrong(Server):
        async def __call__(self, request):
            response = await super().__call__(request)
            if request.url.path != "/v1/score" or request.method == "GET":
                return response
            content = json.loads(response.content)
            content["data"] = []
            return httpx.Response(200, json=content)

    with pytest.raises(ResponseError, match="did not score"):
        await run(Wrong("a"), Server("b"))


async def test_single_requests_keep_to_the_places_of_each_server_and_outlive_one():
    in_flight, most, answered = {"a": 0, "b": 0}, {"a": 0, "b": 0}, []

    async def ask(client, job):
        name = client.address[-1]
        in_flight[name] += 1
        most[name] = max(most[name], in_flight[name])
        await asyncio.sleep(0.001)
        in_flight[name] -= 1
        if name == "a" and len(answered) > 10:
            raise TransportError("gone")
        answered.append((name, job))
        return job

    pool = await Pool.connect([Server("a").client(), Server("b").client()], 3)
    with pool.taking_over():
        assert await asyncio.gather(*(pool.ask(job, ask) for job in range(50))) == list(range(50))
    assert most == {"a": 3, "b": 3}
    assert {name for name, _ in answered} == {"a", "b"}
    assert [client.address for client in pool.clients] == ["http://b"]
    assert all(client.retries.grace is None for client in pool.clients)


async def test_who_waits_longest_is_next_even_when_another_asks_as_soon_as_there_is_room():
    answered = []

    async def ask(client, job):
        await asyncio.sleep(0)
        answered.append(job)

    async def ask_twice():
        await pool.ask("first", ask)
        # In the same turn of the event loop in which room was made: who was waiting has not run since.
        await pool.ask("newcomer", ask)

    pool = await Pool.connect([Server().client()], 1)
    await asyncio.gather(ask_twice(), pool.ask("second", ask), pool.ask("third", ask))
    assert answered == ["first", "second", "third", "newcomer"]
