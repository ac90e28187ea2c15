"""Spreads the requests of one run over its servers."""

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
"""Limit on the default number of windows in flight at a server: more would not keep the engine busier."""
GRACE = 20.0
"""Seconds to wait for a server that is down if others are left."""

Job = TypeVar("Job")
"""The input of one request, such as a window's index."""


def patient_client(url: str, *, retry_for: float | None = None, **settings: Any) -> AsyncScoreClient:
    """Make a client for long runs, which by default waits long for a server, but less if it has not answered yet.
    `settings` are other arguments of `AsyncScoreClient`."""
    client = AsyncScoreClient(url, retry_for=PATIENT_RETRY_FOR if retry_for is None else retry_for, **settings)
    if retry_for is None:
        client.retries.first_contact = FIRST_CONTACT_SECONDS
    return client


@dataclass(slots=True, eq=False)
class _Server:
    client: AsyncScoreClient
    concurrency: int
    """Limit on requests in flight, which is halved when the server answers 504."""
    failures_seen: int
    """`client.retries.num_failures` when the server's identity was last checked."""
    in_flight: int = 0
    num_requests: int = 0
    """Requests so far. Of equally busy servers, the one with the fewest gets the next request."""


class Pool:
    """Servers of the same model, each with several requests in flight."""

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
        """Limit on requests in flight at all servers together when the run begins."""
        self._next = Lock()
        """Lock that the first caller in line holds while it waits for a free server."""
        self._answered = Event()

    @classmethod
    async def connect(cls, clients: AsyncScoreClient | Sequence[AsyncScoreClient], concurrency: int | None) -> Self:
        """Make a pool, and ask every server for its `info`. `concurrency` is the number of windows in flight at each
        server; None for as many as it runs sequences at once, at most MAX_CONCURRENCY."""
        clients = [clients] if isinstance(clients, AsyncScoreClient) else clients
        infos = [await client.info() for client in clients]
        for client, info in zip(clients, infos, strict=True):
            if info.computed_by and info.computed_by.fault:
                _log.warning("%s: %s", client.address, printable(info.computed_by.fault))
        return cls(clients, infos, concurrency)

    @property
    def clients(self) -> list[AsyncScoreClient]:
        """The clients of the servers that are left."""
        return [server.client for server in self._servers]

    async def score(
        self,
        jobs: Iterable[Job],
        send: Callable[[AsyncScoreClient, Job], Awaitable[Result]],
        store: Callable[[Result], object],
    ) -> None:
        """Send each job to the server with the fewest requests in flight, and pass each result to `store`, in any
        order.

        A server that fails is dropped, and others take over its jobs. ScoremodeError if the last server fails, or a
        request is at fault.
        """
        remaining = iter(jobs)

        async def work() -> None:
            for job in remaining:
                store(await self.ask(job, send))

        with self.taking_over():
            await results_of(work() for _ in range(self.concurrency))

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """Within this context, retries are short while several servers are left, so a failed server is dropped soon. A
        504 halves a server's requests in flight, down to one."""
        self._set_retries()
        servers = [*self._servers]
        try:
            yield
        finally:
            for server in servers:
                server.client.retries.grace = None
                server.client.retries.raises_timeouts = False

    async def ask(self, job: Job, send: Callable[[AsyncScoreClient, Job], Awaitable[Result]]) -> Result:
        """Send one request to the server with the fewest requests in flight, and to another server if that one fails.
        Callers get servers in the order in which they called.

        If a run's requests depend on one another, call this within `taking_over`; otherwise call `score`. `score`
        says which errors both raise.
        """
        while True:
            async with self._next:
                while not (free := [server for server in self._servers if server.in_flight < server.concurrency]):
                    self._answered.clear()
                    await self._answered.wait()
                server = min(free, key=lambda server: (server.in_flight, server.num_requests))
                server.in_flight += 1
                server.num_requests += 1
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
        """React to a failed request, which was sent when the server's limit was `concurrency`."""
        if server not in self._servers:
            return
        if concurrency == 1 or not isinstance(error, ServerError) or error.status_code != TIMED_OUT:
            if len(self._servers) == 1:
                raise error
            self._servers.remove(server)
            _log.warning("%s is dropped, and its windows go to the other servers: %s", server.client.address, error)
            self._set_retries()
        elif concurrency == server.concurrency:
            # Halve once per batch: failures of requests sent at the old concurrency do not count again.
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
            _log.warning("%s has other GPUs or kernels, so the run's values are from both: %s", address, differing)
