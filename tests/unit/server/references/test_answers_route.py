"""`/v1/references` with a model's answers to prompts: what is kept, the agreement of a floor, and what is refused."""

import gc
import json
from typing import Any

import pytest

from scoremode.wire.references import Answer
from scoremode_server.references.comparer import Comparer
from scoremode_server.references.recording import Recording
from scoremode_server.scoring.text_windows import TextDocument
from tests.bad_inputs import KLD, REFERENCES
from tests.unit.server.light_app import check_error, error_of
from tests.unit.server.references.reference_engine import ReferenceEngine

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
LABELS = ["even", "odd", "even"]


def answered(engine: ReferenceEngine, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """A greedy answer, token by token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int((engine.model.hidden_states(tokens)[-1] @ engine.model.weight.T).argmax()))
    return {"prompt_token_ids": prompt, "token_ids": tokens[len(prompt) :], "text": f"of {len(prompt)}"}


def body(engine: ReferenceEngine, **changes: Any) -> dict[str, Any]:
    """Three answers, of which the second is empty, and the third has a token at place 3 that is not greedy."""
    answers = [answered(engine, prompt, size) for prompt, size in zip(PROMPTS, (6, 0, 5), strict=True)]
    answers[2]["token_ids"][3] = 999
    return {"name": "base", "answers": {"max_new_tokens": 6, "data": answers, **changes}, "labels": LABELS}


async def test_answers_are_windows_and_keep_their_places(engine, client, monkeypatch):
    request, are_answers, compare = body(engine), [], Comparer.compare
    monkeypatch.setattr(
        Comparer, "compare", lambda *given: are_answers.append(given[3].prefills_first_target) or compare(*given)
    )
    recorded = (await client.post(REFERENCES, json=request)).json()
    windows = (await client.get(f"{REFERENCES}/base/windows")).json()
    assert (await client.post(KLD, json={"reference": "base", "as_noise_floor": True})).status_code == 200
    measured = (await client.get(f"{REFERENCES}/base")).json()["noise_floor"]["agreement_lengths"]
    targets = (await client.post(KLD, json={"reference": "base"})).json()["data"]
    assert (await client.post(REFERENCES, json=request)).json()["created"] == recorded["created"]
    assert recorded["answers"] == {"max_new_tokens": 6, "temperature": 0, "seed": None, "num_answers": 3}
    assert (recorded["method"], recorded["num_windows"], recorded["num_scored"]) == ("conversation", 2, 11)
    assert (windows["documents"], windows["num_context"], windows["prompts"]) == ([0, 2], [3, 4], PROMPTS[::2])
    assert (windows["labels"], windows["roles"]) == (LABELS[::2], ["assistant"] * 2)
    assert [window["token_ids"] for window in targets] == [
        answer["token_ids"] for answer in request["answers"]["data"][::2]
    ]
    assert (measured, are_answers) == ([6, 0, 3], [True] * 2)
    kept = (engine.directory.root / "base" / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == request["answers"]["data"]


async def test_tokens_are_on_disk_alone_while_windows_are_recorded(engine, client, monkeypatch):
    record, held = Recording.windows, []

    def noted(*given):
        gc.collect()
        held.extend(each for each in gc.get_objects() if type(each) in (Answer, TextDocument))
        return record(*given)

    monkeypatch.setattr(Recording, "windows", noted)
    assert (await client.post(REFERENCES, json=body(engine))).json()["complete"]
    assert not held


async def test_a_reference_is_not_resumed_with_other_settings_of_the_same_answers(engine, client):
    await client.post(REFERENCES, json=body(engine))
    check_error(await client.post(REFERENCES, json=body(engine, max_new_tokens=7)), 409, "answers", "of other answers")


async def test_sampled_answers_have_no_greedy_agreement(engine, client):
    await client.post(REFERENCES, json=body(engine, temperature=1, seed=3))
    await client.post(KLD, json={"reference": "base", "as_noise_floor": True})
    assert (await client.get(f"{REFERENCES}/base")).json()["noise_floor"]["agreement_lengths"] is None


@pytest.mark.parametrize(
    ("answer", "settings", "more", "message"),
    [
        ({"prompt_token_ids": []}, {}, {}, "prompt_token_ids"),
        ({"token_ids": [1000]}, {}, {}, "answers[0] has token id 1000, outside the vocabulary"),
        ({"token_ids": [1] * 5000}, {}, {}, "answers[0] has 5003 tokens, but the model takes at most"),
        ({"token_ids": []}, {}, {}, "none of the 1 answers has a token"),
        ({"tokens": [1]}, {}, {}, "unknown field answers.data[0].tokens"),
        *(({}, settings, {}, next(iter(settings))) for settings in ({"temperature": 0.5}, {"max_new_tokens": 0})),
        *(({}, {}, more, next(iter(more))) for more in ({"prompt": "text"}, {"stride": 4}, {"labels": ["a", "b"]})),
    ],
)
async def test_other_answers_are_refused(engine, client, answer, settings, more, message):
    data = [{"prompt_token_ids": [1, 2, 3], "token_ids": [4], "text": "", **answer}]
    request = {"name": "base", "answers": {"max_new_tokens": 6, "data": data, **settings}, **more}
    status, param, text = error_of(await client.post(REFERENCES, json=request))
    assert (status, message in f"{param} {text}") == (400, True)
    assert not engine.computed
