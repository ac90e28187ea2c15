"""An engine client without an engine: a prefix cache and outputs as vLLM's workers have them.

Logprobs are a known function of what the engine would have attended to: tokens, adapter, the caller's salt and the
weights at the time at which each token's keys and values were computed. So a row of another prefix, of older weights,
or never computed at all is not the row that `expected_rows` gives.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from scoremode_server.rows import PromptLogprobs, Rows
from scoremode_server.worker.row_spec import RowSpec

VOCABULARY = 1000
MAX_TOP = 4


class LostRequestError(RuntimeError):
    """A request that the fake engine lost on purpose."""


def hashed(*parts: Any) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=8).digest()


def first_state(adapter: int, salt: str) -> bytes:
    return hashed("start", adapter, salt)


@cache
def next_state(state: bytes, token_id: int, weights: int) -> bytes:
    """The engine's state after one more token, computed with the weights of that moment."""
    return hashed(state, token_id, weights)


@cache
def row_of(state: bytes, token_id: int) -> tuple[list[int], list[float], int]:
    """Ids and logprobs of `token_id` and the top `MAX_TOP` after what `state` has seen, and the token's rank."""
    draws = random.Random(state)
    tops = [draws.randrange(VOCABULARY) for _ in range(MAX_TOP)]
    falling = sorted((-draws.random() for _ in range(MAX_TOP)), reverse=True)
    actual = random.Random(state + bytes([token_id % 256]))
    return [token_id, *tops], [-10 * actual.random(), *falling], actual.randrange(1, 500)


def prompt_logprobs(*rows: np.ndarray) -> PromptLogprobs:
    """Ids and logprobs [rows, tokens] and ranks [rows], as they arrive from the engine."""
    return PromptLogprobs([torch.from_numpy(Rows.from_arrays(*rows).table)] if len(rows[0]) else ())


def rows_after(states: Sequence[bytes], token_ids: Sequence[int], width: int) -> tuple[np.ndarray, ...]:
    rows = [row_of(state, token_id) for state, token_id in zip(states, token_ids, strict=True)]
    return (
        np.array([ids[:width] for ids, _, _ in rows], np.int32).reshape(-1, width),
        np.array([logprobs[:width] for _, logprobs, _ in rows], np.float32).reshape(-1, width),
        np.array([rank for _, _, rank in rows], np.int32),
    )


def expected_rows(
    token_ids: Sequence[int], width: int, *, adapter: int = 0, salt: str = "", weights: int = 0
) -> tuple[np.ndarray, ...]:
    """The rows of all tokens but the first, with one set of weights from the first token to the last."""
    states = [next_state(first_state(adapter, salt), token_ids[0], weights)]
    for token_id in token_ids[1:-1]:
        states.append(next_state(states[-1], token_id, weights))
    return rows_after(states[: len(token_ids) - 1], token_ids[1:], width)


class FakeEngine:
    """Chances are of each request: `losses` to fail, `aborts` to end aborted, `evictions` to lose parts of the prefix
    cache before it, `preemptions` to start twice. The caller's salt is what follows the third dash of a salt.
    """

    def __init__(
        self, block_size: int, *, seed: int = 0, latency: int = 4, in_order: bool = False, **chances: float
    ) -> None:
        self.block_size = block_size
        self.random = random.Random(seed)
        self.chances = dict.fromkeys(("losses", "aborts", "evictions", "preemptions"), 0.0) | chances
        self.latency = latency
        self.in_order = in_order
        """Requests are scheduled as they come and take equally long, instead of as chance has it."""
        self.weights = [0, 0, 0]
        """A version of the weights for each adapter, 0 without."""
        self.prefix_cache: dict[bytes, bytes] = {}
        self.num_computed = self.num_requests = self.num_running = 0
        self.salts: list[str | None] = []
        self.aborted: list[list[str]] = []
        """Ids of each call."""
        self.requests: list[tuple[list[int], Any]] = []
        self.reference_root: Path | str = ""
        """The folder of references, if there is one."""
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=""))

    def _happens(self, what: str) -> bool:
        return self.random.random() < self.chances[what]

    async def _pause(self) -> None:
        for _ in range(self.latency if self.in_order else self.random.randrange(self.latency + 1)):
            await asyncio.sleep(0)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted.append(request_ids)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: Any = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.num_requests += 1
        self.num_running += 1
        self.requests.append((prompt["prompt_token_ids"], params))
        self.salts.append(prompt.get("cache_salt"))
        try:
            await self._pause()
            if self._happens("losses"):
                raise LostRequestError(request_id)
            yield await self._compute(prompt, params, request_id, lora_request)
        finally:
            self.num_running -= 1

    async def _compute(self, prompt: Any, params: Any, request_id: str, lora: Any) -> RequestOutput:
        token_ids = prompt["prompt_token_ids"]
        adapter = 0 if lora is None else lora.lora_int_id
        salt = prompt.get("cache_salt", "")
        if self._happens("evictions"):
            for key in [key for key in self.prefix_cache if self.random.random() < 0.3]:
                del self.prefix_cache[key]
        keys = self._keys(token_ids, adapter, salt)
        start = self._num_hit(keys, len(token_ids)) if not params.skip_reading_prefix_cache else 0
        reported = start
        if self._happens("preemptions") and not params.skip_reading_prefix_cache:
            start = self.random.randrange(len(keys) + 1) * self.block_size
            start = min(start, self._num_hit(keys, len(token_ids)))
        states = self._states(token_ids, adapter, salt, start, keys)
        self.num_computed += len(token_ids) - reported
        # Blocks can be read as soon as a request is scheduled, chunk by chunk; an abort between leaves the first.
        full = [(key, states[(i + 1) * self.block_size - 1]) for i, key in enumerate(keys)]
        cut = len(full) if self.in_order else self.random.randrange(len(full) + 1)
        self.prefix_cache.update(full[:cut])
        await self._pause()
        self.prefix_cache.update(full[cut:])
        await self._pause()
        if self._happens("losses"):
            raise LostRequestError(request_id)
        if self._happens("aborts"):
            completion = CompletionOutput(0, "", [], None, FlatLogprobs(), finish_reason="abort")
            return RequestOutput(
                request_id, None, token_ids, PromptLogprobs(), [completion], True, num_cached_tokens=reported
            )
        return self._output(token_ids, params, request_id, states, reported, start)

    def _keys(self, token_ids: list[int], adapter: int, salt: str) -> list[bytes]:
        key = hashed("block", adapter, salt)
        keys = []
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            key = hashed(key, token_ids[end - self.block_size : end])
            keys.append(key)
        return keys

    def _num_hit(self, keys: list[bytes], num_tokens: int) -> int:
        num_blocks = 0
        for key in keys[: (num_tokens - 1) // self.block_size]:
            if key not in self.prefix_cache:
                break
            num_blocks += 1
        return num_blocks * self.block_size

    def _states(self, token_ids: list[int], adapter: int, salt: str, start: int, keys: list[bytes]) -> list[bytes]:
        """The state after each token; those taken from the prefix cache are known only at its end, as in vLLM."""
        *_, caller_salt = salt.split("-", 3) if salt.startswith("scoremode-") else [salt]
        states = [b""] * start
        for index, key in enumerate(keys[: start // self.block_size]):
            states[(index + 1) * self.block_size - 1] = self.prefix_cache[key]
        state = states[-1] if states else first_state(adapter, caller_salt)
        for token_id in token_ids[start:]:
            state = next_state(state, token_id, self.weights[adapter])
            states.append(state)
        return states

    def _output(
        self, token_ids: list[int], params: Any, request_id: str, states: list[bytes], reported: int, start: int
    ) -> RequestOutput:
        spec = RowSpec.read(params)
        targets = [*token_ids[1:], *([] if spec.last_token is None else [spec.last_token])]
        first = max(start, spec.first - 1)
        rows = rows_after(states[first : len(targets)], targets[first:], spec.width)
        completion = CompletionOutput(0, "", [7], None, None, finish_reason="length")
        if params.logprobs is not None:
            ids, logprobs, rank = row_of(states[-1], 7)
            width, completion.logprobs = params.logprobs + 1, FlatLogprobs()
            completion.logprobs.append_fast(ids[:width], logprobs[:width], [rank, *range(1, width)], [None] * width)
        return RequestOutput(
            request_id, None, token_ids, prompt_logprobs(*rows), [completion], True, num_cached_tokens=reported
        )

    async def reset_prefix_cache(self) -> bool:
        self.prefix_cache.clear()
        return True

    async def add_lora(self, lora_request: Any) -> bool:
        """Load other weights over an adapter. As in vLLM, its keys and values stay in the prefix cache."""
        await self._pause()
        self.weights[lora_request.lora_int_id] += 1
        await self._pause()
        return True

    async def update_weights(self, request: Any = None) -> None:
        await self._pause()
        self.weights = [version + 1 for version in self.weights]
        await self._pause()

    async def sleep(self) -> None:
        # Not the method that the store may have wrapped.
        await FakeEngine.update_weights(self)
        self.prefix_cache.clear()

    async def change_nothing(self, *arguments: Any) -> None:
        """Stands in for vLLM's other methods that may change weights."""

    collective_rpc = wake_up = release_kv_cache_memory = remove_lora = change_nothing
    start_weight_update = finish_weight_update = update_weight_version = change_nothing


async def until(condition: Callable[[], Any]) -> None:
    """Let other tasks run until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


class HeldEngine(FakeEngine):
    """An engine that answers nothing until it is let go."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.has_any, self.let_go = asyncio.Event(), asyncio.Event()
        self.inside: list[str] = []
        """Ids of the requests that came."""

    async def _pause(self) -> None:
        await self.let_go.wait()

    def generate(
        self, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.inside.append(request_id)
        self.has_any.set()
        return super().generate(prompt, params, request_id, **options)
