"""`ScoreClient` and `AsyncScoreClient`: Scoremode's HTTP API from Python, over httpx.

The two differ in waiting only. Requests and answers are in `_calls`, what is tried again in `_retries`.
"""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self, TypeVar

import httpx

from scoremode import _calls
from scoremode._calls import Call
from scoremode._retries import Attempts, Retries
from scoremode._version import __version__
from scoremode.kld_result import KldResult, KldWindowValues
from scoremode.protocol import (
    Candidates,
    Continuations,
    CorpusInfo,
    PerplexityResponse,
    PerplexityWindow,
    Prompt,
    Reference,
    ServerInfo,
    Text,
)
from scoremode.score import Score
from scoremode.windows import Method

API_KEY_VARIABLE = "SCOREMODE_API_KEY"
DEFAULT_TIMEOUT = 600.0
"""Seconds without a byte from the server. A request may wait long for others, so a healthy server can be silent."""
DEFAULT_MAX_RETRIES = 4

_LONGEST_CONNECT = 10.0
_LARGEST_PORT = 65535

Answer = TypeVar("Answer")
OnWindow = Callable[[PerplexityWindow], object]
OnKldWindow = Callable[[KldWindowValues], object]


def server_root(base_url: str) -> str:
    """The address that paths are appended to: `base_url` without a trailing `/v1`.

    Raises:
        ValueError: it is no http or https address.
    """
    root = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        url = httpx.URL(root)
    except httpx.InvalidURL as error:
        raise ValueError(f"not a server address: {base_url!r} ({error})") from error
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > _LARGEST_PORT:
        raise ValueError(f"not a server address: {base_url!r}; it looks like http://localhost:8000")
    return root


class _Client:
    """What both clients are made of, apart from the connection."""

    def __init__(
        self,
        base_url: str,
        model: str | None,
        api_key: str | None,
        timeout: float,
        max_retries: int,
        retry_for: float | None,
    ) -> None:
        self.base_url = server_root(base_url)
        self.address = str(httpx.URL(self.base_url).copy_with(userinfo=b""))
        """`base_url` without user and password, to be shown."""
        self.model = model
        self.retries = Retries(self.address, max_retries, retry_for)
        """May be changed while requests are under way."""
        self._headers = {"User-Agent": f"scoremode/{__version__}"}
        key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        # Requests queue for a connection as long as it takes: how many there are at once is the caller's choice.
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, _LONGEST_CONNECT), pool=None)


class ScoreClient(_Client):
    """Client of a Scoremode server.

    Args:
        base_url: Address of the server, with or without `/v1`.
        model: Served model or LoRA adapter to ask for; the served model when left out.
        api_key: Sent as a bearer token; the environment's SCOREMODE_API_KEY when left out.
        timeout: Seconds to wait for the next byte of an answer.
        max_retries: Attempts after the first one, on 429, 502, 503, 504 and on dropped or refused connections.
        retry_for: Seconds since the first failure of a request for which it is sent again, in place of `max_retries`.
            An error of status 500, which a server gives while it dies, is then tried again a few times as well.
        transport: What carries the requests, in place of the network.

    Every method raises `TransportError` when no answer comes, an `APIStatusError` when the answer is an error, and
    `ResponseError` when the answer is not what the protocol says.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
        retry_for: float | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(base_url, model, api_key, timeout, max_retries, retry_for)
        self._http = httpx.Client(headers=self._headers, timeout=self._timeout, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def info(self) -> ServerInfo:
        """What the server runs: model, context length, special tokens, versions."""
        return self._send(_calls.info(self.model))

    def score(
        self,
        prompt: Prompt,
        continuations: Continuations | None = None,
        *,
        add_special_tokens: bool = True,
        top_logprobs: int = 0,
        candidate_token_ids: Candidates | None = None,
        temperature: float | None = None,
        logprobs_from: int | list[int] | None = None,
        return_ranks: bool = False,
        return_tokens: bool = False,
        use_cache: bool = True,
        model: str | None = None,
    ) -> list[Score]:
        """Exact log-probabilities, in nats, of every token of one or several texts, or of their continuations.

        Args:
            prompt: A text, several, the token ids of a text, or those of several.
            continuations: Score these instead, each after each prompt.
            add_special_tokens: Let the tokenizer add its special tokens (BOS) to a text.
            top_logprobs: Return the k most likely tokens at every position, at most what the server's `--max-logprobs`
                allows, and 256.
            candidate_token_ids: Score these tokens too: a list for all positions; for a single prompt also a list for
                each position that is returned, for several such lists for each. All have as many tokens.
            temperature: T of the distribution that is scored, the softmax of logits / T; 1 when left out.
            logprobs_from: Return only positions from this one on; one for all prompts, or a list with one for each.
            return_ranks: Return the rank of every token in the vocabulary.
            return_tokens: Return every token as text.
            use_cache: Accept logprobs that were computed for an earlier request.
            model: In place of the client's.

        Returns:
            One score a prompt; with continuations one a pair, the continuations of the first prompt first.
        """
        return self._send(
            _calls.score(
                model=model or self.model,
                prompt=prompt,
                continuations=continuations,
                add_special_tokens=add_special_tokens,
                top_logprobs=top_logprobs,
                candidate_token_ids=candidate_token_ids,
                temperature=temperature,
                logprobs_from=logprobs_from,
                return_ranks=return_ranks,
                return_tokens=return_tokens,
                use_cache=use_cache,
            )
        )

    def perplexity(
        self,
        prompt: Text | None = None,
        *,
        texts: list[str] | None = None,
        method: Method = "sliding",
        context_length: int | None = None,
        stride: int | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool | None = None,
        on_window: OnWindow | None = None,
        model: str | None = None,
    ) -> PerplexityResponse:
        """Perplexity of a text, or of several that share no context; the server cuts the windows.

        Args:
            prompt: One text, or its token ids.
            texts: Several texts, in place of `prompt`.
            method: How a text is cut into windows, one of `METHODS`.
            context_length: Tokens a window; 2,048, or what the model takes if that is less.
            stride: Tokens from one window to the next; a quarter of the context where the method takes one.
            max_tokens: Take no more than these tokens of the text.
            add_special_tokens: Let the tokenizer add its special tokens; yes, except for `rolling`.
            on_window: Called with each window's NLL and the running perplexity as the server gets there.
            model: In place of the client's.

        The answer is streamed, so a long run does not time out. A connection lost after the first window is an error,
        not tried again.
        """
        return self._send(
            _calls.perplexity(
                on_window,
                model=model or self.model,
                prompt=prompt,
                texts=texts,
                method=method,
                context_length=context_length,
                stride=stride,
                max_tokens=max_tokens,
                add_special_tokens=add_special_tokens,
            )
        )

    def record_reference(
        self,
        name: str,
        prompt: Text | None = None,
        *,
        texts: list[str] | None = None,
        method: Method = "sliding",
        context_length: int | None = None,
        stride: int | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool | None = None,
        corpus: CorpusInfo | None = None,
        return_ranks: bool = False,
        on_window: OnWindow | None = None,
        model: str | None = None,
    ) -> Reference:
        """Record the served model's distributions over a text, for other models to be compared with.

        Args:
            name: Of the reference.
            prompt: This and the following are as for `perplexity`.
            texts: Several texts, in place of `prompt`.
            method: How a text is cut into windows.
            context_length: Tokens a window.
            stride: Tokens from one window to the next.
            max_tokens: Take no more than these tokens of the text.
            add_special_tokens: Let the tokenizer add its special tokens.
            corpus: Where the text is from, kept with the reference.
            return_ranks: Have the logprobs and ranks of its targets in each window.
            on_window: Called with each window as it is recorded, and the running perplexity.
            model: In place of the client's.

        The answer is streamed. An interrupted recording goes on where it was when the same request is sent again, as
        it is when the connection is lost. `BadRequestError` or another `APIStatusError` says that there is another
        reference of that name.
        """
        return self._send(
            _calls.record_reference(
                on_window,
                model=model or self.model,
                name=name,
                prompt=prompt,
                texts=texts,
                method=method,
                context_length=context_length,
                stride=stride,
                max_tokens=max_tokens,
                add_special_tokens=add_special_tokens,
                corpus=None if corpus is None else corpus.model_dump(exclude_none=True),
                return_ranks=return_ranks or None,
            )
        )

    def references(self) -> list[Reference]:
        """All references of the server."""
        return self._send(_calls.references())

    def reference(self, name: str) -> Reference:
        """What is known of a reference."""
        return self._send(_calls.reference(name))

    def delete_reference(self, name: str) -> None:
        """Delete a reference."""
        self._send(_calls.delete_reference(name))

    def kld(
        self,
        reference: str,
        windows: tuple[int, int] | None = None,
        *,
        top_logprobs: int = 0,
        as_noise_floor: bool = False,
        on_window: OnKldWindow | None = None,
        model: str | None = None,
    ) -> KldResult:
        """KL divergence of the served model from a reference, over the whole vocabulary at every position.

        Args:
            reference: Name of a complete reference.
            windows: The first window and the one after the last, from 0; all when left out.
            top_logprobs: Return the k most likely tokens of both models at every position, at most what the server's
                `--max-logprobs` allows, and 256.
            as_noise_floor: Keep the result with the reference as its noise floor; all windows, and the reference's own
                model.
            on_window: Called with each window as it is done.
            model: In place of the client's.

        With `on_window` or `as_noise_floor` the answer is streamed. A connection lost after the first window is then an
        error, not tried again.
        """
        return self._send(
            _calls.kld(
                on_window,
                stream=on_window is not None or as_noise_floor,
                model=model or self.model,
                reference=reference,
                windows=None if windows is None else list(windows),
                top_logprobs=top_logprobs,
                as_noise_floor=as_noise_floor,
            )
        )

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, by the server's tokenizer."""
        return self._send(_calls.tokenize(text, add_special_tokens, self.model))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, by the server's tokenizer."""
        return self._send(_calls.detokenize(token_ids, self.model))

    def token_texts(self, token_ids: Collection[int]) -> dict[int, str]:
        """The text of each of some tokens alone, by its id. A token that ends within a character has U+FFFD for it."""
        return self._send(_calls.token_texts(token_ids, self.model))

    def _send(self, call: Call[Answer]) -> Answer:
        with Attempts(self.retries) as attempts:
            while True:
                reader = call.new_reader()
                try:
                    with self._http.stream(call.method, self.base_url + call.path, json=call.body) as response:
                        if response.is_success:
                            for chunk in response.iter_bytes():
                                reader.feed(chunk)
                            return reader.finish()
                        response.read()
                    wait = attempts.wait_after_status(response)
                except httpx.RequestError as error:
                    wait = attempts.wait_after_failure(error, can_restart=reader.can_restart)
                time.sleep(wait)


class AsyncScoreClient(_Client):
    """`ScoreClient` for asyncio: the same arguments, methods and errors, to be awaited.

    Cancelling a call closes its connection, and the server then drops the request.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
        retry_for: float | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(base_url, model, api_key, timeout, max_retries, retry_for)
        self._http = httpx.AsyncClient(
            headers=self._headers,
            timeout=self._timeout,
            transport=transport,
            # Who sends requests bounds their number. By itself httpx would hold back all but 100 of them.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def info(self) -> ServerInfo:
        """As `ScoreClient.info`."""
        return await self._send(_calls.info(self.model))

    async def score(
        self,
        prompt: Prompt,
        continuations: Continuations | None = None,
        *,
        add_special_tokens: bool = True,
        top_logprobs: int = 0,
        candidate_token_ids: Candidates | None = None,
        temperature: float | None = None,
        logprobs_from: int | list[int] | None = None,
        return_ranks: bool = False,
        return_tokens: bool = False,
        use_cache: bool = True,
        model: str | None = None,
    ) -> list[Score]:
        """As `ScoreClient.score`."""
        return await self._send(
            _calls.score(
                model=model or self.model,
                prompt=prompt,
                continuations=continuations,
                add_special_tokens=add_special_tokens,
                top_logprobs=top_logprobs,
                candidate_token_ids=candidate_token_ids,
                temperature=temperature,
                logprobs_from=logprobs_from,
                return_ranks=return_ranks,
                return_tokens=return_tokens,
                use_cache=use_cache,
            )
        )

    async def perplexity(
        self,
        prompt: Text | None = None,
        *,
        texts: list[str] | None = None,
        method: Method = "sliding",
        context_length: int | None = None,
        stride: int | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool | None = None,
        on_window: OnWindow | None = None,
        model: str | None = None,
    ) -> PerplexityResponse:
        """As `ScoreClient.perplexity`; `on_window` is an ordinary function."""
        return await self._send(
            _calls.perplexity(
                on_window,
                model=model or self.model,
                prompt=prompt,
                texts=texts,
                method=method,
                context_length=context_length,
                stride=stride,
                max_tokens=max_tokens,
                add_special_tokens=add_special_tokens,
            )
        )

    async def record_reference(
        self,
        name: str,
        prompt: Text | None = None,
        *,
        texts: list[str] | None = None,
        method: Method = "sliding",
        context_length: int | None = None,
        stride: int | None = None,
        max_tokens: int | None = None,
        add_special_tokens: bool | None = None,
        corpus: CorpusInfo | None = None,
        return_ranks: bool = False,
        on_window: OnWindow | None = None,
        model: str | None = None,
    ) -> Reference:
        """As `ScoreClient.record_reference`; `on_window` is an ordinary function."""
        return await self._send(
            _calls.record_reference(
                on_window,
                model=model or self.model,
                name=name,
                prompt=prompt,
                texts=texts,
                method=method,
                context_length=context_length,
                stride=stride,
                max_tokens=max_tokens,
                add_special_tokens=add_special_tokens,
                corpus=None if corpus is None else corpus.model_dump(exclude_none=True),
                return_ranks=return_ranks or None,
            )
        )

    async def references(self) -> list[Reference]:
        """As `ScoreClient.references`."""
        return await self._send(_calls.references())

    async def reference(self, name: str) -> Reference:
        """As `ScoreClient.reference`."""
        return await self._send(_calls.reference(name))

    async def delete_reference(self, name: str) -> None:
        """As `ScoreClient.delete_reference`."""
        await self._send(_calls.delete_reference(name))

    async def kld(
        self,
        reference: str,
        windows: tuple[int, int] | None = None,
        *,
        top_logprobs: int = 0,
        as_noise_floor: bool = False,
        on_window: OnKldWindow | None = None,
        model: str | None = None,
    ) -> KldResult:
        """As `ScoreClient.kld`; `on_window` is an ordinary function."""
        return await self._send(
            _calls.kld(
                on_window,
                stream=on_window is not None or as_noise_floor,
                model=model or self.model,
                reference=reference,
                windows=None if windows is None else list(windows),
                top_logprobs=top_logprobs,
                as_noise_floor=as_noise_floor,
            )
        )

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `ScoreClient.tokenize`."""
        return await self._send(_calls.tokenize(text, add_special_tokens, self.model))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """As `ScoreClient.detokenize`."""
        return await self._send(_calls.detokenize(token_ids, self.model))

    async def token_texts(self, token_ids: Collection[int]) -> dict[int, str]:
        """As `ScoreClient.token_texts`."""
        return await self._send(_calls.token_texts(token_ids, self.model))

    async def send(self, call: Call[Answer]) -> Answer:
        """Send a request that is in `_calls`, where no method does, and read its answer."""
        return await self._send(call)

    async def _send(self, call: Call[Answer]) -> Answer:
        with Attempts(self.retries) as attempts:
            while True:
                reader = call.new_reader()
                try:
                    async with self._http.stream(call.method, self.base_url + call.path, json=call.body) as response:
                        if response.is_success:
                            async for chunk in response.aiter_bytes():
                                reader.feed(chunk)
                            return reader.finish()
                        await response.aread()
                    wait = attempts.wait_after_status(response)
                except httpx.RequestError as error:
                    wait = attempts.wait_after_failure(error, can_restart=reader.can_restart)
                await asyncio.sleep(wait)
