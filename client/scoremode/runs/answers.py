"""Records a served model's own answers to prompts as a reference, for `ppl-client record --prompts` and for Python."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from scoremode._tasks import results_for_each
from scoremode.client import AsyncScoreClient
from scoremode.errors import BadRequestError, CorpusError, OutputError
from scoremode.results import GeneratedAnswer
from scoremode.runs.corpora import Corpus
from scoremode.runs.journal import Journal
from scoremode.runs.output import JOURNAL_SUFFIX
from scoremode.runs.plan import TEXTS_AT_ONCE, server_header
from scoremode.runs.pool import Pool
from scoremode.runs.recording import Recording, record_reference
from scoremode.runs.run import OnProgress, measure
from scoremode.wire import Answer, Answers, AnswerSettings, Reference, ReferenceAnswers, ServerInfo

_log = logging.getLogger(__name__)

MAX_RECORDING_BYTES = 1 << 27
"""Limit on the bytes of the request that records all answers: the client later reads its prompts back."""
OTHER_BYTES = 4096
"""Bytes of names and settings in the request that records all answers."""
LISTS_PER_ANSWER = 3
"""Lists and objects of one answer in JSON."""


@dataclass(frozen=True, slots=True)
class AnswersPlan:
    """The prompts that a model answers, as the `Measurement` whose journal stores the answers."""

    server: ServerInfo
    model: str
    corpus: Corpus
    prompts: list[list[int]]
    settings: AnswerSettings

    @property
    def num_windows(self) -> int:
        return len(self.prompts)

    async def measure(self, client: AsyncScoreClient, index: int) -> GeneratedAnswer:
        seed = None if self.settings.seed is None else self.settings.seed + index
        token_ids, text = await client.generate(self.prompts[index], self.settings.max_new_tokens, seed=seed)
        return GeneratedAnswer(index=index, token_ids=token_ids, text=text)

    def nats(self, window: GeneratedAnswer) -> float:
        """Return 0: answers are scored later, when they are recorded."""
        return 0.0

    def header(self) -> dict[str, object]:
        return {
            "kind": "answers",
            "sha256": self.corpus.fingerprint,
            "tokens_sha256": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest(),
            **self.settings.model_dump(),
            "model": self.model,
            **server_header(self.server),
        }

    def from_line(self, line: dict[str, object]) -> GeneratedAnswer:
        answer = GeneratedAnswer.model_validate(line)
        if len(answer.token_ids) > self.settings.max_new_tokens:
            raise ValueError("not an answer of this run")
        return answer

    @property
    def most_bytes(self) -> int:
        """Limit on the bytes of the request with all answers."""
        return min(self.server.bounds.recording_bytes, MAX_RECORDING_BYTES)

    @property
    def most_needed(self) -> int:
        """Bytes of the request if every answer has its full length, without the answers' texts."""
        num_new = len(self.prompts) * self.settings.max_new_tokens
        token_bytes = len(f"{self.server.vocab_size},")
        return self._num_bytes(self._joined([([], "")] * len(self.prompts))) + num_new * token_bytes

    def answers(self, generated: Sequence[GeneratedAnswer]) -> Answers:
        """Make the answers to record. If the request would be too long, it has no texts, which are not scored."""
        answers = self._joined((answer.token_ids, answer.text) for answer in generated)
        if self._num_bytes(answers) <= self.most_bytes:
            return answers
        _log.warning("the answers are recorded without their texts, which are too long for one request")
        return self._joined((answer.token_ids, "") for answer in generated)

    def check_bounds(self) -> None:
        """Raise CorpusError if answers of full length would exceed the server's limits on one recording."""
        bounds, num_prompts = self.server.bounds, len(self.prompts)
        # The 2 are the object and the list that contain the answers.
        most_prompts = min(bounds.sequences, (bounds.lists - 2) // LISTS_PER_ANSWER)
        if num_prompts > most_prompts:
            raise CorpusError(
                f"{self.corpus.name} has {num_prompts:,} prompts, and the server records at most {most_prompts:,} "
                "(--max-request-sequences): answer fewer (--num-samples)"
            )
        if (most_needed := self.most_needed) > self.most_bytes:
            raise CorpusError(
                f"{num_prompts:,} prompts with answers of {self.settings.max_new_tokens:,} tokens can have "
                f"{most_needed:,} bytes, and one recording takes {self.most_bytes:,}: answer fewer (--num-samples), "
                "make answers shorter (--max-new-tokens), or start the server with a larger --max-request-bytes"
            )

    def _joined(self, answers: Iterable[tuple[list[int], str]]) -> Answers:
        """Combine the prompts with their answers, given as token ids and texts."""
        data = [
            Answer(prompt_token_ids=prompt, token_ids=token_ids, text=text)
            for prompt, (token_ids, text) in zip(self.prompts, answers, strict=True)
        ]
        return Answers(**self.settings.model_dump(), data=data)

    def _num_bytes(self, answers: Answers) -> int:
        """The length of the request that records answers."""
        body = {"answers": answers.model_dump(), "labels": self.corpus.labels, "corpus": self.corpus.info.model_dump()}
        return OTHER_BYTES + len(httpx.Request("POST", "http://server", json=body).content)


async def record_answers(
    client: AsyncScoreClient,
    prompts: Corpus,
    name: str,
    settings: AnswerSettings,
    *,
    routes: bool = False,
    concurrency: int | None = None,
    folder: Path = Path(),
    on_progress: OnProgress | None = None,
) -> Recording:
    """Have a served model answer prompts, and record its distributions over the answers' tokens.

    Args:
        client: Client of one server, as for `record_reference`.
        prompts: Conversations or documents, from `load_prompts`.
        name, routes: As for `record_reference`.
        settings: How the answers are generated.
        concurrency: Prompts in flight at once; by default as many sequences as the server runs at once, at most 64.
        folder: Folder of the journal, from which the same call resumes until the reference is complete.
        on_progress: Called for each generated answer; generating takes most of the time.

    Raises:
        ScoremodeError: a prompt and its answer exceed the model's context, or one recording cannot have all answers
            (both before any answer is generated); the journal or the reference belongs to another run; or as in
            `record_reference`.
    """
    pool = await Pool.connect(client, concurrency)
    path = folder / f"{name}.answers{JOURNAL_SUFFIX}"
    earlier = await _recorded(client, pool.info, prompts, name, settings, routes=routes)
    if earlier is not None:
        if earlier.complete:
            # The earlier command ended before it could delete its journal.
            path.unlink(missing_ok=True)
            return Recording(prompts, earlier, earlier.num_recorded, 0.0)
        if not path.exists():
            raise OutputError(
                f"the reference {name!r} is not complete, and its answers are not in {path}: run the command in the "
                "folder that has this file, or delete the reference"
            )
    token_ids = await _tokenized(client, pool.info, prompts)
    _check_lengths(prompts, token_ids, settings.max_new_tokens, pool.info.max_model_len)
    plan = AnswersPlan(pool.info, client.model or pool.info.model, prompts, token_ids, settings)
    plan.check_bounds()
    with closing(Journal(path, plan)) as journal:
        _log.info("%s stores answers until the reference is complete; it has %d", path, journal.num_done)
        run = await measure(plan, pool, lambda _: journal, on_progress)
        answered = replace(prompts, answers=plan.answers(run.in_order()))
        recording = await record_reference(client, answered, name, routes=routes)
        journal.remove()
    return recording


async def _recorded(
    client: AsyncScoreClient, server: ServerInfo, prompts: Corpus, name: str, settings: AnswerSettings, *, routes: bool
) -> Reference | None:
    """Look up the reference of this name, which may be incomplete; None if there is none. OutputError if it has another
    model, other prompts or other settings."""
    # If the server has no folder for references, this fails before anything is generated.
    reference = next((reference for reference in await client.references() if reference.name == name), None)
    if reference is None:
        return None
    wanted = ReferenceAnswers(**settings.model_dump(), num_answers=prompts.num_rows)
    is_same_text = reference.corpus is not None and reference.corpus.sha256 == prompts.fingerprint
    is_same_model = reference.is_of(server) and not any(reference.other_stops(server))
    is_same_recording = reference.answers == wanted and (reference.routes is not None) == routes
    if not (is_same_text and is_same_recording and is_same_model):
        raise OutputError(
            f"there is already a reference {name!r} with another model, other prompts or other settings of answers or "
            "routes: delete it, or choose another name"
        )
    return reference


async def _tokenized(client: AsyncScoreClient, server: ServerInfo, prompts: Corpus) -> list[list[int]]:
    """The token ids of each prompt: a conversation is rendered by the chat template, a text tokenized as for
    completions."""

    async def tokens_of(row: int) -> list[int]:
        try:
            if prompts.documents:
                return await client.tokenize(prompts.documents[row])
            messages, tools = prompts.conversations[row].messages, prompts.conversations[row].tools
            if server.chat_template_fingerprint is None:
                # The server has no Jinja template, which `turns` needs, or is older.
                return await client.tokenize_messages(messages, tools, prompts.chat_template_kwargs)
            [sequence] = await client.turns(messages, tools, prompts.chat_template_kwargs, add_generation_prompt=True)
            return sequence["token_ids"]
        except BadRequestError as error:
            raise CorpusError(f"row {row + 1} of {prompts.name} cannot be a prompt: {error}") from error

    return await results_for_each(range(prompts.num_rows), tokens_of, at_once=TEXTS_AT_ONCE)


def _check_lengths(prompts: Corpus, token_ids: Sequence[Sequence[int]], max_new_tokens: int, context: int) -> None:
    for row, tokens in enumerate(token_ids, 1):
        if not tokens:
            raise CorpusError(f"row {row} of {prompts.name} is empty: a prompt needs at least one token")
        if len(tokens) + max_new_tokens > context:
            raise CorpusError(
                f"row {row} of {prompts.name} has {len(tokens)} tokens, which with {max_new_tokens} new ones "
                f"(--max-new-tokens) exceed the model's context of {context}: shorten it, or allow fewer new ones"
            )
