"""Cuts the windows of an evaluation before the first is scored, and measures them."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scoremode._tasks import results_for_each
from scoremode.client import AsyncScoreClient
from scoremode.errors import BadRequestError, ResponseError
from scoremode.metrics import count_words
from scoremode.results import JournalLine
from scoremode.runs.corpora import Corpus
from scoremode.runs.lanes import lane_fields
from scoremode.windows import (
    Method,
    Window,
    WindowError,
    adds_special_tokens,
    cut_windows,
    resolve_context_length,
    resolve_stride,
    turn_prompts,
    turn_windows,
)
from scoremode.wire import ROUNDING, Lane, Many, Nats, Rank, ServerInfo, WindowOrigins

_log = logging.getLogger(__name__)

_COMPUTED_BY = "server.computed_by."
TEXTS_AT_ONCE = 16
"""Texts that the server tokenizes at once."""
CONVERSATIONS_AT_ONCE, CONVERSATION_BYTES = 64, 1 << 20
"""Limits on conversations per request and on their bytes; one larger conversation is allowed if it is alone. Without
the limit on bytes, 64 long conversations would exceed the server's limit."""


class WindowNlls(JournalLine):
    """The NLLs of one window, in nats."""

    num_scored: int
    nll_sum: float
    nlls: Many[Nats]
    """NLL of each target, in order."""
    ranks: Many[Rank] | None = None
    """Rank of each target in the vocabulary, 1 for the most likely; None if not requested."""
    mean_batch: float | None = None
    """The `mean_batch` of the window's `Score`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The tokens and windows of an evaluation, and its resolved settings."""

    corpus: Corpus
    server: ServerInfo
    model: str
    method: Method
    context_length: int
    stride: int
    max_tokens: int | None
    add_special_tokens: bool
    tokens: list[int] = field(default_factory=list)
    """Tokens of the measured text, including special tokens that the tokenizer added."""
    num_bytes: int = 0
    """UTF-8 bytes of the measured text. It and `num_words` are 0 for conversations, whose templates add text."""
    num_words: int = 0
    windows: list[Window] = field(default_factory=list)
    return_ranks: bool = False
    """Whether ranks are requested."""
    lane: Lane = "prefill"
    documents: list[int] = field(default_factory=list)
    """The index of each window's document or conversation."""
    roles: list[str] | None = None
    """The role of each window's turn; None for a text."""
    prompts: list[list[int]] | None = None
    """For each window, the tokens between the previous scored turn and the window's turn; None for a text."""

    @property
    def origins(self) -> WindowOrigins:
        """The source of each window."""
        labels = [self.corpus.labels[index] for index in self.documents] if self.corpus.labels else None
        return WindowOrigins(
            num_context=[window.first_scored for window in self.windows],
            documents=self.documents,
            labels=labels,
            roles=self.roles,
            prompts=self.prompts,
        )

    @property
    def num_windows(self) -> int:
        return len(self.windows)

    def target_ids(self) -> list[int]:
        """Token ids of the targets, in the order of windows."""
        return [token for window in self.windows for token in self.tokens[window.first_target : window.end]]

    async def measure(self, client: AsyncScoreClient, index: int) -> WindowNlls:
        window = self.windows[index]
        sequence = window.token_ids(self.tokens)
        # In the other lanes, the tokens before the first target are prefilled, so no logprobs are requested there.
        num_omitted = 0 if self.lane == "prefill" else window.first_scored
        [score] = await client.score(
            [sequence], return_ranks=self.return_ranks, lane=self.lane, logprobs_from=num_omitted or None
        )
        first = window.first_scored - num_omitted
        nlls = [-logprob for logprob in score.logprobs[first:] if logprob is not None]
        ranks = [rank for rank in (score.ranks or [])[first:] if rank is not None]
        counts = {"logprobs": len(nlls), **({"ranks": len(ranks)} if self.return_ranks else {})}
        for name, count in counts.items():
            if count != window.num_scored:
                raise ResponseError(f"the server gave {count} {name} for the {window.num_scored} targets of a window")
        return WindowNlls(
            index=index,
            num_scored=len(nlls),
            nll_sum=math.fsum(nlls),
            nlls=nlls,
            ranks=ranks if self.return_ranks else None,
            mean_batch=score.mean_batch,
        )

    def nats(self, window: WindowNlls) -> float:
        return window.nll_sum

    def header(self) -> dict[str, object]:
        return {
            "kind": "perplexity",
            "sha256": self.corpus.fingerprint,
            "method": self.method,
            "context_length": self.context_length,
            "stride": self.stride,
            "max_tokens": self.max_tokens,
            "add_special_tokens": self.add_special_tokens,
            "return_ranks": self.return_ranks,
            "model": self.model,
            **lane_fields(self.lane),
            **server_header(self.server),
            "num_tokens": len(self.tokens),
            "tokens_sha256": hashlib.sha256(" ".join(map(str, self.tokens)).encode()).hexdigest(),
        }

    def from_line(self, line: dict[str, object]) -> WindowNlls:
        window = WindowNlls.model_validate(line)
        expected = self.windows[window.index].num_scored if window.index < len(self.windows) else None
        num_ranks = None if window.ranks is None else len(window.ranks)
        is_sum = abs(window.nll_sum - math.fsum(window.nlls)) <= ROUNDING * len(window.nlls)
        if (
            not window.num_scored == len(window.nlls) == expected
            or not is_sum
            or num_ranks != (expected if self.return_ranks else None)
        ):
            raise ValueError("not a window of this run")
        return window


async def make_plan(
    client: AsyncScoreClient,
    server: ServerInfo,
    corpus: Corpus,
    *,
    method: Method = "sliding",
    context_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    add_special_tokens: bool | None = None,
    return_ranks: bool = False,
    lane: Lane = "prefill",
) -> Plan:
    """Tokenize a corpus on the server and cut it into windows."""
    if corpus.conversations:
        method, stride, max_tokens, add_special_tokens = "conversation", None, None, False
    context_length = resolve_context_length(method, context_length, server.max_model_len)
    plan = Plan(
        corpus=corpus,
        server=server,
        model=client.model or server.model,
        method=method,
        context_length=context_length,
        stride=resolve_stride(method, context_length, stride),
        max_tokens=max_tokens,
        add_special_tokens=adds_special_tokens(method, add_special_tokens),
        return_ranks=return_ranks,
        lane=lane,
    )
    return await (_with_turns(plan, client) if corpus.conversations else _with_text(plan, client))


async def tokenize_texts(client: AsyncScoreClient, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    return await results_for_each(texts, lambda text: client.tokenize(text, add_special_tokens), at_once=TEXTS_AT_ONCE)


async def _with_text(plan: Plan, client: AsyncScoreClient) -> Plan:
    corpus, server, max_tokens = plan.corpus, plan.server, plan.max_tokens
    texts = corpus.documents or (corpus.text,)
    documents = await tokenize_texts(client, texts, plan.add_special_tokens)
    tokens, text = [token for document in documents for token in document], "".join(texts)
    if max_tokens is not None and len(tokens) > max_tokens:
        if len(documents) > 1:
            raise WindowError("max_tokens works only with one text, and the corpus has several", "max_tokens")
        tokens = tokens[:max_tokens]
        documents = [tokens]
        # A BOS that the tokenizer put before the text is not part of it.
        has_bos = plan.add_special_tokens and server.adds_bos and tokens[0] == server.bos_token_id
        text_tokens = tokens[1:] if has_bos else tokens
        text = await client.detokenize(text_tokens) if text_tokens else ""
    windows: list[Window] = []
    document_indices: list[int] = []
    offset = 0
    for index, document in enumerate(documents):
        cut = cut_windows(
            len(document),
            plan.method,
            plan.context_length,
            plan.stride,
            prefix_token_id=server.prefix_token_id,
            bos_token_id=server.chunk_token_id,
        )
        windows += [window.moved(offset) for window in cut]
        document_indices += [index] * len(cut)
        offset += len(document)
    if not windows:
        raise WindowError(
            f"the text is too short: {len(tokens)} tokens make no window of {plan.context_length} with method "
            f"{plan.method!r}; give a smaller context_length (--context-length) or a longer text",
            "context_length",
        )
    corpus.warn_of_unscored(document_indices)
    return replace(
        plan,
        tokens=tokens,
        num_bytes=corpus.num_bytes or len(text.encode()),
        num_words=corpus.num_words or count_words(text),
        windows=windows,
        documents=document_indices,
    )


async def _with_turns(plan: Plan, client: AsyncScoreClient) -> Plan:
    """Make one window per turn. Tokens after the context length are left out."""
    corpus, context_length = plan.corpus, plan.context_length
    tokens, windows, documents, roles = list[int](), list[Window](), list[int](), list[str]()
    num_turns, num_cut, merged = 0, 0, set[int]()
    for start, end in _batches(corpus):
        try:
            sequences = await client.turns(**corpus.messages(start, end))
        except BadRequestError as error:
            raise corpus.named(error, start) from error
        for sequence in sequences:
            turns = sequence["turns"]
            cut = turn_windows([(turn["first"], turn["end"]) for turn in turns], context_length)
            num_turns += len(turns)
            num_cut += sum(turn["end"] > context_length for turn in turns)
            windows += [window.moved(len(tokens)) for window in cut]
            documents += [start + sequence["conversation"]] * len(cut)
            roles += [turn["role"] for turn in turns[: len(cut)]]
            tokens += sequence["token_ids"]
            if any(turn.get("is_merged") for turn in turns):
                merged.add(start + sequence["conversation"])
    if num_cut:
        _log.warning("%d of %d turns exceed %d tokens: cut there, or left out", num_cut, num_turns, context_length)
    if not windows:
        raise WindowError(f"no turn begins within the first {context_length} tokens", "context_length")
    corpus.warn_of_unscored(documents)
    corpus.warn_of_rows(merged, "have a turn whose first token begins before it, and is scored whole")
    prompts = turn_prompts(
        (document, window.token_ids(tokens), window.first_scored)
        for document, window in zip(documents, windows, strict=True)
    )
    return replace(plan, tokens=tokens, windows=windows, documents=documents, roles=roles, prompts=prompts)


def _batches(corpus: Corpus) -> Iterator[tuple[int, int]]:
    """Yield the range [first, end) of conversations in each request."""
    start = num_bytes = 0
    for index, conversation in enumerate(corpus.conversations):
        size = len(json.dumps([conversation.messages, conversation.tools], default=str))
        if index - start == CONVERSATIONS_AT_ONCE or (index > start and num_bytes + size > CONVERSATION_BYTES):
            yield start, index
            start, num_bytes = index, 0
        num_bytes += size
    yield start, len(corpus.conversations)


def identity(server: ServerInfo) -> dict[str, object]:
    """The fields that determine a server's scores: servers with equal fields can share a run. GPUs and kernels, which
    change only the last digits, are left out. So is the chat template, because one server renders for all."""
    others = {"object", "max_top_logprobs", "max_num_seqs", "bounds", "weight_bytes", "num_parameters", "computed_by"}
    return server.model_dump(exclude={*others, "chat_template_fingerprint"})


def server_header(server: ServerInfo) -> dict[str, object]:
    """Flatten `identity` and `computed_by` for a journal's header."""
    computed_by = {} if server.computed_by is None else server.computed_by.model_dump()
    return {
        **{f"server.{name}": value for name, value in identity(server).items()},
        **{f"{_COMPUTED_BY}{name}": value for name, value in computed_by.items()},
    }


def conflicts(path: Path, header: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """Explain why a file with this header cannot be resumed as the run `wanted`; empty if it can. Other GPUs or kernels
    are only logged."""
    earlier, now = (
        {name: value for name, value in fields.items() if name.startswith(_COMPUTED_BY)} for fields in (header, wanted)
    )
    in_both = {name for name in now if None not in (earlier.get(name), now[name])}
    if differing := differences(*({name: fields[name] for name in in_both} for fields in (earlier, now))):
        _log.warning("%s was begun on another server, so its values will be from both: %s", path, differing)
    allowed = {**earlier, **now}
    return differences({**header, **allowed}, {**wanted, **allowed})


def differences(actual: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """List the fields whose values differ, as a phrase; empty if none do."""
    return ", ".join(
        f"{name} is {actual.get(name)!r} instead of {wanted.get(name)!r}"
        for name in dict.fromkeys([*wanted, *actual])
        if actual.get(name) != wanted.get(name)
    )
