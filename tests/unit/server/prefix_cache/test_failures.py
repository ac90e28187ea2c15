"""Requests that wait for others, others that fail, and weights that change under them."""

import asyncio
from typing import Any

import pytest

from scoremode_server.prefix_cache.store import ENTRY_BYTES, RowStore
from scoremode_server.vllm_patches.engine_client import CHANGES, within_changes
from tests.unit.server.prefix_cache.cache_setup import LORAS, ROOM, SIZE, Ask, Setup, outcome, setup
from tests.unit.server.prefix_cache.fake_engine import FakeEngine, LostRequestError


class HeldEngine(FakeEngine):
    """Answers a request when the test says so: `gates` by number, failures by `lost`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(SIZE, latency=0, **settings)
        self.gates = [asyncio.Event() for _ in range(12)]
        self.lost: set[int] = set()

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        number = self.num_requests
        async for output in super().generate(prompt, params, request_id, **options):
            await self.gates[number].wait()
            if number in self.lost:
                raise LostRequestError(request_id)
            yield output


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def held() -> tuple[Setup, Any]:
    made = Setup(HeldEngine(), RowStore(SIZE, ROOM))
    return made, made.engine


@pytest.mark.parametrize("cancels", [False, True], ids=["fails", "is cancelled"])
async def test_a_waiter_for_a_request_that_fails_computes_it_all(cancels: bool):
    made, engine = held()
    owner = asyncio.create_task(outcome(made, Ask(list(range(30)))))
    await turns()
    waiters = [asyncio.create_task(made.ask(Ask([*range(22), option, 50, 51]))) for option in range(3)]
    for gate in engine.gates[1:]:
        gate.set()
    await turns()
    assert not any(waiter.done() for waiter in waiters)
    engine.lost.add(0)
    engine.gates[0].set() if not cancels else owner.cancel()
    answers = [await waiter for waiter in waiters]
    # The last request may find what the first has computed meanwhile.
    assert answers[0].num_cached_tokens == 0
    assert 4 < engine.num_requests <= 4 + 3
    await asyncio.wait([owner])
    made.check_nothing_is_left()


async def test_a_waiter_that_is_cancelled_leaves_the_owner_and_the_others_alone():
    made, engine = held()
    owner = asyncio.create_task(made.ask(Ask(list(range(30)))))
    await turns()
    followers = [asyncio.create_task(made.ask(Ask([*range(22), option, 50]))) for option in range(2)]
    engine.gates[1].set()
    engine.gates[2].set()
    await turns()
    followers[0].cancel()
    await turns()
    assert followers[0].cancelled()
    assert not owner.done()
    assert not followers[1].done()
    engine.gates[0].set()
    assert (await owner).num_cached_tokens == 0
    assert (await followers[1]).num_cached_tokens == 20
    made.check_nothing_is_left()


async def test_a_waiter_gets_rows_of_the_owner_that_the_cache_did_not_store():
    made = Setup(FakeEngine(SIZE, in_order=True), RowStore(SIZE, ENTRY_BYTES))
    outputs = await asyncio.gather(*(made.ask(Ask([*range(22), option, 50])) for option in range(3)))
    assert len(made.store) == 0
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 20, 20]


# When weights change


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


async def test_a_request_that_waits_while_weights_change_is_computed_whole():
    made, engine = held()
    tasks = [asyncio.create_task(made.ask(Ask([*range(22), option]))) for option in range(2)]
    await turns()
    await engine.update_weights()
    for gate in engine.gates:
        gate.set()
    assert [output.num_cached_tokens for output in await asyncio.gather(*tasks)] == [0, 0]
    assert engine.num_requests == 3


async def test_json_of_earlier_rows_is_not_used_after_weights_change():
    """The block hashes, under which pieces of JSON are kept, are those of before the change."""
    made, engine = held()
    for gate in engine.gates[:2] + engine.gates[3:]:
        gate.set()
    asks = [Ask([*range(22), option, 50, 51], scores=False) for option in range(3)]
    assert (await made.ask(asks[0])).num_cached_tokens == 0
    assert list((await made.ask(asks[1])).block_hashes)
    straddling = asyncio.create_task(made.ask(asks[2]))
    await turns()
    await engine.update_weights()
    engine.gates[2].set()
    answer = await straddling
    assert answer.num_cached_tokens == 0
    assert not list(answer.block_hashes)


async def test_an_engine_without_a_method_that_changes_weights_is_refused():
    class OlderEngine(FakeEngine):
        update_weights = None

    with pytest.raises(RuntimeError, match="update_weights"):
        within_changes(OlderEngine(SIZE), RowStore(SIZE, ROOM).change, lambda: None)
