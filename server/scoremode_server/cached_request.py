"""The course of one scoring request that may take rows from the cache and from other requests in flight."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput

from scoremode_server.cache import LogprobCache, fill, unpack
from scoremode_server.engine.packed_logprobs import PackedLogprobs
from scoremode_server.errors import EngineOutputError
from scoremode_server.flights import Flight, Flights
from scoremode_server.prefix_hash import Chain
from scoremode_server.scoring import columns, final_output, is_unfinished, score_params


@dataclass(slots=True)
class Run:
    """What the engine computed for a sequence of n tokens."""

    output: RequestOutput
    table: np.ndarray
    """Rows of the tokens but the first, [n - 1, 2 * width + 1] int32 as `pack` makes them; those before `first` are
    unset."""
    first: int
    """How many rows, from the first on, the engine did not compute."""
    num_found: int
    """How many of these rows were not computed by a short run either."""
    num_cached_tokens: int
    """Tokens that the engine did not compute."""

    @property
    def unfinished(self) -> bool:
        """Whether the engine gave the request up, so that there are no rows and asking again is not ours."""
        return is_unfinished(self.output)


def read_run(token_ids: np.ndarray, num_fed: int, width: int, output: RequestOutput) -> Run:
    """The rows of an output that the engine computed for this request: nothing else is ever read from it.

    `token_ids` are the `num_fed` tokens of the prompt, and the one that the sampled step was forced to, if there is
    one. The V1 runner returns a row for every token but the first, with anything in those that it took from the prefix
    cache; the V2 runner returns only the rows behind them. Rows are trusted behind `num_cached_tokens`, and behind the
    last one that is NaN or of another token.
    """
    num_cached = output.num_cached_tokens or 0
    num_rows = len(token_ids) - 1
    table = np.empty((num_rows, 2 * width + 1), np.int32)
    run = Run(output, table, first=num_rows, num_found=num_rows, num_cached_tokens=num_cached)
    packed = output.prompt_logprobs
    ids, logprobs, ranks = columns(packed if isinstance(packed, PackedLogprobs) else PackedLogprobs(), width)
    if len(ids) not in (num_fed - 1, num_fed - 1 - num_cached) or ids.shape[1] != width:
        return run
    fill(table[num_fed - 1 - len(ids) : num_fed - 1], ids, logprobs, ranks)
    if num_rows == num_fed:
        sampled = output.outputs[0].logprobs
        if not isinstance(sampled, FlatLogprobs) or len(sampled.token_ids) != width:
            return run
        fill(table[-1:], *columns(sampled, width))
    ids, logprobs, _ = unpack(table[num_cached:], width)
    known = (ids[:, 0] == token_ids[num_cached + 1 :]) & ~np.isnan(logprobs.sum(axis=1))
    run.first = run.num_found = num_cached + (0 if known.all() else int(np.flatnonzero(~known)[-1]) + 1)
    return run


class CachedRequest:
    """One request: the engine computes what it must, the rest is found, and the answer is complete or an error."""

    def __init__(
        self,
        engine: EngineClient,
        cache: LogprobCache,
        flights: Flights,
        *,
        salt: str,
        chain: Chain,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        options: dict[str, Any],
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._flights = flights
        self._salt = salt
        self._chain = chain
        self._prompt = {**prompt, "cache_salt": salt}
        self._params = params
        self._request_id = request_id
        self._options = options
        self._width = params.prompt_logprobs + 1
        self._generation = cache.generation
        self._flight = Flight(self._width, chain)
        self._found: dict[bytes, bytes] = {}
        self._last_block: dict[bytes, bytes] = {}
        self._joined = False

    async def answer(self) -> RequestOutput:
        """The engine's output with every row in its prompt logprobs.

        Raises:
            EngineOutputError: the engine did not compute a row that it was asked for without its prefix cache.
        """
        self._found = self._cache.find(self._chain, self._width)
        earlier = self._flights.take_off(self._flight, self._found)
        try:
            run = await self._complete_run(earlier)
            return self._without_rows(run) if run.unfinished else self._finish(run)
        finally:
            self._flights.land(self._flight)

    async def _complete_run(self, earlier: dict[bytes, Flight]) -> Run:
        """A run whose missing rows are all found. The engine is at work before anything is waited for."""
        head = self._chain.head
        run = await self._run(reads=head in self._found or head in earlier)
        if run.unfinished:
            return run
        if self._lacking(run) and self._can_be_filled(run):
            await self._collect(run, earlier)
        if self._can_be_filled(run) and not self._lacking(run):
            return run
        return await self._run_alone()

    def _needed(self, run: Run) -> Sequence[bytes]:
        """The blocks with the rows that a run left out."""
        return self._chain.keys[: -(-run.first // self._cache.block_size)] if run.first else []

    def _lacking(self, run: Run) -> list[bytes]:
        return [key for key in self._needed(run) if key not in self._found]

    def _can_be_filled(self, run: Run) -> bool:
        """Whether blocks can hold all that is left out, and what they hold is still of the weights that now run."""
        reach = self._chain.num_blocks * self._cache.block_size
        return run.first == 0 or (run.first <= reach and self._cache.generation == self._generation)

    async def _collect(self, run: Run, earlier: dict[bytes, Flight]) -> None:
        """Find the blocks that a run left out: with the flights before this one, in the cache, by a short run, and with
        flights that run alone because somebody failed."""
        for key in self._lacking(run):
            if key not in self._found and key in earlier:
                await self._join(earlier[key])
        if self._lacking(run):
            self._found |= self._cache.find(self._chain, self._width)
        lacking = self._lacking(run)
        if lacking and lacking == list(self._needed(run)[-1:]):
            await self._run_last_block(run)
        while (other := self._flights.alone(self._lacking(run), self._width)) is not None:
            await self._join(other)

    async def _join(self, flight: Flight) -> None:
        self._joined = True
        await flight.landed.wait()
        self._found |= {key: flight.blocks[key] for key in self._chain.keys if key in flight.blocks}

    async def _run_last_block(self, run: Run) -> None:
        """Compute the last block that a run left out, if it is the only one: scores the tokens up to the block's end.

        So it goes when prompts part where a block of the KV cache ends: the engine has the keys and values of all
        tokens before, but nobody has asked for the token behind them. It never takes the last block of a prompt from
        its prefix cache, so this computes one block.
        """
        end = len(self._needed(run)) * self._cache.block_size
        start = end - self._cache.block_size
        token_ids = self._chain.token_ids[: end + 1]
        params = score_params(token_ids.tolist(), self._width - 1)
        prompt = tokens_input(token_ids[:-1].tolist(), cache_salt=self._salt)
        output = await self._ask(prompt, params, "-last-block", reads=True)
        short = read_run(token_ids, end, self._width, output)
        if not short.unfinished and short.first <= start:
            self._last_block = self._cache.split(self._needed(run)[-1:], short.table[start:])
            self._found |= self._last_block
            run.num_found = min(run.num_found, short.first)
            run.num_cached_tokens = min(run.num_cached_tokens, short.num_cached_tokens)

    async def _run_alone(self) -> Run:
        """Compute everything. Requests that lack the same blocks may wait for this one, whenever they came."""
        self._flight.alone = True
        self._flights.compute(self._flight, self._chain.keys)
        self._found, self._last_block = {}, {}
        run = await self._run(reads=False, suffix="-alone")
        if run.first and not run.unfinished:
            raise EngineOutputError(f"the engine computed no logprob, or NaN, for the token at position {run.first}")
        return run

    async def _run(self, *, reads: bool, suffix: str = "") -> Run:
        output = await self._ask(self._prompt, self._params, suffix, reads=reads)
        return read_run(self._chain.token_ids, len(self._prompt["prompt_token_ids"]), self._width, output)

    async def _ask(self, prompt: Any, params: SamplingParams, suffix: str, *, reads: bool) -> RequestOutput:
        params = copy(params)
        params.skip_reading_prefix_cache = not reads
        outputs = self._engine.generate(prompt, params, self._request_id + suffix, **self._options)
        return await final_output(outputs)

    def _without_rows(self, run: Run) -> RequestOutput:
        """An output that the engine gave up, for the caller to report; its rows are none, whatever memory holds."""
        run.output.prompt_logprobs = PackedLogprobs()
        run.output.request_id = self._request_id
        return run.output

    def _finish(self, run: Run) -> RequestOutput:
        """Put the rows together, keep and pass on the new ones, count."""
        if self._flight.known or run.first:
            self._fill(run)
        else:
            self._cache.put_whole(self._generation, self._chain, run.table)
        self._count(run)
        run.output.num_cached_tokens = run.num_cached_tokens
        run.output.request_id = self._request_id
        return run.output

    def _fill(self, run: Run) -> None:
        """Put the rows that were found before those that the engine computed; keep these, and pass all on."""
        needed, keys = self._needed(run), self._chain.keys
        num_rows = len(self._prompt["prompt_token_ids"]) - 1
        if needed:
            blocks = [self._found[key] for key in needed]
            run.table[: run.first] = self._cache.columns(blocks, self._width)[: run.first]
            run.output.prompt_logprobs = PackedLogprobs.of(*unpack(run.table[:num_rows], self._width))
        size = self._cache.block_size
        # Behind keys of an earlier generation may be what was written of rows of other weights.
        if self._cache.generation == self._generation:
            packed = run.output.prompt_logprobs
            packed.block_size = size
            packed.blocks = keys[: num_rows // size]
            packed.num_cached_blocks = min(len(needed), len(packed.blocks))
        computed = self._cache.split(keys[len(needed) :], run.table[len(needed) * size :])
        new = self._last_block | computed
        self._cache.put(self._generation, keys, new)
        self._flight.blocks = self._found | new

    def _count(self, run: Run) -> None:
        counts = self._cache.counts
        counts.hits += run.num_found
        counts.misses += len(run.table) - run.num_found
        counts.joined += self._joined
