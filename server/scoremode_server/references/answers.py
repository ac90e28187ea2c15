"""Cuts the windows of a model's own answers to prompts, and counts how many tokens of each answer another model agrees
with."""

from scoremode.kld import KldPositions, agreement_lengths, of_answers
from scoremode.windows import Window
from scoremode.wire.references import Answers, ReferenceRequest
from scoremode_server.errors import RequestError
from scoremode_server.references.files.directory import StoredReference
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.text_windows import TextDocument, TextWindows

_OTHER_TEXTS = ("prompt", "texts", "messages", "method", "context_length", "stride", "max_tokens", "add_special_tokens")


def answer_windows(request: ReferenceRequest, answers: Answers, limits: Limits) -> TextWindows:
    """Cut one window per answer that has tokens: its prompt and the whole answer. RequestError if the request has
    another text too, or no answer has a token."""
    if others := [name for name in _OTHER_TEXTS if name in request.model_fields_set]:
        raise RequestError(f"{others[0]} cannot be given with answers", others[0])
    limits.check_num_sequences(len(answers.data), "answers")
    documents = []
    for index, answer in enumerate(answers.data):
        token_ids, first = [*answer.prompt_token_ids, *answer.token_ids], len(answer.prompt_token_ids)
        limits.check_sequence(token_ids, f"answers[{index}]")
        windows = [Window(0, len(token_ids), first)] if answer.token_ids else []
        documents.append(TextDocument(token_ids, None, windows, index, ["assistant"] * len(windows)))
    texts = TextWindows("conversation", limits.max_model_len, limits.max_model_len, documents)
    if not texts.windows:
        raise RequestError(f"answers: none of the {len(documents)} answers has a token to score", "answers")
    return texts


def agreement(reference: StoredReference, positions: KldPositions) -> list[int] | None:
    """Count each answer's tokens before the first that is not the served model's top token. `positions` has the figures
    of all targets of the reference. None if the reference has no greedy answers."""
    answers, text = reference.manifest.answers, reference.text
    if answers is None or not answers.are_greedy:
        return None
    sizes = text.num_tokens - text.num_context
    lengths = agreement_lengths(positions.top_token_ids == positions.token_ids, sizes)
    return of_answers(lengths, text.origins[:, 0].tolist(), answers.num_answers)
