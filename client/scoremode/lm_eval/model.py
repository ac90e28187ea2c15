"""lm-eval's model `scoremode`: a Scoremode server answers its requests as lm-eval's `hf` backend does."""

import asyncio
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    _add_special_kwargs,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from more_itertools import chunked, constrained_batches
from tqdm import tqdm
from transformers import AutoTokenizer

from scoremode._sync_client import ScoreClient
from scoremode._tasks import Result
from scoremode._texts import printable
from scoremode.client import AsyncScoreClient
from scoremode.runs import Job, Pool
from scoremode.wire import DEFAULT_TIMEOUT, LISTING_BYTES, PATIENT_RETRY_FOR, call

MAX_PROMPTS, MAX_TOKENS = 32, 65_536
"""Limits on the contexts in a request to `/v1/score`, and on the tokens of its contexts and continuations."""
PROBE = "Scoremode, 1 + 2:\n  naïve “quotes” 你好\n"
"""The local tokenizer must encode this text as the server does."""

Scored = tuple[float, bool]
TokenRequest = tuple[Any, list[int], list[int]]
"""lm-eval's tuple: the request's arguments or None, the context's tokens, the continuation's tokens."""
Part = tuple[tuple[int, ...], Sequence[int]]
"""A context, and the indices of the requests for its continuations."""


class ScoremodeLM(TemplateLM):
    """A Scoremode server as a model of lm-eval.

    Args:
        base_url: Address of the server, with or without `/v1`.
        model: Served model or LoRA adapter; the served model when left out.
        tokenizer: Name or folder of its tokenizer; the path of the served model when left out.
        max_length: Limit on the tokens that the model is fed. The server counts the last target too, so the default and
            the largest value is its `--max-model-len` less 1.
        max_gen_toks: Tokens to generate if a task does not set it.
        num_concurrent: Requests in flight.
        api_key: As for `ScoreClient`; likewise `timeout` and `retry_for`.
        **_: Ignores `batch_size`, `max_batch_size` and `device`, which lm-eval passes to every model.

    The other arguments are those of `hf`.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        tokenizer: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        custom_prefix_token_id: int | None = None,
        num_concurrent: int = 16,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retry_for: float = PATIENT_RETRY_FOR,
        think_end_token: str | None = None,
        trust_remote_code: bool = False,
        revision: str = "main",
        **_: object,
    ) -> None:
        super().__init__()
        # lm-eval's command line turns parallel tokenization off, but one core takes minutes to tokenize MMLU.
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        self._url = base_url
        # lm-eval's command line turns a key of digits into a number.
        key = None if api_key is None else str(api_key)
        self._connection: dict[str, Any] = {"model": model, "api_key": key, "timeout": timeout, "retry_for": retry_for}
        self._num_concurrent = num_concurrent
        with ScoreClient(base_url, **self._connection) as client:
            self._info = client.info()
            served = self._info.model
            path = tokenizer or client.send(
                call("GET", "/v1/models", lambda body: _root(body, served), fixed_bytes=LISTING_BYTES)
            )
            bos = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
            self.tokenizer = AutoTokenizer.from_pretrained(
                path, revision=revision, trust_remote_code=trust_remote_code, **bos
            )
            if self.tokenizer.encode(PROBE, add_special_tokens=False) != client.tokenize(PROBE, False):
                raise ValueError(
                    f"the tokenizer {printable(path)} is not that of {printable(served)} on {client.address}: "
                    "set tokenizer="
                )
        longest = self._info.max_model_len - 1
        self.max_length = longest if max_length is None else max_length
        if self.max_length > longest:
            raise ValueError(
                f"max_length: {max_length} exceeds the server's limit of {longest} (--max-model-len less 1)"
            )
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = custom_prefix_token_id
        self._think_end_token = think_end_token
        self._encoded: dict[str, Any] = {}

    @property
    def cache_name(self) -> str:
        """Everything that an answer depends on, except its request."""
        settings = (self._add_bos_token, self._max_gen_toks, self._think_end_token)
        return "-".join(map(str, (self._info.fingerprint, self.max_length, self.prefix_token_id, *settings)))

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context."""
        candidates = (self._prefix_token_id, self.tokenizer.bos_token_id)
        return int(next((token_id for token_id in candidates if token_id is not None), self.eot_token_id))

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval caches requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a chat as text, without its system message if the template refuses that."""
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **ends))
        except TemplateError:
            messages = [message for message in chat_history if message["role"] != "system"]
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **ends))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        encoded = self._encoded.get(string) if add_special_tokens is None else None
        if encoded is None:
            [encoded] = self._encode([string], add_special_tokens)
        return list(encoded)

    def _encode(self, texts: list[str], add_special_tokens: bool | None = None) -> list[list[int]]:
        """Tokenize texts. A text that begins with BOS gets no second BOS."""
        usual, bos = _add_special_kwargs(add_special_tokens, self._add_bos_token), None
        if add_special_tokens is None:
            bos = self.tokenizer.decode(self.prefix_token_id)
        options = [{"add_special_tokens": False} if bos and has_bos_prefix(text, bos) else usual for text in texts]
        if all(own == options[0] for own in options):
            encoded: list[list[int]] = self.tokenizer(texts, **options[0])["input_ids"]
            return encoded
        return [self.tokenizer(text, **own)["input_ids"] for text, own in zip(texts, options, strict=True)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Scored]:
        """Score as lm-eval does, but encode each text once, many at a time. lm-eval itself encodes two texts per
        request."""
        texts: dict[str, None] = {}
        for context, continuation in (request.args for request in requests):
            if context:
                texts |= {context.rstrip(): None, context + continuation: None}
        for some in chunked(texts, 1024):
            # An array takes a tenth of a list's memory.
            self._encoded |= {text: array("i", ids) for text, ids in zip(some, self._encode(some), strict=True)}
        try:
            answers: list[Scored] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self._encoded.clear()
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **_: object
    ) -> list[Scored]:
        answers: list[Scored] = [(0.0, False)] * len(requests)

        def keep(index: int, answer: Scored) -> None:
            answers[index] = answer
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)

        self._score(requests, keep, disable_tqdm)
        return answers

    def _score(self, requests: Sequence[TokenRequest], keep: Callable[[int, Scored], object], disable: bool) -> None:
        """Score continuations: one context's in the same request, as far as it has room for them, and contexts with the
        same beginning one after another. `keep` is called with the index of each request and its answer."""
        by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, and the model takes {self.max_length} (max_length)"
                )
            by_context[tuple(context[-(self.max_length + 1 - len(continuation)) :])].append(index)

        def size(context: tuple[int, ...], places: Sequence[int], *, alone: bool = True) -> int:
            """The number of tokens that a request sends for these places; or, if it is larger, MAX_TOKENS times the
            share of the server's bound `scoring_tokens` that they use."""
            own = sum(len(requests[index][2]) for index in places)
            all_tokens = len(places) * len(context) + own
            return max(alone * len(context) + own, -(-all_tokens * MAX_TOKENS // self._info.bounds.scoring_tokens))

        def parts_of(context: tuple[int, ...]) -> Iterator[Part]:
            """Split a context's continuations over requests. All documents' first windows share one context."""
            for own in constrained_batches(
                by_context[context],
                MAX_TOKENS,
                get_len=lambda index: size(context, [index], alone=False),
                strict=False,
            ):
                yield context, own

        async def score(client: AsyncScoreClient, parts: Sequence[Part]) -> list[tuple[int, Scored]]:
            scores = await client.score(
                [list(context) for context, _ in parts], [[requests[index][2] for index in own] for _, own in parts]
            )
            answers = [(result.sum_logprob, bool(result.is_greedy)) for result in scores]
            return list(zip((index for _, own in parts for index in own), answers, strict=True))

        most = min(MAX_PROMPTS, max(1, -(-len(by_context) // self._num_concurrent)))
        parts = (part for context in sorted(by_context) for part in parts_of(context))
        jobs = constrained_batches(parts, MAX_TOKENS, most, get_len=lambda part: size(*part), strict=False)
        self._run(jobs, score, keep, tqdm(total=len(requests), desc="Scoring", unit="request", disable=disable))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of documents, scored in the windows that `hf` cuts."""
        windows: list[TokenRequest] = []
        owners: list[int] = []
        for document, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text)
            cut = get_rolling_token_windows(tokens, self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            windows += [(None, *make_disjoint_window(window)) for window in cut]
            owners += [document] * (len(windows) - len(owners))
        missing, sums = Counter(owners), [0.0] * len(requests)

        def keep(index: int, answer: Scored) -> None:
            document = owners[index]
            sums[document] += answer[0]
            missing[document] -= 1
            if not missing[document]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[document].args, sums[document])

        self._score(windows, keep, disable_tqdm)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the texts that vLLM's completions generate."""
        texts = [""] * len(requests)
        eos = self.tokenizer.decode(self.eot_token_id)

        async def generate(client: AsyncScoreClient, index: int) -> list[tuple[int, str]]:
            context, arguments = requests[index].args
            options = normalize_gen_kwargs(arguments, self._max_gen_toks)
            stop = handle_stop_sequences(options.pop("until", None), eos=eos)
            max_tokens = options.pop("max_gen_toks")
            if max_tokens >= self.max_length:
                raise ValueError(f"max_gen_toks: {max_tokens} leaves no room for a context in {self.max_length} tokens")
            if not options.pop("do_sample"):
                options["temperature"] = 0.0
            text = await client.send(
                call(
                    "POST",
                    "/v1/completions",
                    lambda body: str(body["choices"][0]["text"]),
                    model=self._info.model,
                    prompt=self.tok_encode(context)[-(self.max_length - max_tokens) :],
                    max_tokens=max_tokens,
                    stop=stop,
                    **options,
                )
            )
            return [(index, postprocess_generated_text(text, stop, self._think_end_token))]

        def keep(index: int, text: str) -> None:
            texts[index] = text
            self.cache_hook.add_partial("generate_until", requests[index].args, text)

        bar = tqdm(total=len(requests), desc="Generating", unit="request", disable=disable_tqdm)
        self._run(range(len(requests)), generate, keep, bar)
        return texts

    def _run(
        self,
        jobs: Iterable[Job],
        ask: Callable[[AsyncScoreClient, Job], Awaitable[list[tuple[int, Result]]]],
        keep: Callable[[int, Result], object],
        bar: tqdm,
    ) -> None:
        """Run jobs in parallel. `keep` is called with the index of each request and its answer."""

        def keep_all(answered: list[tuple[int, Result]]) -> None:
            for index, answer in answered:
                keep(index, answer)
            bar.update(len(answered))

        async def run() -> None:
            async with AsyncScoreClient(self._url, **self._connection) as client:
                pool = Pool([client], [self._info], self._num_concurrent)
                await pool.score(jobs, ask, keep_all)

        with bar:
            asyncio.run(run())


def _root(body: Any, name: str) -> str:
    """Read the path of a served model, or of an adapter's base model, from `/v1/models`."""
    models = {model["id"]: model for model in body["data"]}
    return str(models[models[name].get("parent") or name]["root"])
