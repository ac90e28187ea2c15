"""Parts of requests and answers that both clients share: addresses, fields, limits and readers."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import BaseModel, Field, TypeAdapter

from scoremode._texts import excerpt
from scoremode._version import __version__
from scoremode.errors import ResponseError
from scoremode.wire.calls import FIXED_BYTES, Answer, Call, EventReader, call
from scoremode.wire.protocol import (
    Continuations,
    Int32,
    Lane,
    Many,
    PerplexityWindow,
    Prompt,
    TokensResponse,
    TurnSequence,
    TurnsResponse,
)
from scoremode.wire.references import Reference

API_KEY_VARIABLE = "SCOREMODE_API_KEY"
DEFAULT_TIMEOUT = 600.0
"""Seconds to wait for the next byte. A healthy server can be silent for long while a request is queued."""
DEFAULT_MAX_RETRIES = 4
MAX_POSITIONS = 1 << 23
"""Limit on positions in one answer of `kld`, even if the server announces more."""
MAX_WINDOWS = 1 << 17
"""Limit on windows in one answer, even if the server announces more: twice a server's default limit."""
MAX_ORIGINS_BYTES = 1 << 27
"""Limit on the answer of `reference_windows`, even if the server announces more."""

VALUE_BYTES, POSITION_BYTES, WINDOW_BYTES, OVERLAPS = 32, 64, 1024, 8
"""Limits on the bytes in an answer: per top token or candidate at a position, per `kld` position without its top
tokens, and per window without its positions. The server writes 11, 59 and 512 bytes. `OVERLAPS` multiplies the limit if
windows overlap."""
ORIGIN_BYTES, TOKEN_BYTES = 4200, 11
"""Limits on the bytes in an answer of `reference_windows`: per window, with a role and a label of 1,024
characters, and per token id."""

OnWindow = Callable[[PerplexityWindow], object]


NEUTRAL_SAMPLING: dict[str, Any] = {
    **dict.fromkeys(("top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), 0.0),
    **dict.fromkeys(("top_k", "min_tokens"), 0),
    **dict.fromkeys(("ignore_eos", "watermarking"), False),
}
"""Sampling parameters with no effect. They are sent because vLLM takes missing ones from the model's files."""


class _Choice(BaseModel):
    token_ids: Many[Int32]
    text: str
    finish_reason: str | None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


class TokenIds(BaseModel):
    tokens: Many[Int32]


def tokenization(**fields: Any) -> Call[list[int]]:
    """Make a request for the token ids of a text or a conversation."""
    return call("POST", "/tokenize", lambda body: TokenIds.model_validate(body).tokens, **fields)


class DetokenizedText(BaseModel):
    prompt: str


class TokenTexts(dict[int, str]):
    """Maps token ids to texts. `contents` has the bytes of tokens that end within a character, in hexadecimal."""

    def __init__(self, texts: Mapping[int, str] | None = None, contents: Mapping[int, str] | None = None) -> None:
        super().__init__(texts or {})
        self.contents = dict(contents or {})

    def joined(self, token_ids: Iterable[int]) -> str:
        """The text of consecutive tokens; a token without a text is shown by its id."""
        parts = (
            bytes.fromhex(self.contents[token])
            if token in self.contents
            else self.get(token, f"token {token}").encode()
            for token in map(int, token_ids)
        )
        return b"".join(parts).decode(errors="replace")


_HEXADECIMAL = re.compile("(?:[0-9a-f]{2})+")
_TOKEN_TEXTS = TypeAdapter(TokensResponse)
_TURNS = TypeAdapter(TurnsResponse)


_ROUTES = re.compile(r"/v1/(score|turns|tokens|perplexity|completions|chat/completions|models|kld|references)$")


def server_root(base_url: str) -> str:
    """The address that paths are appended to: `base_url` without a trailing `/v1`.
    ValueError if it is not an http or https address, or ends in a route."""
    root = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        url = httpx.URL(root)
    except httpx.InvalidURL as error:
        raise ValueError(f"not a server address: {base_url!r} ({error})") from error
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
        raise ValueError(f"not a server address: {base_url!r}; it looks like http://localhost:8000")
    if route := _ROUTES.search(root):
        raise ValueError(f"{base_url!r} ends in a route: give the server's address, {root[: route.start()]}")
    return root


def connection_settings(api_key: str | None, timeout: float) -> dict[str, Any]:
    """Settings of an httpx client. If `api_key` is None, the environment's SCOREMODE_API_KEY is used."""
    key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
    # Refuse compression: a few bytes could unpack to any length.
    headers = {"User-Agent": f"scoremode/{__version__}", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return {
        "headers": headers,
        # No timeout for a free connection: the caller decides how many requests are sent at once.
        "timeout": httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
        # httpx would allow 100 connections at most by default.
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
    }


def window_reader(
    kind: str, result: Callable[[object], Answer], on_window: OnWindow | None, *, repeatable: bool = False
) -> EventReader[PerplexityWindow, Answer]:
    """Make the reader of a stream of scored windows and a result. The result's field `object` is `kind`."""
    return EventReader(("perplexity.window", kind), _read_window, result, on_window, repeatable)


def _read_window(event: object) -> PerplexityWindow:
    window = PerplexityWindow.model_validate(event)
    sizes = [len(values) for values in (window.logprobs, window.ranks) if values is not None]
    if window.index >= window.num_windows or any(size != window.num_scored for size in sizes):
        raise ResponseError(f"the server's window {window.index} of {window.num_windows} does not fit")
    return window


def parse_turns(body: object, num_conversations: int) -> list[TurnSequence]:
    """Parse rendered conversations. ResponseError if a turn is outside its sequence, or a sequence belongs to none of
    the `num_conversations`."""
    sequences = _TURNS.validate_python(body)["data"]
    for sequence in sequences:
        place, num_tokens = sequence["conversation"], len(sequence["token_ids"])
        fits = all(0 < turn["first"] < turn["end"] <= num_tokens for turn in sequence["turns"])
        if not fits or not 0 <= place < num_conversations:
            raise ResponseError(f"the server's turns of conversation {place}, {num_tokens} tokens, do not fit")
    return sequences


def parse_answer(body: object, max_new_tokens: int) -> tuple[list[int], str]:
    """Parse a generated answer into token ids and text. ResponseError if it ended neither with a stop token nor after
    `max_new_tokens`."""
    [choice] = _Completion.model_validate(body).choices
    num_tokens, reason = len(choice.token_ids), choice.finish_reason
    if reason == "length" and num_tokens < max_new_tokens:
        raise ResponseError(
            f"the server ended an answer after {num_tokens} of {max_new_tokens} tokens: its --generation-config has a "
            "max_new_tokens; start it with --generation-config vllm"
        )
    if reason not in ("stop", "length") or num_tokens > max_new_tokens:
        raise ResponseError(
            f"the server ended an answer after {num_tokens} tokens for the reason {excerpt(repr(reason))}"
        )
    return choice.token_ids, choice.text


def parse_token_texts(body: object, token_ids: list[int]) -> TokenTexts:
    """Parse the texts of tokens. ResponseError if there are more or fewer texts than ids, or bytes that are not
    hexadecimal."""
    response = _TOKEN_TEXTS.validate_python(body)
    texts = response["tokens"]
    contents = response.get("bytes", [None] * len(texts))
    if not len(texts) == len(contents) == len(token_ids):
        raise ResponseError(f"the server gave {len(texts)} texts for {len(token_ids)} tokens")
    if any(content is not None and not _HEXADECIMAL.fullmatch(content) for content in contents):
        raise ResponseError("the server gave bytes of tokens that are not hexadecimal")
    partial = {token: content for token, content in zip(token_ids, contents, strict=True) if content is not None}
    return TokenTexts(dict(zip(token_ids, texts, strict=True)), partial)


def most_tokens(sequences: Sequence[str | list[int]]) -> int:
    """Limit on the number of tokens in sequences: each token of a text has at least one byte."""
    return sum(len(text.encode(errors="replace")) if isinstance(text, str) else len(text) for text in sequences)


def kld_bytes(
    windows: tuple[int, int] | None, num_positions: int, top_logprobs: int, *, has_routes: bool = False
) -> int:
    """Size limit of an answer of `kld` for these windows, or for all. ResponseError if `num_positions` is more than
    a client reads."""
    if num_positions > MAX_POSITIONS:
        raise ResponseError(
            f"the server's reference has {num_positions:,} positions to compare in one request, more than the "
            f"{MAX_POSITIONS:,} that an answer can have: record a shorter text"
        )
    num_windows = MAX_WINDOWS if windows is None else min(windows[1] - windows[0], MAX_WINDOWS)
    position_bytes = POSITION_BYTES + 2 * VALUE_BYTES * top_logprobs + (VALUE_BYTES if has_routes else 0)
    # A window's counts take 3 * 8 bytes per mixture-of-experts layer.
    window_bytes = WINDOW_BYTES * (8 if has_routes else 1)
    return FIXED_BYTES + window_bytes * num_windows + position_bytes * num_positions


def origins_bytes(reference: Reference) -> int:
    """Size limit of the answer of `reference_windows`, from the reference's numbers of windows and tokens."""
    claimed = ORIGIN_BYTES * reference.num_windows + TOKEN_BYTES * reference.num_tokens
    return FIXED_BYTES + min(claimed, MAX_ORIGINS_BYTES)


def scored_sequences(prompt: Prompt, continuations: Continuations | None) -> list[str | list[int]]:
    """The texts or token ids that a request scores, in the order of its results."""
    prompts = _leaves(prompt)
    if not continuations:
        return prompts
    # The continuations are one list for all prompts, or one list per prompt.
    is_shared = _leaves(continuations[0]) == [continuations[0]]
    return _leaves(continuations) * (len(prompts) if is_shared else 1)


def _leaves(nested: Any) -> list[str | list[int]]:
    """Flatten nested lists into texts and lists of token ids."""
    if not hasattr(nested, "__len__"):
        raise TypeError(f"{nested!r} is not a text, the token ids of one, or a list of either")
    if isinstance(nested, str) or not nested or isinstance(nested[0], int):
        return [nested]
    return [leaf for part in nested for leaf in _leaves(part)]


def lane_request(lane: Lane, context: int | None) -> dict[str, Any]:
    """The lane's fields of a request; none for prefill, because older servers refuse them."""
    return {} if lane == "prefill" and context is None else {"lane": lane, "context": context}


def info_path(model: str | None) -> str:
    """The route that describes a served model; the server's default model if `model` is None."""
    return "/v1/score" if model is None else f"/v1/score?model={quote(model, safe='')}"


def reference_path(name: str) -> str:
    return f"/v1/references/{quote(name, safe='')}"
