"""What the cache saves: the tokens that the engine computes. `test_streams.py` tests that every answer is right."""

import asyncio
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from scoremode_server.prefix_cache.store import ENTRY_BYTES, RowStore
from scoremode_server.vllm_patches.engine_client import CHANGES, within_changes
from tests.unit.server.prefix_cache.cache_setup import LORAS, ROOM, SIZE, Ask, Setup, setup
from tests.unit.server.prefix_cache.fake_engine import FakeEngine


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


@pytest.mark.parametrize("scores", [True, False])
async def test_requests_one_after_another_compute_only_what_is_new(scores: bool):
    made = setup()
    first, second = Ask(list(range(30)), scores=scores), Ask([*range(22), 90, 91, 92], scores=scores)
    assert (await made.ask(first)).num_cached_tokens == 0
    computed = made.engine.num_computed
    assert (await made.ask(second)).num_cached_tokens == 20
    assert made.engine.num_computed - computed == len(second.fed) - 20
    assert made.engine.num_requests == 2
    assert made.counted("joined") == 0


async def test_rows_that_a_short_run_computed_again_are_not_hits():
    """The keys and values are let go between a request's run and the one for the last block that it lacks."""

    class ForgettingEngine(FakeEngine):
        async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
            if request_id.endswith("-last-block"):
                self.prefix_cache.clear()
            async for output in super().generate(prompt, params, request_id, **options):
                yield output

    made = Setup(ForgettingEngine(SIZE), RowStore(SIZE, ROOM))
    await made.ask(Ask([*range(40), 50, 51]))
    output = await made.ask(Ask([*range(40), 60, 61]))
    assert output.num_cached_tokens == 0
    assert made.counted("hits") == 0


async def test_without_a_known_first_block_the_prefix_cache_is_not_read():
    made = setup()
    await made.ask(Ask(list(range(12))))
    await made.ask(Ask([*range(12), 13]))
    await made.ask(Ask([5, *range(12)]))
    assert [params.skip_reading_prefix_cache for _, params in made.engine.requests] == [True, False, True]


async def test_an_adapter_of_the_same_id_and_name_from_another_path_shares_nothing(monkeypatch: pytest.MonkeyPatch):
    made = setup()
    await made.ask(Ask(list(range(13)), adapter=1))
    monkeypatch.setitem(LORAS, 1, LoRARequest("one", 1, "/elsewhere"))
    assert (await made.ask(Ask(list(range(13)), adapter=1))).num_cached_tokens == 0


async def test_another_process_gives_no_hit_without_rows():
    made = setup()
    await made.ask(Ask(list(range(33))))
    other = Setup(made.engine, RowStore(SIZE, ROOM))
    await other.ask(Ask(list(range(6))))
    assert (await other.ask(Ask(list(range(33))))).num_cached_tokens == SIZE
    assert made.engine.num_requests == 3


async def test_no_request_waits_for_rows_that_a_continuation_leaves_out():
    """Its context's keys and values are with the engine, but their rows were dropped."""
    made = setup(in_order=True)
    context = [index % 7 for index in range(40)]
    await made.ask(Ask([*context, 9, 9]))
    made.store._blocks.clear()
    made.store.num_bytes = 0
    continuation, whole = Ask([*context, 5, 5, 5], first=40), Ask([*context, 6, 6, 6])
    answers = await asyncio.gather(made.ask(continuation), made.ask(whole))
    assert answers[1].num_cached_tokens == 0
    assert made.counted("joined") == 0


async def test_a_waiter_gets_rows_of_the_owner_that_the_cache_did_not_store():
    made = Setup(FakeEngine(SIZE, in_order=True), RowStore(SIZE, ENTRY_BYTES))
    outputs = await asyncio.gather(*(made.ask(Ask([*range(22), option, 50])) for option in range(3)))
    assert len(made.store) == 0
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 20, 20]


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
    assert len(made.store) == 0
    assert made.store.generation == generation + 2
    assert (await made.ask(ask)).num_cached_tokens == 0
    assert (await made.ask(ask)).num_cached_tokens == 8


async def test_an_engine_without_a_method_that_changes_weights_is_refused():
    class OlderEngine(FakeEngine):
        update_weights = None

    with pytest.raises(RuntimeError, match="update_weights"):
        within_changes(OlderEngine(SIZE), RowStore(SIZE, ROOM).change, lambda: None)
