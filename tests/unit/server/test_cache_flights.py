"""Which flight computes which block."""

import numpy as np

from scoremode_server.flights import Flight, Flights
from scoremode_server.prefix_hash import Chain, PrefixHash

HASH = PrefixHash()


def flight(width: int, *token_ids: int) -> Flight:
    """A flight over blocks of one token, the first token not counted."""
    return Flight(width, Chain(HASH, np.array([0, *token_ids], np.int32), 1, "m"))


def test_a_flight_that_nobody_asks_for_is_listed_under_its_first_block_only():
    flights = Flights()
    lonely = flight(1, *range(1, 50))
    assert flights.take_off(lonely) == {}
    assert len(flights) == 1
    flights.land(lonely)
    assert len(flights) == 0
    assert not lonely.known


def test_a_flight_lets_go_of_its_own_blocks_only():
    flights = Flights()
    first, second, third = flight(1, 7, 8), flight(1, 7, 8, 9), flight(1, 7, 8, 9)
    a, b, c = third.chain.keys
    assert flights.take_off(first) == {}
    assert flights.take_off(second) == {a: first, b: first}
    flights.land(second)
    assert second.landed.is_set()
    assert not first.landed.is_set()
    assert flights.take_off(third) == {a: first, b: first}
    assert flights.take_off(flight(1, 7, 8, 9)) == {a: first, b: first, c: third}


def test_blocks_that_were_found_are_not_computed():
    flights = Flights()
    first, second = flight(1, 7, 8, 9), flight(1, 7, 8, 6)
    a, b, _ = first.chain.keys
    assert flights.take_off(first, {a}) == {}
    assert flights.take_off(second, {a}) == {b: first}
    assert len(flights) == 3
    flights.land(first)
    flights.land(second)
    assert len(flights) == 0


def test_a_flight_with_fewer_columns_is_not_followed_and_gives_way():
    flights = Flights()
    narrow, wide, middle = flight(1, 7), flight(3, 7), flight(2, 7)
    flights.take_off(narrow)
    assert flights.take_off(wide) == {}
    flights.land(narrow)
    assert flights.take_off(middle) == {middle.chain.head: wide}
    flights.land(wide)
    assert len(flights) == 0


def test_only_a_flight_that_waits_for_nobody_is_found_by_who_came_before_it():
    flights = Flights()
    flying = flight(2, 7, 8)
    head, last = flying.chain.keys
    flights.take_off(flying)
    assert flights.alone([head], 1) is None
    flying.alone = True
    flights.compute(flying, flying.chain.keys)
    assert flights.alone([b"another", last], 2) is flying
    assert flights.alone([head], 3) is None
    assert flights.alone([b"another"], 1) is None
