"""The lease of an engine: which reference it compares with, and until when. All ranks decide alike: they get the same
calls from API servers in the same order, and use only the times in these calls."""

from dataclasses import dataclass, field
from itertools import takewhile

from scoremode_server.references.worker.orders import LeaseCall

LEASE_SECONDS = 10.0
"""How long a reference is compared with while others wait. Replacing the LM head takes half a second."""

LONGEST_ROUND = 2.5 * LEASE_SECONDS
"""Limit on the sum of the leases of all waiting references: each lease is shorter if many wait, but not below
`SHORTEST_LEASE`. Replacing LM heads takes additional time."""

SHORTEST_LEASE = 1.0

FIRST_SECONDS = 5.0
"""While others wait, a lease ends early if no window enters the engine within this time after windows may enter."""

IDLE_SECONDS = 0.5
"""While others wait, a lease ends early if this time has passed since its last window left the engine. A client that
sends one window after another pauses for less."""

PLACE_SECONDS = 60.0
"""How long a reference keeps its place in the queue after its last client has left."""


@dataclass(slots=True)
class _Place:
    tickets: dict[str, str] = field(default_factory=dict)
    """The ticket of the LM head for each API server that has waiting windows: see `LeaseCall.wanted`."""
    wanted_at: float = 0.0
    was_passed_over: bool = False
    """Whether another reference got the lease while this one's clients were away."""


@dataclass(slots=True)
class Lease:
    key: str = ""
    """The LM head of the reference with the lease."""
    ticket: str = ""
    """The ticket under which that head was read."""
    _now: float = 0.0
    _began_at: float | None = None
    """When an API server first reported that windows may enter the engine, which is after the head was placed."""
    _idle_at: float = 0.0
    """When the lease ends if no window enters the engine before."""
    _users: dict[str, bool] = field(default_factory=dict)
    """API servers that may send windows, or will learn that they may; and whether each has windows in the engine. No
    other reference gets the lease until this is empty, however long that takes."""
    _places: dict[str, _Place] = field(default_factory=dict)
    """Waiting references by key, in the order in which they get the lease."""

    def update(self, call: LeaseCall) -> bool:
        """Note what an API server wants and uses. If the lease has ended, give it to the next reference. Returns
        whether the API server may send windows of `key` to the engine until its next call."""
        self._now = max(self._now, call.now)
        self._users.pop(call.server, None)
        if call.held:
            self._users[call.server] = call.used
            if self._began_at is None:
                self._began_at, self._idle_at = self._now, self._now + FIRST_SECONDS
        elif self._began_at is None and self.key in call.wanted:
            self._users[call.server] = False
        if call.used:
            self._idle_at = max(self._idle_at, self._now + IDLE_SECONDS)
        if self._began_at is None and not self._users:
            # No API server wants this head any more, or the head could not be placed. If a server wants it later, it is
            # placed again.
            self.key = self.ticket = ""
        self._note_waiting(call)
        if not self._users and self._has_ended():
            self._pass_on()
        if self._has_ended():
            return False
        # Remove this reference's own place in the queue, which would let it go before references that wait now.
        self._places.pop(self.key, None)
        if self.key in call.wanted:
            self._users.setdefault(call.server, False)
        return self.key in call.wanted

    @property
    def is_used(self) -> bool:
        """Whether windows may be in the engine."""
        return bool(self._users)

    def _note_waiting(self, call: LeaseCall) -> None:
        for key in call.wanted:
            if key != self.key or self._has_ended():
                self._places.setdefault(key, _Place())
        for key, place in list(self._places.items()):
            place.tickets.pop(call.server, None)
            if key in call.wanted:
                place.tickets[call.server] = call.wanted[key]
                place.wanted_at = self._now
            elif not place.tickets and self._now > place.wanted_at + PLACE_SECONDS:
                del self._places[key]

    @property
    def waiting(self) -> list[str]:
        """References with waiting windows, in the order in which they get the lease."""
        return [key for key, place in self._places.items() if place.tickets]

    def _has_ended(self) -> bool:
        if (first := self._next()) is None or first == self.key:
            return False
        if self._began_at is None:
            return not self._users
        is_idle = self._now >= self._idle_at and not any(self._users.values())
        seconds = max(SHORTEST_LEASE, min(LEASE_SECONDS, LONGEST_ROUND / len(self.waiting)))
        if self._places[first].was_passed_over:
            seconds = SHORTEST_LEASE
        return is_idle or self._now >= self._began_at + seconds

    def _next(self) -> str | None:
        """The first waiting reference whose LM head is on the host or on the device."""
        is_read = (key for key in self.waiting if key == self.key or any(self._places[key].tickets.values()))
        return next(is_read, None)

    def _pass_on(self) -> None:
        self.key = self._next() or ""
        for place in takewhile(lambda place: place is not self._places[self.key], self._places.values()):
            place.was_passed_over = True
        place = self._places.pop(self.key)
        self.ticket = next(filter(None, place.tickets.values()))
        self._began_at, self._users = None, dict.fromkeys(place.tickets, False)
