"""Which flight computes which block."""

from scoremode_server.flights import Flight, Flights

A, B, C = b"a", b"b", b"c"


def test_a_flight_lets_go_of_its_own_blocks_only():
    flights = Flights()
    first, second = Flight(1, [A, B]), Flight(1, [B, C])
    assert flights.take_off(first, first.keys) == {}
    assert flights.take_off(second, second.keys) == {B: first}
    flights.land(second)
    assert second.landed.is_set()
    assert not first.landed.is_set()
    assert flights.take_off(Flight(1, [A, B, C]), [A, B, C]) == {A: first, B: first}


def test_a_flight_with_fewer_columns_is_not_followed_and_gives_way():
    flights = Flights()
    narrow, wide = Flight(1, [A]), Flight(3, [A])
    flights.take_off(narrow, [A])
    assert flights.take_off(wide, [A]) == {}
    flights.land(narrow)
    assert flights.take_off(Flight(2, [A]), [A]) == {A: wide}
    flights.land(wide)
    assert len(flights) == 0


def test_only_a_flight_that_waits_for_nobody_is_found_by_who_came_before_it():
    flights = Flights()
    flight = Flight(2, [A])
    flights.take_off(flight, [A])
    assert flights.alone([A], 1) is None
    flight.alone = True
    assert flights.alone([C, A], 2) is flight
    assert flights.alone([A], 3) is None
    assert flights.alone([C], 1) is None
