"""The servers of one run, over which its windows or its other requests are spread."""

import logging
from asyncio import Event, Lock
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from scoremode._tasks import Result, results_of
from scoremode._texts import printable
from scoremode.client import AsyncScoreClient
from scoremode.errors import RateLimitError, ScoremodeError, ServerError, ServersDifferError, TransportError
from scoremode.runs.plan import differences, identity
from scoremode.wire import FIRST_CONTACT_SECONDS, PATIENT_RETRY_FOR, TIMED_OUT, ServerInfo

_log = logging.getLogger(__name__)

DEFAULT_CONCURRENCY = 8
"""Windows in flight at a server that does not say how many sequences it runs at once."""
MAX_CONCURRENCY = 64
"""Windows in flight at a server that runs more at once: more would not keep the engine busier."""
GRACE = 20.0
"""Seconds to wait for a server that is down while others are left."""

Job = TypeVar("Job")
"""The input of one request, such as a window's number."""


def patient_client(url: str, *, retry_for: float | None = None, **settings: Any) -> AsyncScoreClient:
    """A client for runs that take long: unless `retry_for` says how long it waits, that is less for a server that has
    not answered yet. Other arguments are those of `AsyncScoreClient`."""
    client = AsyncScoreClient(url, retry_for=PATIENT_RETRY_FOR if retry_for is None else retry_for, **settings)
    if retry_for is None:
        client.retries.first_contact = FIRST_CONTACT_SECONDS
    return client


@dataclass(slots=True, eq=False)
class _Server:
    client: AsyncScoreClient
    concurrency: int
    """Requests in flight at once: halved when the server answers 504."""
    failures_seen: int
    """`client.retries.num_failures` when the server's identity was last checked."""
    in_flight: int = 0
    num_asked: int = 0
    """Requests so far: single requests go to one server after another."""


class Pool:
    """Servers that serve the same, each with windows of its own in flight."""

    def __init__(
        self, clients: Sequence[AsyncScoreClient], infos: Sequence[ServerInfo], concurrency: int | None
    ) -> None:
        self.info = infos[0]
        self._servers = []
        for client, info in zip(clients, infos, strict=True):
            self._check_identity(info, client.address)
            at_once = concurrency or min(info.max_num_seqs or DEFAULT_CONCURRENCY, MAX_CONCURRENCY)
            self._servers.append(_Server(client, at_once, client.retries.num_failures))
        self.concurrency = sum(server.concurrency for server in self._servers)
        """The most requests in flight at once, all servers together, as the run begins."""
        self._next = Lock()
        """Callers wait here for a slot, first come, first served."""
        self._answered = Event()

    @classmethod
    async def connect(cls, clients: AsyncScoreClient | Sequence[AsyncScoreClient], concurrency: int | None) -> Self:
        """Ask every server, or the one given, for its `info`. `concurrency` is the number of windows in flight at each;
        None for as many sequences as it runs at once, at most MAX_CONCURRENCY."""
        clients = [clients] if isinstance(clients, AsyncScoreClient) else clients
        infos = [await client.info() for client in clients]
        for client, info in zip(clients, infos, strict=True):
            if info.computed_by and info.computed_by.fault:
                _log.warning("%s: %s", client.address, printable(info.computed_by.fault))
        return cls(clients, infos, concurrency)

    @property
    def clients(self) -> list[AsyncScoreClient]:
        """The clients of the servers that were not dropped."""
        return [server.client for server in self._servers]

    async def score(
        self,
        jobs: Iterable[Job],
        send: Callable[[AsyncScoreClient, Job], Awaitable[Result]],
        keep: Callable[[Result], object],
    ) -> None:
        """Have each job answered, by the server with the fewest requests in flight, and hand each result to `keep`, in
        any order.

        A server that fails is dropped, as long as there is another, which takes over its jobs. ScoremodeError if the
        last server failed, or a request is at fault.
        """
        remaining = iter(jobs)

        async def work() -> None:
            for job in remaining:
                keep(await self.ask(job, send))

        with self.taking_over():
            await results_of(work() for _ in range(self.concurrency))

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """While others are left, drop a server that fails sooner than its client would give up. After a 504, halve its
        requests in flight, down to one."""
        self._set_retries()
        servers = [*self._servers]
        try:
            yield
        finally:
            for server in servers:
                server.client.retries.grace = None
                server.client.retries.raises_timeouts = False

    async def ask(self, job: Job, send: Callable[[AsyncScoreClient, Job], Awaitable[Result]]) -> Result:
        """Have the server with the fewest requests in flight answer one request, and another if that fails. The request
        that has waited longest is next.

        For runs whose requests follow from one another; others have `score`, with its errors. Use it within
        `taking_over`.
        """
        while True:
            async with self._next:
                while not (free := [each for each in self._servers if each.in_flight < each.concurrency]):
                    self._answered.clear()
                    await self._answered.wait()
                server = min(free, key=lambda each: (each.in_flight, each.num_asked))
                server.in_flight += 1
                server.num_asked += 1
            concurrency = server.concurrency
            try:
                result = await send(server.client, job)
                if (num_failures := server.client.retries.num_failures) != server.failures_seen:
                    # A server that was down may have come back with another model.
                    self._check_identity(await server.client.info(), server.client.address)
                    server.failures_seen = num_failures
                return result
            except (TransportError, ServerError, RateLimitError) as error:
                self._slow_down_or_drop(server, concurrency, error)
            finally:
                server.in_flight -= 1
                self._answered.set()

    def _slow_down_or_drop(self, server: _Server, concurrency: int, error: ScoremodeError) -> None:
        """After a request failed that was sent when the server had `concurrency`."""
        if server not in self._servers:
            return
        if concurrency == 1 or not isinstance(error, ServerError) or error.status_code != TIMED_OUT:
            if len(self._servers) == 1:
                raise error
            self._servers.remove(server)
            _log.warning("%s is dropped, its windows go to the other servers: %s", server.client.address, error)
            self._set_retries()
        elif concurrency == server.concurrency:
            # The first of those that were sent together: the others say nothing of fewer in flight.
            server.concurrency //= 2
            self._set_retries()
            _log.warning(
                "%s: %d requests in flight from now on instead of %d: %s",
                server.client.address,
                server.concurrency,
                concurrency,
                error,
            )

    def _set_retries(self) -> None:
        for server in self._servers:
            server.client.retries.grace = GRACE if len(self._servers) > 1 else None
            server.client.retries.raises_timeouts = server.concurrency > 1

    def _check_identity(self, info: ServerInfo, address: str) -> None:
        if differing := differences(identity(info), identity(self.info)):
            raise ServersDifferError(f"{address} does not serve the model that the run began with: {differing}")
        if differing := info.computes_otherwise(self.info):
            _log.warning("%s has other GPUs or kernels, and the run mixes what both compute: %s", address, differing)
