"""How two answers are compared: what may differ, and what is reported."""

import pytest
from vllm_upgrade import Comparison

ANSWER = {
    "id": "a",
    "created": 1,
    "choices": [{"text": "x", "top": {"5": {"logprob": -1.5, "rank": 3}}, "ids": [1, 2]}],
}


def compared(ours: object, stock: object) -> Comparison:
    comparison = Comparison()
    comparison.add(ours, stock)
    return comparison


def changed(**changes: object) -> dict[str, object]:
    return ANSWER | {"choices": [ANSWER["choices"][0] | changes]}


def test_ids_and_times_do_not_count():
    assert compared(ANSWER, ANSWER | {"id": "b", "created": 2}) == Comparison()


def test_the_largest_difference_of_floats_is_kept():
    comparison = compared([1.0, {"a": 2.0}, None], [1.25, {"a": 1.5}, None])
    assert (comparison.largest, comparison.others) == (0.5, [])


def test_ranks_are_counted_apart():
    comparison = compared(ANSWER, changed(top={"5": {"logprob": -1.5, "rank": 4}}))
    assert (comparison.ranks, comparison.others) == (1, [])


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        ({"a": -2.0, "b": -1.0, "c": -1.5}, {"a": -2.0, "c": -1.25, "b": -1.5}),
        ({"a": -2.0, "b": -1.0, "c": -1.5}, {"a": -2.0, "b": -1.25, "d": -1.5}),
        (
            {"5": {"logprob": -1.0, "rank": 1}, "6": {"logprob": -1.5, "rank": 2}},
            {"5": {"logprob": -1.25, "rank": 1}, "7": {"logprob": -1.5, "rank": 2}},
        ),
    ],
)
def test_tokens_that_change_places_are_counted_and_their_logprobs_compared_in_order(ours: object, stock: object):
    comparison = compared([ours], [stock])
    assert (comparison.exchanged, comparison.largest, comparison.others) == (1, 0.25, [])


@pytest.mark.parametrize(
    "stock",
    [
        changed(text="y"),
        changed(ids=[1, 2, 3]),
        changed(ids=[1, 3]),
        changed(ids=None),
        changed(top={"6": {"logprob": -1.5, "rank": 3}}),
        changed(top={"5": {"rank": 3, "logprob": -1.5}}),
        changed(top={"5": {"logprob": -1.5, "rank": 3}, "6": {"logprob": -1.5, "rank": 3}}),
        changed(top={"5": {"logprob": -1, "rank": 3}}),
        changed(more=1),
        {},
        None,
    ],
)
def test_everything_else_is_a_difference(stock: object):
    assert len(compared(ANSWER, stock).others) == 1


def test_statuses_are_compared_too():
    assert compared((200, ANSWER), (400, ANSWER)).others == ["[0]: 200 beside 400"]
