"""A recording that says what it scores, so that nobody has to score the text again."""

from tests.bad_inputs import REFERENCES
from tests.unit.server.api.light_app import client_of, events, light_app
from tests.unit.server.api.reference_engine import BODY, NUM_WINDOWS, ReferenceEngine


async def test_windows_have_logprobs_and_ranks_where_they_are_asked_for(tmp_path):
    engine = ReferenceEngine(tmp_path)
    async with client_of(light_app(engine)) as client:
        *windows, _ = events(await client.post(REFERENCES, json={**BODY, "stream": True, "return_ranks": True}))
        *without, _ = events(await client.post(REFERENCES, json={**BODY, "stream": True, "name": "other"}))
    assert len(windows) == NUM_WINDOWS
    for index, window in enumerate(windows):
        assert window["logprobs"] == engine.directory.open("base").read_shard(index)[1].tolist()
        assert len(window["ranks"]) == window["num_scored"]
        assert all(rank >= 1 for rank in window["ranks"])
    assert not any({"logprobs", "ranks"} & window.keys() for window in without)
