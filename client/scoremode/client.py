"""`ScoreClient` and `AsyncScoreClient`: Scoremode's HTTP API from Python, over httpx.

Each method is written once, as the request that it makes. How answers are read is in `wire.calls`, what is tried
again in `wire.retries`.
"""

import asyncio
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter

from scoremode._version import __version__
from scoremode.errors import ResponseError
from scoremode.results import KldResult, KldWindowValues, Score, kld_reader, parse_kld_result, parse_scores
from scoremode.windows import WindowSettings
from scoremode.wire.calls import (
    BYTES_PER_BYTE,
    FIXED_BYTES,
    LISTING_BYTES,
    Answer,
    BytesReader,
    Call,
    EventReader,
    call,
    stream,
)
from scoremode.wire.protocol import (
    MAX_CANDIDATES,
    Candidates,
    Continuations,
    Int32,
    Lane,
    Many,
    Messages,
    PerplexityResponse,
    PerplexityWindow,
    Prompt,
    ServerInfo,
    Text,
    TokensResponse,
    Tools,
    TurnSequence,
    TurnsResponse,
)
from scoremode.wire.references import CorpusInfo, Reference, ReferenceDeleted, ReferenceList, ReferenceWindows
from scoremode.wire.retries import Attempts, Retries

API_KEY_VARIABLE = "SCOREMODE_API_KEY"
DEFAULT_TIMEOUT = 600.0
"""Seconds without a byte from the server. A request may wait long for others, so a healthy server can be silent."""
DEFAULT_MAX_RETRIES = 4
MAX_POSITIONS = 1 << 19
"""Of the windows that one answer of `kld` has, where the caller does not know how many they have."""

_VALUE_BYTES, _POSITION_BYTES, _OVERLAPS = 32, 64, 8
"""Bytes that an answer may have for a top token or a candidate at a position, and for a position of `kld` without them;
and how many times as long an answer may be whose windows overlap."""
_LONGEST_CONNECT = 10.0
_LARGEST_PORT = 65535

Arguments = ParamSpec("Arguments")
Transport = TypeVar("Transport")
OnWindow = Callable[[PerplexityWindow], object]
OnKldWindow = Callable[[KldWindowValues], object]


def server_root(base_url: str) -> str:
    """The address that paths are appended to: `base_url` without a trailing `/v1`.
    ValueError if it is not an http or https address."""
    root = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        url = httpx.URL(root)
    except httpx.InvalidURL as error:
        raise ValueError(f"not a server address: {base_url!r} ({error})") from error
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > _LARGEST_PORT:
        raise ValueError(f"not a server address: {base_url!r}; it looks like http://localhost:8000")
    return root


class _Tokens(BaseModel):
    tokens: Many[Int32]


class _Prompt(BaseModel):
    prompt: str


_TOKEN_TEXTS = TypeAdapter(TokensResponse)
_TURNS = TypeAdapter(TurnsResponse)


class _Method(Generic[Arguments, Answer]):
    """Makes a method of both clients from one that only makes the request: `ScoreClient` returns the answer, and
    `AsyncScoreClient` a coroutine with it."""

    def __init__(self, make_call: Callable[Concatenate[Any, Arguments], Call[Answer]]) -> None:
        self._make_call = make_call

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, Arguments], Call[Answer]]: ...
    @overload
    def __get__(self, client: "ScoreClient", owner: type) -> Callable[Arguments, Answer]: ...
    @overload
    def __get__(self, client: "AsyncScoreClient", owner: type) -> Callable[Arguments, Coroutine[Any, Any, Answer]]: ...
    def __get__(self, client: "ScoreClient | AsyncScoreClient | None", owner: type) -> Any:
        if client is None:
            return self._make_call

        @wraps(MethodType(self._make_call, client))
        def method(*arguments: Arguments.args, **fields: Arguments.kwargs) -> object:
            return client.send(self._make_call(client, *arguments, **fields))

        return method


class _Client(ABC, Generic[Transport]):
    """What both clients are made of, apart from the connection."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
        retry_for: float | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.base_url = server_root(base_url)
        self.address = str(httpx.URL(self.base_url).copy_with(userinfo=b""))
        """`base_url` without user and password, to be shown."""
        self.model = model
        self.retries = Retries(self.address, max_retries, retry_for)
        """May be changed while requests are under way."""
        # An answer of a few bytes could unpack to any length.
        headers = {"User-Agent": f"scoremode/{__version__}", "Accept-Encoding": "identity"}
        if key := os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key:
            headers["Authorization"] = f"Bearer {key}"
        # Requests queue for a connection as long as it takes: how many there are at once is the caller's choice.
        limits = httpx.Timeout(timeout, connect=min(timeout, _LONGEST_CONNECT), pool=None)
        self._open(headers=headers, timeout=limits, transport=transport)

    @abstractmethod
    def _open(self, **settings: Any) -> None:
        """Make the connection, with settings of httpx."""

    @_Method
    def info(self) -> Call[ServerInfo]:
        """What the server runs: model, context length, special tokens, versions."""
        query = "" if self.model is None else f"?model={quote(self.model, safe='')}"
        return call("GET", f"/v1/score{query}", ServerInfo.model_validate)

    @_Method
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
        lane: Lane = "prefill",
        context: int | None = None,
        model: str | None = None,
    ) -> Call[list[Score]]:
        """Exact log-probabilities, in nats, of every token of one or several texts, or of their continuations.

        Args:
            prompt: A text, several, the token ids of a text, or those of several.
            continuations: Score these instead, each after each prompt; or a list of them for each prompt.
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
            lane: Feed as many tokens a step as fit, or one ("decode"), or as many as speculative decoding ("verify").
            context: In these other lanes, prefill at most this many tokens, and none whose step gives a logprob.
            model: In place of the client's.

        Returns:
            One score per prompt; with continuations one for each, those of the first prompt first.
        """
        sequences = _sequences(prompt, continuations)
        num_values = top_logprobs if candidate_token_ids is None else top_logprobs + MAX_CANDIDATES
        return call(
            "POST",
            "/v1/score",
            lambda body: parse_scores(body, sequences, logprobs_from or 0),
            # A continuation may be scored after many prompts.
            fixed_bytes=FIXED_BYTES + (BYTES_PER_BYTE + _VALUE_BYTES * num_values) * sum(map(len, sequences)),
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
            **_lane_fields(lane, context),
            encoding_format="base64",
        )

    @_Method
    def perplexity(
        self,
        prompt: Text | None = None,
        *,
        texts: list[str] | None = None,
        on_window: OnWindow | None = None,
        lane: Lane = "prefill",
        context: int | None = None,
        model: str | None = None,
        **windows: Unpack[WindowSettings],
    ) -> Call[PerplexityResponse]:
        """Perplexity of a text, or of several that share no context; the server cuts the windows.

        Args:
            prompt: One text, or its token ids.
            texts: Several texts, in place of `prompt`.
            on_window: An ordinary function, called with each window's NLL and the running perplexity as the server gets
                there.
            lane: As for `score`, with its `context`.
            model: In place of the client's.
            **windows: How the text is cut into windows: `WindowSettings` says which.

        The answer is streamed, so a long run does not time out. A connection lost after the first window is an error,
        not tried again.
        """
        return stream(
            "/v1/perplexity",
            lambda: _window_reader("perplexity", PerplexityResponse.model_validate, on_window),
            bytes_per_byte=_OVERLAPS * BYTES_PER_BYTE,
            model=model or self.model,
            prompt=prompt,
            texts=texts,
            **_lane_fields(lane, context),
            **dict[str, Any]({"method": "sliding", **windows}),
        )

    @_Method
    def record_reference(
        self,
        name: str,
        prompt: Text | None = None,
        *,
        texts: list[str] | None = None,
        messages: Messages | list[Messages] | None = None,
        tools: Tools | list[Tools | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        labels: Sequence[str] | None = None,
        corpus: CorpusInfo | None = None,
        return_ranks: bool = False,
        on_window: OnWindow | None = None,
        model: str | None = None,
        **windows: Unpack[WindowSettings],
    ) -> Call[Reference]:
        """Record the served model's distributions over a text, for other models to be compared with.

        Args:
            name: Of the reference.
            prompt: One text, or its token ids.
            texts: Several texts, in place of `prompt`.
            messages: Or conversations, whose turns are windows, with `tools` and `chat_template_kwargs` as for `turns`.
            labels: Of each text or conversation, such as its language, kept with the reference.
            corpus: Where the text is from, kept with the reference.
            return_ranks: Have the logprobs and ranks of its targets in each window.
            on_window: An ordinary function, called with each window as it is recorded, and the running perplexity.
            model: In place of the client's.
            **windows: As for `perplexity`.

        The answer is streamed. The server resumes an interrupted recording when the same request is sent again, as the
        client does when the connection is lost. `BadRequestError` or another `APIStatusError` says that there is
        another reference of that name.
        """
        return stream(
            "/v1/references",
            # Sent again, the server reports only the windows that were missing.
            lambda: _window_reader("reference", Reference.model_validate, on_window, repeatable=True),
            bytes_per_byte=_OVERLAPS * BYTES_PER_BYTE,
            model=model or self.model,
            name=name,
            prompt=prompt,
            texts=texts,
            corpus=None if corpus is None else corpus.model_dump(exclude_none=True),
            return_ranks=return_ranks or None,
            messages=messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            labels=labels and list(labels),
            **windows if messages is not None else {"method": "sliding", **windows},
        )

    @_Method
    def references(self) -> Call[list[Reference]]:
        """All references of the server."""
        return call(
            "GET",
            "/v1/references",
            lambda body: ReferenceList.model_validate(body).data,
            fixed_bytes=LISTING_BYTES,
        )

    @_Method
    def reference(self, name: str) -> Call[Reference]:
        """What is known of a reference."""
        return call("GET", _path_of(name), Reference.model_validate)

    @_Method
    def reference_windows(self, name: str) -> Call[ReferenceWindows]:
        """Where each window of a reference is from."""
        return call("GET", f"{_path_of(name)}/windows", ReferenceWindows.model_validate, fixed_bytes=LISTING_BYTES)

    @_Method
    def llama_cpp_base(self, name: str, first: int, write: Callable[[bytes], object]) -> Call[None]:
        """The base file of llama.cpp that a reference is, from a window on; the first comes after the header.

        Args:
            name: Of a complete reference that was recorded with method `llama.cpp`.
            first: Index of the first window.
            write: Takes the file's bytes as they come, and raises an exception if they are too many. A connection lost
                after the first is an error, not tried again.
        """
        return Call(
            "GET", f"{_path_of(name)}/llama.cpp?first={first}", lambda: BytesReader(write), fixed_bytes=sys.maxsize
        )

    @_Method
    def delete_reference(self, name: str) -> Call[None]:
        """Delete a reference."""

        def check(body: object) -> None:
            ReferenceDeleted.model_validate(body)

        return call("DELETE", _path_of(name), check)

    @_Method
    def kld(
        self,
        reference: str,
        windows: tuple[int, int] | None = None,
        *,
        top_logprobs: int = 0,
        num_positions: int = MAX_POSITIONS,
        as_noise_floor: bool = False,
        on_window: OnKldWindow | None = None,
        lane: Lane = "prefill",
        context: int | None = None,
        model: str | None = None,
    ) -> Call[KldResult]:
        """KL divergence of the served model from a reference, over the whole vocabulary at every position.

        Args:
            reference: Name of a complete reference.
            windows: The first window and the one after the last, from 0; all when left out.
            top_logprobs: Return the k most likely tokens of both models at every position, at most what the server's
                `--max-logprobs` allows, and 256.
            num_positions: The most that these windows have: an answer with many more is refused.
            as_noise_floor: Keep the result with the reference as its noise floor in this lane; all windows, and the
                reference's own model.
            on_window: An ordinary function, called with each window as it is done.
            lane: Of the served model, as for `score`, with its `context`. References are of the prefill lane.
            model: In place of the client's.

        With `on_window` or `as_noise_floor` the answer is streamed. A connection lost after the first window is then an
        error, not tried again.
        """
        fields: dict[str, Any] = {
            "fixed_bytes": FIXED_BYTES + (_POSITION_BYTES + 2 * _VALUE_BYTES * top_logprobs) * num_positions,
            "model": model or self.model,
            "reference": reference,
            "windows": None if windows is None else list(windows),
            "top_logprobs": top_logprobs,
            "as_noise_floor": as_noise_floor,
            "encoding_format": "base64",
            **_lane_fields(lane, context),
        }
        if on_window is not None or as_noise_floor:
            return stream("/v1/kld", lambda: kld_reader(on_window, windows), **fields)
        return call("POST", "/v1/kld", lambda body: parse_kld_result(body, windows), **fields, stream=False)

    @_Method
    def tokenize(self, text: str, add_special_tokens: bool = True) -> Call[list[int]]:
        """Token ids of a text, by the server's tokenizer."""
        fields: dict[str, Any] = {"model": self.model, "prompt": text, "add_special_tokens": add_special_tokens}
        return call("POST", "/tokenize", lambda body: _Tokens.model_validate(body).tokens, **fields)

    @_Method
    def turns(
        self,
        messages: Messages | list[Messages],
        tools: Tools | list[Tools | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        roles: list[str] | None = None,
    ) -> Call[list[TurnSequence]]:
        """Conversations as the served model's chat template renders them, and their turns to score.

        Args:
            messages: One conversation or several.
            tools: Of all, or a list for each.
            chat_template_kwargs: Passed to the template.
            roles: Of the turns; the assistant's when left out.
        """
        conversations = messages if messages and isinstance(messages[0], list) else [messages]

        def parse(body: object) -> list[TurnSequence]:
            sequences = _TURNS.validate_python(body)["data"]
            for sequence in sequences:
                place, num_tokens = sequence["conversation"], len(sequence["token_ids"])
                fits = all(0 < turn["first"] < turn["end"] <= num_tokens for turn in sequence["turns"])
                if not fits or not 0 <= place < len(conversations):
                    raise ResponseError(f"the server's turns of conversation {place}, {num_tokens} tokens, do not fit")
            return sequences

        return call(
            "POST",
            "/v1/turns",
            parse,
            # A conversation has at most a sequence for each of its messages.
            bytes_per_byte=BYTES_PER_BYTE * max(map(len, conversations)),
            model=self.model,
            messages=messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            roles=roles,
        )

    @_Method
    def detokenize(self, token_ids: Sequence[int]) -> Call[str]:
        """The text of token ids, by the server's tokenizer."""
        fields: dict[str, Any] = {"model": self.model, "tokens": list(token_ids)}
        return call("POST", "/detokenize", lambda body: _Prompt.model_validate(body).prompt, **fields)

    @_Method
    def token_texts(self, token_ids: Collection[int]) -> Call[dict[int, str]]:
        """The text of each of some tokens alone, by its id. A token that ends within a character has U+FFFD for it."""
        wanted = sorted(set(token_ids))

        def parse(body: object) -> dict[int, str]:
            texts = _TOKEN_TEXTS.validate_python(body)["tokens"]
            if len(texts) != len(wanted):
                raise ResponseError(f"the server gave {len(texts)} texts for {len(wanted)} tokens")
            return dict(zip(wanted, texts, strict=True))

        return call("POST", "/v1/tokens", parse, model=self.model, token_ids=wanted)


class ScoreClient(_Client[httpx.BaseTransport]):
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def send(self, call: Call[Answer]) -> Answer:
        """Send a request, again where that may help, and read its answer."""
        with Attempts(self.retries) as attempts:
            while True:
                reader = call.new_reader()
                try:
                    with self._http.stream(call.method, self.base_url + call.path, json=call.body) as response:
                        receiver = call.receiver(response, reader)
                        for chunk in response.iter_bytes():
                            receiver.receive(chunk)
                        if response.is_success:
                            return reader.finish()
                    wait = attempts.wait_after_status(response, receiver.finish())
                except httpx.RequestError as error:
                    wait = attempts.wait_after_failure(error, can_restart=reader.can_restart)
                time.sleep(wait)

    def _open(self, **settings: Any) -> None:
        self._http = httpx.Client(**settings)


class AsyncScoreClient(_Client[httpx.AsyncBaseTransport]):
    """`ScoreClient` for asyncio: the same arguments, methods and errors, to be awaited.

    Cancelling a call closes its connection, and the server then drops the request.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def send(self, call: Call[Answer]) -> Answer:
        """As `ScoreClient.send`."""
        with Attempts(self.retries) as attempts:
            while True:
                reader = call.new_reader()
                try:
                    async with self._http.stream(call.method, self.base_url + call.path, json=call.body) as response:
                        receiver = call.receiver(response, reader)
                        async for chunk in response.aiter_bytes():
                            receiver.receive(chunk)
                        if response.is_success:
                            return reader.finish()
                    wait = attempts.wait_after_status(response, receiver.finish())
                except httpx.RequestError as error:
                    wait = attempts.wait_after_failure(error, can_restart=reader.can_restart)
                await asyncio.sleep(wait)

    def _open(self, **settings: Any) -> None:
        # The caller bounds the number of requests. By itself httpx would hold back all but 100 of them.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(**settings, limits=limits)


def _window_reader(
    kind: str, result: Callable[[object], Answer], on_window: OnWindow | None, *, repeatable: bool = False
) -> EventReader[PerplexityWindow, Answer]:
    return EventReader(("perplexity.window", kind), _read_window, result, on_window, repeatable)


def _read_window(event: object) -> PerplexityWindow:
    window = PerplexityWindow.model_validate(event)
    of_targets = (values for values in (window.logprobs, window.ranks) if values is not None)
    if window.index >= window.num_windows or any(len(values) != window.num_scored for values in of_targets):
        raise ResponseError(f"the server's window {window.index} of {window.num_windows} does not fit")
    return window


def _sequences(prompt: Prompt, continuations: Continuations | None) -> list[str | list[int]]:
    """The texts or token ids that a request has scored, in the order of its results."""
    prompts = _leaves(prompt)
    if not continuations:
        return prompts
    # One list for all prompts, or one for each.
    is_shared = _leaves(continuations[0]) == [continuations[0]]
    return _leaves(continuations) * (len(prompts) if is_shared else 1)


def _leaves(nested: Any) -> list[str | list[int]]:
    """The texts and the lists of token ids within lists."""
    if isinstance(nested, str) or not nested or isinstance(nested[0], int):
        return [nested]
    return [leaf for each in nested for leaf in _leaves(each)]


def _lane_fields(lane: Lane, context: int | None) -> dict[str, Any]:
    """What a request says of its lane: nothing of the usual one, which older servers know too."""
    return {} if lane == "prefill" and context is None else {"lane": lane, "context": context}


def _path_of(name: str) -> str:
    return f"/v1/references/{quote(name, safe='')}"
