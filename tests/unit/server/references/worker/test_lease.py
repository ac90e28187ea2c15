"""The right reference gets an engine's lease, call by call, worked out by hand."""

import pytest

from scoremode_server.references.worker.lease import (
    FIRST_SECONDS,
    IDLE_SECONDS,
    LEASE_SECONDS,
    PLACE_SECONDS,
    SHORTEST_LEASE,
    Lease,
)
from scoremode_server.references.worker.orders import LeaseCall


def ask(
    lease: Lease, now: float, server: str, *wanted: str, inside: bool = False, may_enter: bool | None = None
) -> bool:
    """A call of an API server, whose heads have all been read."""
    held = inside if may_enter is None else may_enter
    return lease.update(LeaseCall(server, now, {key: f"ticket of {key}" for key in wanted}, held=held, used=inside))


@pytest.fixture
def lease() -> Lease:
    """A lease that one API server uses for `a`, from second 0 on."""
    lease = Lease()
    assert ask(lease, 0, "one", "a")
    assert (lease.key, lease.ticket) == ("a", "ticket of a")
    assert ask(lease, 0, "one", "a", may_enter=True)
    return lease


def test_a_lease_ends_after_its_time_if_others_wait_and_once_no_window_is_in_the_engine(lease: Lease):
    assert ask(lease, 100, "one", "a", inside=True)
    assert not ask(lease, 100.5, "two", "b")
    # It had its time already, while no one waited, but its windows are in the engine.
    assert not ask(lease, 101, "one", "a", inside=True)
    assert not ask(lease, 101, "two", "b")
    assert not ask(lease, 102, "one", "a")
    assert lease.key == "b"
    assert ask(lease, 102, "two", "b", may_enter=True)
    assert not ask(lease, 102 + LEASE_SECONDS - 0.1, "one", "a")
    assert ask(lease, 102 + LEASE_SECONDS - 0.1, "two", "b", inside=True)
    assert not ask(lease, 102 + LEASE_SECONDS, "two", "b")
    assert ask(lease, 102 + LEASE_SECONDS, "one", "a")


def test_a_lease_that_no_window_uses_ends_early(lease: Lease):
    assert ask(lease, 1, "one", inside=True) is False
    assert not ask(lease, 1.1, "one")
    assert not ask(lease, FIRST_SECONDS - 0.1, "two", "b")
    assert ask(lease, FIRST_SECONDS, "two", "b")
    assert ask(lease, FIRST_SECONDS, "two", "b", may_enter=True)
    assert ask(lease, FIRST_SECONDS + 6, "two", "b", inside=True)
    assert not ask(lease, FIRST_SECONDS + 6.1, "two")
    assert not ask(lease, FIRST_SECONDS + 6.1, "one", "a")
    assert ask(lease, FIRST_SECONDS + 6.1 + IDLE_SECONDS, "one", "a")


def test_an_api_server_keeps_its_right_until_it_calls_again(lease: Lease):
    """A window may enter the engine before it learns that the lease has ended."""
    assert not ask(lease, 50, "two", "b")
    assert not ask(lease, 60, "two", "b")
    assert lease.key == "a"
    assert not ask(lease, 60, "one", "a")
    assert lease.key == "b"


def test_a_reference_keeps_its_place_for_a_while(lease: Lease):
    assert not ask(lease, 1, "two", "b")
    ask(lease, 1, "two")
    assert not ask(lease, 1.2, "three", "c")
    ask(lease, 11, "one")
    # Its clients are away when it would be next, and go first when they are back.
    assert ask(lease, 11, "three", "c", may_enter=True)
    assert not ask(lease, 11.5, "two", "b")
    assert not ask(lease, 11 + SHORTEST_LEASE, "three", "c")
    assert ask(lease, 11 + SHORTEST_LEASE, "two", "b")
    assert ask(lease, 11 + SHORTEST_LEASE, "two", "b", may_enter=True)
    ask(lease, 13, "two")
    ask(lease, 14, "one", "a")
    ask(lease, 14, "one")
    assert lease.waiting == ["c"]
    ask(lease, 14.1 + PLACE_SECONDS, "three")
    assert lease.waiting == []
    assert not lease._places.keys() - {"c"}


@pytest.mark.parametrize("seconds", [0.1, 8])
def test_a_lease_begins_when_its_windows_may_enter_the_engine(lease: Lease, seconds: float):
    """However long calls take until an API server learns that the head was placed."""
    assert not ask(lease, 20, "two", "b")
    assert not ask(lease, 20, "one", "a")
    first = 20 + 3 * seconds
    assert ask(lease, 20 + seconds, "two", "b")
    assert not ask(lease, 20 + 2 * seconds, "one", "a")
    assert ask(lease, first, "two", "b", may_enter=True)
    assert not ask(lease, first + FIRST_SECONDS - 0.1, "one", "a")
    assert ask(lease, first + FIRST_SECONDS - 0.1, "two", "b", inside=True)
    assert not ask(lease, first + LEASE_SECONDS, "two", "b")
    assert lease.key == "a"


def test_a_lease_that_no_one_wants_any_more_passes_on_at_once(lease: Lease):
    assert not ask(lease, 20, "two", "b")
    assert not ask(lease, 20, "one", "a")
    assert lease.key == "b"
    ask(lease, 20.1, "two")
    assert ask(lease, 20.2, "one", "a")


def test_a_head_that_no_window_used_is_placed_again(lease: Lease):
    """It may not have been placed for want of memory."""
    assert not ask(lease, 20, "two", "b")
    ask(lease, 20, "one")
    ask(lease, 20.1, "two")
    assert (lease.key, lease.ticket) == ("", "")
    assert ask(lease, 20.2, "two", "b")
    assert (lease.key, lease.ticket) == ("b", "ticket of b")


def test_time_never_goes_back(lease: Lease):
    """Calls may arrive in another order than they were sent in."""
    assert not ask(lease, 20, "two", "b")
    ask(lease, 5, "one")
    assert lease.key == "b"
    assert ask(lease, 4, "two", "b", may_enter=True)
    assert ask(lease, 29.9, "two", "b", inside=True)
    assert not ask(lease, 29.9, "one", "a")


def test_a_head_that_is_not_read_does_not_end_a_lease(lease: Lease):
    lease.update(LeaseCall("two", 30, {"b": ""}, held=False, used=False))
    assert lease.waiting == ["b"]
    assert ask(lease, 40, "one", "a")
