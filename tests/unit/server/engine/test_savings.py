"""The cache saves work, leaves out requests that are not for it, and survives wrong answers of the engine.
`test_streams.py` tests all answers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest

from scoremode_server.engine.engine import make_store
from scoremode_server.engine.store import RowStore
from scoremode_server.errors import EngineOutputError
from scoremode_server.rows import score_columns
from scoremode_server.vllm_compat.engine_client import CHANGES
from tests.unit.server.engine.cache_setup import LORAS, ROOM, SIZE, Ask, Setup, setup
from tests.unit.server.engine.fake_engine import FakeEngine, HeldEngine, prompt_logprobs, until


@pytest.mark.parametrize("shared", [40, 41, 43], ids=["parts where a block ends", "one after", "three after"])
async def test_four_options_at_once_compute_their_prefix_once(shared: int):
    made = setup(in_order=True)
    context = [index % 7 for index in range(shared)]
    asks = [Ask([*context, 10 + option, 20, 21, 22, 23]) for option in range(4)]
    outputs = await asyncio.gather(*map(made.ask, asks))
    # An option after the first computes what is after the last whole block of the prefix, and that block as well
    # where the prefix ends with it: its last hidden state predicts the option's own first token.
    computed_again = shared % SIZE or SIZE
    assert made.engine.num_computed == (shared + 4) + 3 * (4 + computed_again)
    cached = sorted(output.num_cached_tokens for output in outputs)
    assert cached == [0, *[shared - computed_again] * 3]
    assert made.counted("hits") + made.counted("misses") == sum(len(ask.token_ids) - 1 for ask in asks)
    assert made.counted("hits") == sum(cached)
    assert made.counted("joined") == 3


@pytest.mark.parametrize(("tops", "joined"), [((0, 2), 0), ((2, 0), 1), ((0, 2, 2), 1)])
async def test_a_request_waits_only_for_one_with_as_many_columns(tops: tuple[int, ...], joined: int):
    made = setup(in_order=True)
    await asyncio.gather(*(made.ask(Ask(list(range(41)), top)) for top in tops))
    assert (made.engine.num_requests, made.counted("joined")) == (len(tops), joined)


async def test_an_adapter_of_the_same_id_and_name_from_another_path_shares_nothing(monkeypatch: pytest.MonkeyPatch):
    made = setup()
    await made.ask(Ask(list(range(13)), adapter=1))
    monkeypatch.setitem(LORAS, 1, LoRARequest("one", 1, "/elsewhere"))
    assert (await made.ask(Ask(list(range(13)), adapter=1))).num_cached_tokens == 0


async def test_the_queue_counts_only_what_is_new():
    made = Setup(engine := HeldEngine(SIZE), RowStore(SIZE, ROOM))
    engine.let_go.set()
    await made.ask(Ask(list(range(41))))
    engine.let_go.clear()
    async with made.scoring.admission.request(1, 44) as queue:
        engine_pass = Ask([*range(41), 7, 8, 9]).engine_pass("new", queue)
        scoring = asyncio.create_task(made.scoring.rows(engine_pass))
        await until(lambda: queue.running)
        assert made.scoring.admission._num_computing_tokens == 43 - 40
        engine.let_go.set()
        await scoring


async def test_another_process_gives_no_hit_without_rows():
    made = setup()
    await made.ask(Ask(list(range(33))))
    other = Setup(made.engine, RowStore(SIZE, ROOM))
    await other.ask(Ask(list(range(6))))
    assert (await other.ask(Ask(list(range(33))))).num_cached_tokens == SIZE
    assert made.engine.num_requests == 3


@pytest.mark.parametrize("name", CHANGES)
async def test_every_change_drops_the_rows_and_the_salt_before_and_after(name: str):
    made = setup()
    ask = Ask(list(range(13)))
    await made.ask(ask)
    generation = made.store.generation
    arguments = {
        "add_lora": [LORAS[1]],
        "remove_lora": [1],
        "collective_rpc": ["reload"],
        "update_weight_version": ["2"],
    }
    await getattr(made.engine, name)(*arguments.get(name, []))
    assert len(made.store._blocks) == 0
    assert made.store.generation == generation + 2
    assert (await made.ask(ask)).num_cached_tokens == 0
    assert (await made.ask(ask)).num_cached_tokens == 8


# Requests that are not for the cache


@pytest.mark.parametrize(
    ("ask", "max_bytes"),
    [(Ask(range(13), cached=False), ROOM), (Ask([0, 1, 2]), ROOM), (Ask(range(13)), 0)],
    ids=["that do without", "shorter than a block", "of an engine without a budget"],
)
async def test_other_requests_are_computed_whole_and_leave_nothing(ask: Ask, max_bytes: int):
    made = setup(max_bytes)
    for _ in range(2):
        assert (await made.ask(ask)).num_cached_tokens == 0
    assert not any("scoremode" in (salt or "") for salt in made.engine.salts)
    assert all(params.skip_reading_prefix_cache for _, params in made.engine.requests)
    assert len(made.store._blocks) == 0


# Rows that are needed from a position on


@pytest.mark.parametrize("first", [40, 43])
async def test_unneeded_rows_do_not_make_the_whole_prompt_run_again(first: int):
    """A continuation after a prompt whose rows were let go, while its keys and values are still with the engine."""
    made = setup()
    context = [index % 7 for index in range(first)]
    await made.ask(Ask([*context, 10, 11, 12, 13]))
    made.store._blocks.clear()
    made.store.num_bytes = 0
    before = made.engine.num_computed
    answer = await made.ask(Ask([*context, 20, 21, 22, 23], first=first))
    assert len(answer.rows) == 4
    assert answer.num_cached_tokens >= first - SIZE
    assert made.engine.num_computed - before <= 2 * SIZE + 4
    assert made.counted("hits") == 0, "none of the rows that were asked for was there"


@pytest.mark.parametrize(("mode", "count", "enabled"), [("0", 2, True), ("1", 1, True), ("1", 2, False)])
def test_no_rows_are_stored_where_another_server_may_change_the_weights(
    monkeypatch: pytest.MonkeyPatch, mode: str, count: int, enabled: bool
):
    """The routes that do so are vLLM's development mode's, and reach one of the processes."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, prefix_match_unit=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(_api_process_count=count),
    )
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", mode)
    assert make_store(config, 9).is_usable == enabled


# Wrong answers of the engine


class BrokenEngine(FakeEngine):
    """Spoils the rows of the first requests: `spoil` is given the arrays and returns others."""

    def __init__(self, spoil: Any, num_spoilt: int) -> None:
        super().__init__(SIZE)
        self.spoil, self.num_spoilt = spoil, num_spoilt

    async def generate(self, *given: Any, **options: Any) -> Any:
        async for output in super().generate(*given, **options):
            if self.num_requests <= self.num_spoilt:
                rows = output.prompt_logprobs.rows(score_columns(1))
                output.prompt_logprobs = prompt_logprobs(*self.spoil(rows.token_ids, rows.logprobs, rows.ranks))
            yield output


def with_nan(row: int) -> Any:
    return lambda ids, logprobs, ranks: (ids, np.where(np.arange(len(ids))[:, None] == row, np.nan, logprobs), ranks)


SPOILS = {
    "NaN": with_nan(5),
    "NaN in the first block": with_nan(1),
    "of other tokens": lambda ids, logprobs, ranks: (ids + 1, logprobs, ranks),
    "too few": lambda *rows: tuple(array[1:] for array in rows),
    "too many": lambda *rows: tuple(np.concatenate([array[:2], array]) for array in rows),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
async def test_an_output_other_than_requested_is_requested_again_once_with_a_cache(spoil: Any):
    made = Setup(BrokenEngine(spoil, 1), RowStore(SIZE, ROOM))
    await made.ask(Ask(list(range(13))))
    assert made.engine.num_requests == 2
    # The stored rows are right now too.
    assert (await made.ask(Ask([*range(13), 20, 21]))).num_cached_tokens == 12
    for max_bytes in (ROOM, 0):
        broken = Setup(BrokenEngine(spoil, 9), RowStore(SIZE, max_bytes))
        with pytest.raises(EngineOutputError, match="no logprob, or NaN"):
            await broken.ask(Ask(list(range(13))))
        assert len(broken.store._blocks) == 0
        broken.check_nothing_is_left()
