"""Comparisons with a reference as a library makes them, against divergences that are worked out anew here."""

import json

import httpx
import numpy as np
import pytest
from fake_references import KldServer, compare, encoded
from fake_scoremode import BOS, copy_of, error

from scoremode import (
    APIStatusError,
    AsyncScoreClient,
    NotFoundError,
    OutputError,
    ResponseError,
    ServersDifferError,
    TransportError,
    _output,
)
from scoremode.corpora import Corpus
from scoremode.divergence import KldPlan, measure_kld, measure_noise_floor
from scoremode.journal import open_journal
from scoremode.kld import POSITION_DTYPES, KldPositions
from scoremode.recording import record_reference
from scoremode.windows import METHODS

TEXT = "The quick brown fox jumps over the lazy dog"
NOISE = 0.5


def client_of(server, name="fake") -> AsyncScoreClient:
    return AsyncScoreClient(f"http://{name}", transport=httpx.MockTransport(server), max_retries=0)


async def recorded(method="disjoint", length=8) -> dict:
    """What a server keeps that has recorded `TEXT` as `base`."""
    server = KldServer()
    async with client_of(server) as client:
        await record_reference(client, Corpus("fox", TEXT, "made up", 1), "base", method=method, context_length=length)
    return server.references


@pytest.fixture
async def references():
    return await recorded()


async def measure(*servers, **settings):
    clients = [client_of(server, name) for server, name in zip(servers, "abc", strict=False)]
    return await measure_kld(clients, "base", **settings)


def same_positions(found: KldPositions, expected: KldPositions) -> bool:
    return all(getattr(found, name).tolist() == getattr(expected, name).tolist() for name in POSITION_DTYPES)


@pytest.mark.parametrize("method", METHODS)
async def test_every_position_of_every_window_is_there_in_order(method):
    references = await recorded(method)
    measurement = await measure(KldServer(references, noise=NOISE), concurrency=3)
    windows = [compare(*window, NOISE) for window in references["base"].windows]
    assert measurement.window_sizes == [len(window) for window in windows]
    assert same_positions(measurement.positions, KldPositions.concatenate(windows))
    kld = np.concatenate([window.kld for window in windows]).astype(np.float64)
    assert measurement.statistics["kld"]["mean"] == pytest.approx(kld.mean(), rel=1e-12)
    assert measurement.statistics["kld"]["p99"] == pytest.approx(np.percentile(kld, 99), rel=1e-12)
    assert measurement.statistics["num_windows"] == len(windows)


async def test_it_says_what_was_compared(references):
    measurement = await measure(KldServer(references, noise=NOISE, info={"quantization": "fp8"}))
    assert (measurement.model, measurement.server.quantization) == ("bytes", "fp8")
    assert (measurement.reference.name, measurement.reference.quantization) == ("base", None)
    assert (measurement.concurrency, measurement.as_noise_floor) == (8, False)
    assert measurement.positions_per_second == pytest.approx(35 / measurement.seconds)


async def test_the_server_has_the_same_statistics(references):
    server = KldServer(references, noise=NOISE)
    async with client_of(server) as client:
        measurement = await measure_kld(client, "base")
        assert measurement.statistics == (await client.kld("base")).statistics


async def test_windows_are_asked_for_one_by_one(references):
    server = KldServer(references, noise=NOISE)
    await measure(server)
    asked = [body["windows"] for _, path, body in server.requests if path == "/v1/kld"]
    assert sorted(asked) == [[index, index + 1] for index in range(5)]


async def test_progress_runs_to_the_mean(references):
    steps = []
    measurement = await measure(KldServer(references, noise=NOISE), concurrency=1, on_progress=steps.append)
    assert [(step.windows_done, step.num_windows, step.num_scored) for step in steps] == [
        (done, 5, 7 * done) for done in range(1, 6)
    ]
    assert steps[-1].mean == pytest.approx(measurement.statistics["kld"]["mean"])


async def test_a_model_beside_itself_is_the_noise_floor_that_later_comparisons_are_multiples_of(references):
    assert (await measure(KldServer(references, noise=NOISE))).kld_over_noise_floor is None
    steps = []
    server = KldServer(references)
    floor = await measure_noise_floor(client_of(server), "base", on_progress=steps.append)
    assert floor.as_noise_floor
    assert floor.statistics["kld"]["mean"] == floor.reference.noise_floor.mean == 0
    assert [body for _, path, body in server.requests if path == "/v1/kld"] == [
        {
            "reference": "base",
            "top_logprobs": 0,
            "as_noise_floor": True,
            "encoding_format": "base64",
            "stream": True,
        }
    ]
    assert [step.windows_done for step in steps] == [1, 2, 3, 4, 5]
    assert same_positions(
        floor.positions, KldPositions.concatenate([compare(*window, 0.0) for window in references["base"].windows])
    )
    assert (await measure(KldServer(references, noise=NOISE))).kld_over_noise_floor is None, "nothing is 0 times"
    references["base"].noise_floor["mean"] = 0.001
    later = await measure(KldServer(references, noise=NOISE))
    assert later.kld_over_noise_floor == pytest.approx(later.statistics["kld"]["mean"] / 0.001)


async def test_another_model_makes_no_noise_floor(references):
    with pytest.raises(APIStatusError, match="not the reference's"):
        await measure_noise_floor(client_of(KldServer(references, noise=NOISE)), "base")


async def test_a_noise_floor_of_some_windows_is_none(references):
    server = KldServer(references)

    def lacking(request):
        response = server(request)
        if request.url.path != "/v1/kld":
            return response
        return httpx.Response(200, content=response.content.split(b"\n\n", 1)[1])

    with pytest.raises(ResponseError, match="lacks 1 windows"):
        await measure_noise_floor(client_of(lacking), "base")


async def test_two_servers_take_their_part_and_one_that_dies_is_replaced(references):
    alone = await measure(KldServer(references, noise=NOISE))
    one, two = KldServer(references, noise=NOISE), KldServer(references, noise=NOISE)
    measurement = await measure(one, two, concurrency=1)
    assert same_positions(measurement.positions, alone.positions)
    assert sorted(one.compared + two.compared) == [0, 1, 2, 3, 4]
    assert measurement.concurrency == 2

    def dying(request):
        if request.url.path == "/v1/kld" or (request.url.path == "/v1/references/base" and other.compared):
            raise httpx.ConnectError("refused")
        return KldServer(references, noise=NOISE)(request)

    other = KldServer(references, noise=NOISE)
    measurement = await measure(dying, other, concurrency=1)
    assert same_positions(measurement.positions, alone.positions)
    assert len(other.compared) == 5


async def test_servers_with_other_references_of_the_name_do_not_share_a_run(references):
    others = await recorded(length=4)
    with pytest.raises(ServersDifferError, match="http://b has another reference 'base' than http://a") as caught:
        await measure(KldServer(references, noise=NOISE), KldServer(others, noise=NOISE))
    assert "num_windows is 10 instead of 5" in str(caught.value)
    with pytest.raises(ServersDifferError, match="fingerprint is"):
        await measure(KldServer(references, noise=NOISE), KldServer(references, noise=0.25))
    with pytest.raises(NotFoundError, match="no reference 'base'"):
        await measure(KldServer(references, noise=NOISE), KldServer({}, noise=NOISE))


def changed(server, path, change):
    """`server`, with `change` applied to what it answers at `path`."""

    def handler(request):
        response = server(request)
        if request.url.path != path:
            return response
        content = json.loads(response.content)
        change(content)
        return httpx.Response(200, json=content)

    return handler


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda answer: answer["data"][0].update(index=3), ResponseError, "did not compare the window"),
        (lambda answer: answer["data"].clear(), ResponseError, "did not compare the window"),
        (lambda answer: answer.update(fingerprint="x"), ServersDifferError, "another model: its fingerprint is 'x'"),
    ],
)
async def test_answers_that_are_not_those_of_the_window_end_the_run(references, change, kind, message):
    with pytest.raises(kind, match=message):
        await measure(changed(KldServer(references, noise=NOISE), "/v1/kld", change), concurrency=1)


async def test_a_reference_with_fewer_positions_than_it_says_is_no_result(references):
    fewer = changed(
        KldServer(references, noise=NOISE), "/v1/references/base", lambda answer: answer.update(num_scored=36)
    )
    with pytest.raises(ResponseError, match="35 positions for the 36"):
        await measure(fewer)


async def test_a_reference_that_is_replaced_meanwhile_is_no_result(references):
    server = KldServer(references, noise=NOISE)

    def replaced(answer):
        if server.compared:
            answer["created"] += 1

    with pytest.raises(ResponseError, match="replaced while it was compared with: created is"):
        await measure(changed(server, "/v1/references/base", replaced))


def journal_at(path):
    """What opens the journal, and what it has opened."""
    opened = []

    def start(plan):
        opened.append(open_journal(path, plan))
        return opened[-1]

    return start, opened


async def run_into_the_end_of(server, path):
    """The bytes of the journal of a run whose server goes away."""
    start, opened = journal_at(path)
    with pytest.raises(TransportError):
        await measure(server, concurrency=1, start_journal=start)
    opened[0].close()
    return path.read_bytes()


class Failing(KldServer):
    def __call__(self, request):
        response = super().__call__(request)
        if response is None:
            raise httpx.ConnectError("refused")
        return response


async def test_windows_of_the_journal_are_not_compared_again_and_come_back_to_the_last_bit(references, tmp_path):
    path = tmp_path / "run.json.journal"
    unbroken = await measure(KldServer(references, noise=NOISE))
    before = await run_into_the_end_of(Failing(references, noise=NOISE, allowed=3), path)
    assert before.count(b"\n") == 4, "a header and three windows"
    server, steps = KldServer(references, noise=NOISE), []
    start, opened = journal_at(path)
    measurement = await measure(server, start_journal=start, on_progress=steps.append)
    opened[0].close()
    assert sorted(server.compared) == [3, 4]
    assert path.read_bytes().startswith(before)
    assert same_positions(measurement.positions, unbroken.positions)
    assert measurement.statistics == unbroken.statistics
    assert [(step.windows_done, step.num_scored, step.num_resumed) for step in steps] == [
        (3, 21, 21),
        (4, 28, 21),
        (5, 35, 21),
    ]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({"index": 9}, "too far"),
        ({"index": -1}, "negative"),
        ({"index": 0, "num_scored": 6}, "not as many"),
        ({"positions": {}}, "no arrays"),
        ({"positions": {"kld": "?"}}, "no base64"),
        ({"more": 1}, "another field"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
async def test_a_damaged_line_of_the_journal_is_named(references, tmp_path, line, name):
    path = tmp_path / "run.json.journal"
    before = await run_into_the_end_of(Failing(references, noise=NOISE, allowed=2), path)
    *whole, last = before.splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + json.dumps({**json.loads(last), **line}).encode() + b"\n")
    start, _ = journal_at(path)
    with pytest.raises(OutputError, match="damaged at line 3"):
        await measure(KldServer(references, noise=NOISE), start_journal=start)


@pytest.mark.parametrize("length", [2, 4, 32])
async def test_the_room_that_is_kept_for_a_window_in_the_journal_is_enough(length):
    async with client_of(KldServer(await recorded(length=length), noise=NOISE)) as client:
        plan = KldPlan(await client.info(), "bytes", await client.reference("base"))
        [window] = (await client.kld("base", (0, 1))).data
    line = json.dumps({**plan.to_line(window), "seconds": 123456.78901234567})
    assert len(line) <= KldPlan.JOURNAL_BYTES_PER_TOKEN * window.num_scored + _output._BYTES_PER_WINDOW


async def test_a_journal_of_another_reference_or_model_is_refused(references, tmp_path):
    path = tmp_path / "run.json.journal"
    await run_into_the_end_of(Failing(references, noise=NOISE, allowed=2), path)
    start, _ = journal_at(path)
    with pytest.raises(OutputError, match=r"server.fingerprint is 'noise 0.5' instead of 'noise 0.25'"):
        await measure(KldServer(references, noise=0.25), start_journal=start)
    with pytest.raises(OutputError, match=r"reference.num_windows is 5 instead of 10"):
        await measure(KldServer(await recorded(length=4), noise=NOISE), start_journal=start)


async def test_the_most_divergent_tokens_have_the_text_before_them_and_what_was_preferred(references):
    measurement = await measure(KldServer(references, noise=NOISE))
    assert len(measurement.most_divergent) == 20
    targets = [token for tokens, first in references["base"].windows for token in tokens[first:]]
    for entry, token in zip(measurement.statistics["most_divergent"], measurement.most_divergent, strict=True):
        at = entry["index"]
        assert (token.index, token.window, token.kld) == (at, entry["window"], entry["kld"])
        assert token.token == chr(targets[at])
        assert token.text_before == "".join(map(chr, targets[7 * token.window : at])), "of its own window"
        assert token.probability == pytest.approx(np.exp(float(measurement.positions.logprobs[at])))
        assert token.reference_probability == pytest.approx(np.exp(float(measurement.positions.reference_logprobs[at])))
        assert token.reference_top_token_id == measurement.positions.reference_top_token_ids[at]
        wanted = {True: "<s>", False: chr(token.top_token_id)}[token.top_token_id == BOS]
        assert token.top_token == wanted


async def test_where_targets_follow_one_another_the_text_before_goes_over_the_ends_of_windows():
    measurement = await measure(KldServer(await recorded("sliding"), noise=NOISE))
    for token in measurement.most_divergent:
        assert token.text_before == TEXT[max(0, token.index - 16) : token.index]


async def test_a_server_that_does_not_detokenize_costs_the_texts_only(references, caplog):
    server = KldServer(references, noise=NOISE)

    def mute(request):
        return copy_of(error(404, "Not Found")) if request.url.path == "/detokenize" else server(request)

    measurement = await measure(mute)
    assert measurement.most_divergent[0].kld == measurement.statistics["kld"]["max"]
    assert {token.token for token in measurement.most_divergent} == {None}
    assert "shown without their text: Not Found" in caplog.text


async def test_infinite_divergences_are_counted_and_do_not_end_the_run(references):
    server = KldServer(references, noise=NOISE)

    def infinite(answer):
        if answer["windows"] == [0, 1]:
            answer["data"][0]["kld"] = encoded(np.full(7, np.inf), "<f4")

    steps = []
    measurement = await measure(changed(server, "/v1/kld", infinite), on_progress=steps.append)
    assert measurement.statistics["num_infinite_kld"] == 7
    assert measurement.statistics["kld"]["mean"] is None
    assert measurement.statistics["kld"]["median"] is not None
    assert steps[-1].mean == np.inf
    assert measurement.most_divergent[0].kld is None
