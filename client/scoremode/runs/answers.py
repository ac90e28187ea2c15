"""A served model's own answers to prompts, recorded as a reference: what `ppl-client record --prompts` runs, as a
library."""

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
"""Bytes of the request that records all answers, whatever the server takes: their prompts are read again later."""
OTHER_BYTES = 4096
"""The part of that request for names and settings."""
LISTS_PER_ANSWER = 3
"""Lists and objects in JSON."""


@dataclass(frozen=True, slots=True)
class AnswersPlan:
    """The prompts that a model answers, as the journal has them."""

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
        """Nothing: an answer is not scored yet."""
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
        """Bytes that the request with all answers may have."""
        return min(self.server.bounds.recording_bytes, MAX_RECORDING_BYTES)

    @property
    def most_needed(self) -> int:
        """Bytes of the longest request that the answers can make, without their texts."""
        num_new = len(self.prompts) * self.settings.max_new_tokens
        token_bytes = len(f"{self.server.vocab_size},")
        return self._num_bytes(self._joined([([], "")] * len(self.prompts))) + num_new * token_bytes

    def answers(self, generated: Sequence[GeneratedAnswer]) -> Answers:
        """The answers to all prompts, as they are recorded: without their texts, which are only kept, if the request
        would be too long with them."""
        answers = self._joined((each.token_ids, each.text) for each in generated)
        if self._num_bytes(answers) <= self.most_bytes:
            return answers
        _log.warning("the answers are recorded without their texts, which are too long for one request")
        return self._joined((each.token_ids, "") for each in generated)

    def check_bounds(self) -> None:
        """Make sure that a reference can have all answers, however long they are. CorpusError if it cannot."""
        bounds, num_prompts = self.server.bounds, len(self.prompts)
        # A list for the answers in an object.
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
                "ask for shorter answers (--max-new-tokens), or start the server with a larger --max-request-bytes"
            )

    def _joined(self, answers: Iterable[tuple[list[int], str]]) -> Answers:
        """The prompts with answers as token ids and texts."""
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
    concurrency: int | None = None,
    folder: Path = Path(),
    on_progress: OnProgress | None = None,
) -> Recording:
    """Have a served model answer prompts, and record its distributions over the answers' tokens.

    Args:
        client: Of one server, as for `record_reference`.
        prompts: Conversations or documents, from `load_prompts`.
        name: Of the reference.
        settings: How the answers are generated.
        concurrency: Prompts in flight at once; by default as many as the server runs sequences at once.
        folder: Keeps a journal of the answers until the reference is complete, from which the same call resumes.
        on_progress: Called for each answer that is generated, which takes most of the time.

    Raises:
        ScoremodeError: a prompt cannot be answered within the model's context, or one recording cannot have all
            answers, which is found before any answer is generated; the journal or the reference of that name is of
            something else; or as in `record_reference`.
    """
    pool = await Pool.connect(client, concurrency)
    path = folder / f"{name}.answers{JOURNAL_SUFFIX}"
    earlier = await _recorded(client, pool.info, prompts, name, settings)
    if earlier is not None:
        if earlier.complete:
            # Left by a command that ended before it could.
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
        _log.info("answers are kept in %s until the reference is complete; it has %d", path, journal.num_done)
        run = await measure(plan, pool, lambda _: journal, on_progress)
        answered = replace(prompts, answers=plan.answers(run.in_order()))
        recording = await record_reference(client, answered, name)
        journal.remove()
    return recording


async def _recorded(
    client: AsyncScoreClient, server: ServerInfo, prompts: Corpus, name: str, settings: AnswerSettings
) -> Reference | None:
    """The reference, if the server has it, perhaps not complete. OutputError if there is another of that name."""
    # Fails before anything is generated if the server has no folder for references.
    reference = next((each for each in await client.references() if each.name == name), None)
    if reference is None:
        return None
    wanted = ReferenceAnswers(**settings.model_dump(), num_answers=prompts.num_rows)
    is_same_text = reference.corpus is not None and reference.corpus.sha256 == prompts.fingerprint
    is_same_model = reference.is_of(server) and not any(reference.other_stops(server))
    if not (is_same_text and reference.answers == wanted and is_same_model):
        raise OutputError(
            f"there is a reference {name!r} already, of another model, other prompts or other settings of answers: "
            "delete it, or take another name"
        )
    return reference


async def _tokenized(client: AsyncScoreClient, server: ServerInfo, prompts: Corpus) -> list[list[int]]:
    """The token ids of each prompt: a conversation's by the chat template, a text's as completions have them."""

    async def tokens_of(row: int) -> list[int]:
        try:
            if prompts.documents:
                return await client.tokenize(prompts.documents[row])
            messages, tools = prompts.conversations[row].messages, prompts.conversations[row].tools
            if server.chat_template_fingerprint is None:
                # Without a Jinja template, or older.
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
                f"(--max-new-tokens) exceed the model's context of {context}: shorten it, or ask for fewer"
            )
