"""Requests that wait for others, others that fail, and weights that change under them."""

import asyncio
from typing import Any

import pytest
from cache_setup import LORAS, ROOM, SIZE, Ask, Setup, outcome, setup
from fake_engine import FakeEngine, LostRequestError
from vllm.inputs import tokens_input

from scoremode_server.cache import ENTRY_BYTES, LogprobCache
from scoremode_server.caching import CHANGES, clear_on_changes
from scoremode_server.scoring import score_params


class HeldEngine(FakeEngine):
    """Answers a request when the test says so: `gates` by number, failures by `lost`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(SIZE, "v2", latency=0, **settings)
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
    made = Setup(HeldEngine(), LogprobCache(SIZE, ROOM))
    return made, made.engine


@pytest.mark.parametrize("cancels", [False, True], ids=["fails", "is cancelled"])
async def test_followers_of_an_owner_that_fails_succeed_and_compute_once(cancels: bool):
    made, engine = held()
    owner = asyncio.create_task(outcome(made, Ask(list(range(30)))))
    await turns()
    followers = [asyncio.create_task(made.ask(Ask([*range(22), option, 50, 51]))) for option in range(3)]
    await turns()
    for number in (1, 2, 3):
        engine.gates[number].set()
    await turns()
    assert not any(follower.done() for follower in followers)
    engine.lost.add(0)
    engine.gates[0].set() if not cancels else owner.cancel()
    await turns()
    # One of them computes it all again; the others wait for it.
    assert engine.num_requests == 5
    engine.gates[4].set()
    for follower in followers:
        assert (await follower).prompt_logprobs is not None
    assert engine.num_requests == 5
    await asyncio.wait([owner])
    made.check_nothing_is_left()


async def test_a_second_owner_that_fails_is_replaced_by_a_third():
    made, engine = held()
    owner = asyncio.create_task(outcome(made, Ask(list(range(30)))))
    await turns()
    followers = [asyncio.create_task(outcome(made, Ask([*range(22), option, 50, 51]))) for option in range(3)]
    engine.lost |= {0, 4}
    for gate in engine.gates:
        gate.set()
    await turns(100)
    results = [follower.result() for follower in followers]
    assert sum(result is None for result in results) == 1
    assert engine.num_requests == 6
    assert owner.result() is None
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


async def test_the_engine_is_at_work_on_a_request_that_will_have_to_wait():
    made, engine = held()
    tasks = [asyncio.create_task(made.ask(Ask([*range(22), option]))) for option in range(2)]
    await turns()
    assert engine.num_requests == 2
    for gate in engine.gates:
        gate.set()
    await asyncio.gather(*tasks)


async def test_a_waiter_takes_rows_from_the_owner_that_the_cache_had_no_room_for():
    made = Setup(FakeEngine(SIZE, "v1", in_order=True), LogprobCache(SIZE, ENTRY_BYTES))
    outputs = await asyncio.gather(*(made.ask(Ask([*range(22), option, 50])) for option in range(3)))
    assert len(made.cache) == 0
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 20, 20]


async def test_a_generator_that_is_closed_before_it_starts_leaves_nothing():
    made = setup()
    generator = made.caching.generate(tokens_input(list(range(12))), score_params(list(range(13))), "id")
    await generator.aclose()
    made.check_nothing_is_left()


# When weights change


@pytest.mark.parametrize("name", CHANGES)
async def test_every_change_drops_the_rows_and_the_salt_before_and_behind(name: str):
    made = setup()
    ask = Ask(list(range(13)))
    await made.ask(ask)
    generation = made.cache.generation
    arguments = {
        "add_lora": [LORAS[1]],
        "remove_lora": [1],
        "collective_rpc": ["reload"],
        "update_weight_version": ["2"],
    }
    await getattr(made.caching, name)(*arguments.get(name, []))
    assert len(made.cache) == 0
    assert made.cache.generation == generation + 2
    assert (await made.ask(ask)).num_cached_tokens == 0
    assert (await made.ask(ask)).num_cached_tokens == 8


async def test_rows_of_a_request_that_began_before_a_change_are_not_kept():
    made, engine = held()
    task = asyncio.create_task(made.ask(Ask(list(range(13)))))
    await turns()
    await engine.update_weights()
    engine.gates[0].set()
    await task
    assert len(made.cache) == 0


async def test_a_request_that_waits_while_weights_change_is_computed_whole():
    made, engine = held()
    tasks = [asyncio.create_task(made.ask(Ask([*range(22), option]))) for option in range(2)]
    await turns()
    await engine.update_weights()
    for gate in engine.gates:
        gate.set()
    assert [output.num_cached_tokens for output in await asyncio.gather(*tasks)] == [0, 0]
    assert engine.num_requests == 3


async def test_a_request_that_was_made_before_a_change_and_runs_behind_it_takes_and_leaves_nothing():
    made = setup()
    token_ids = list(range(13))
    await made.ask(Ask(token_ids))
    late = made.caching.generate(tokens_input(token_ids[:-1]), score_params(token_ids), "late")
    await made.engine.update_weights()
    (output,) = [output async for output in late]
    assert output.num_cached_tokens == 0
    assert len(made.cache) == 0


async def test_what_was_written_of_earlier_rows_is_not_used_for_a_request_that_saw_weights_change():
    """The blocks' keys, under which pieces of JSON are kept, are those of before the change."""
    made, engine = held()
    for gate in engine.gates[:2] + engine.gates[3:]:
        gate.set()
    asks = [Ask([*range(22), option, 50, 51], scores=False) for option in range(3)]
    assert (await made.ask(asks[0])).num_cached_tokens == 0
    assert list((await made.ask(asks[1])).prompt_logprobs.blocks)
    straddling = asyncio.create_task(made.ask(asks[2]))
    await turns()
    await engine.update_weights()
    engine.gates[2].set()
    output = await straddling
    assert output.num_cached_tokens == 0
    assert not list(output.prompt_logprobs.blocks)


async def test_while_weights_change_requests_go_to_the_engine_as_they_are():
    made = setup()
    with made.cache.change():
        await made.ask(Ask(list(range(13))))
        await made.ask(Ask(list(range(13))))
    assert all(params.skip_reading_prefix_cache for _, params in made.engine.requests)


async def test_an_engine_without_a_method_that_changes_weights_is_refused():
    class OlderEngine(FakeEngine):
        update_weights = None

    with pytest.raises(RuntimeError, match="update_weights"):
        clear_on_changes(OlderEngine(SIZE, "v1"), LogprobCache(SIZE, ROOM))
