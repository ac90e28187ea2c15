"""Which request computes which block."""

from scoremode_server.prefix_cache.in_flight import InFlightRequest, InFlightRequests


def request(num_columns: int, *block_hashes: bytes) -> InFlightRequest:
    return InFlightRequest(block_hashes, num_columns)


def test_a_request_releases_only_its_own_blocks():
    in_flight = InFlightRequests()
    first, second, third = request(1, b"a", b"b"), request(1, b"a", b"b", b"c"), request(1, b"a", b"b", b"c")
    assert in_flight.register(first) == {}
    assert in_flight.register(second) == {b"a": first, b"b": first}
    in_flight.release(second)
    assert second.released.is_set()
    assert not first.released.is_set()
    assert in_flight.register(third) == {b"a": first, b"b": first}
    assert in_flight.register(request(1, b"a", b"b", b"c")) == {b"a": first, b"b": first, b"c": third}


def test_no_request_waits_for_one_with_fewer_columns():
    in_flight = InFlightRequests()
    narrow, wide, middle = request(1, b"a"), request(3, b"a"), request(2, b"a")
    in_flight.register(narrow)
    assert in_flight.register(wide) == {}
    in_flight.release(narrow)
    assert in_flight.register(middle) == {b"a": wide}
    in_flight.release(wide)
    assert len(in_flight) == 0
