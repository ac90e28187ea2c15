"""Plans and checks recordings: what is stored about a text, whether a reference on disk is the same one, and whether
layers can be measured. Servers and recorders without vLLM share this, so it does not import vLLM."""

from collections.abc import Sequence

import numpy as np

from scoremode.wire.references import LayerBlock, ReferenceLayers
from scoremode_server.errors import ConflictError
from scoremode_server.references.files.directory import StoredReference, StoredText
from scoremode_server.references.files.manifest import Manifest, TextPlan, text_fingerprint
from scoremode_server.scoring.text_windows import TextWindows

LARGEST_FLOOR = 1e-3
"""Nats by which a resumed float32 model may diverge from itself, because it rounds in another place. A wrongly cut
stream gives tenths of a nat."""
LARGEST_FLOOR_16_BITS = 1e-2
"""`LARGEST_FLOOR` for models in 16 bits."""
LARGEST_SHARE = 0.01
"""The same limit as a share of the divergence of the model that is fed other tokens and not resumed. Where that is
small, even a wrongly cut stream gives little."""


def plan_texts(texts: TextWindows, labels: list[str] | None) -> tuple[StoredText, TextPlan]:
    """Collect what a reference stores about texts and their windows."""
    places = {label: place for place, label in enumerate(dict.fromkeys(labels or ()))}
    roles = list(dict.fromkeys(role for document in texts.documents for role in document.roles))
    origins = [
        (
            document.index,
            places[labels[document.index]] if labels else -1,
            roles.index(document.roles[place]) if document.roles else -1,
        )
        for document in texts.documents
        for place in range(len(document.windows))
    ]
    documents = [(document.token_ids, document.windows) for document in texts.documents]
    text = StoredText.from_documents(documents, origins)
    plan = TextPlan(
        fingerprint=text_fingerprint(text.token_ids, text.windows, texts.method),
        method=texts.method,
        context_length=texts.context_length,
        stride=texts.stride,
        num_tokens=len(text.token_ids),
        num_windows=len(text.windows),
        num_scored=sum(window.num_scored for window in texts.windows),
        num_bytes=texts.num_bytes,
        num_words=texts.num_words,
        labels=list(places),
        roles=roles,
    )
    return text, plan


def check_same(reference: StoredReference, new: Manifest, text: StoredText) -> None:
    """ConflictError if a reference on disk, whose text has been read, is not the one that `new` and `text` describe, so
    that its recording cannot be resumed."""
    stored, there_is = reference.manifest, f"there is a reference {reference.name!r} already,"
    if not new.model.may_continue(stored.model):
        raise ConflictError(f"{there_is} of another model", "name")
    if bool(new.model.vllm_version) != bool(stored.model.vllm_version):
        raise ConflictError(f"{there_is} recorded with {stored.model.engine}, and this is {new.model.engine}", "name")
    if stored.text.fingerprint != new.text.fingerprint:
        hint = " (a chat template that writes the date renders another text each day)"
        raise ConflictError(
            f"{there_is} of another text or other windows{hint if new.text.method == 'conversation' else ''}", "name"
        )
    if stored.text.labels != new.text.labels or not np.array_equal(reference.text.origins, text.origins):
        raise ConflictError(f"{there_is} of this text with other labels", "labels")
    if stored.answers != new.answers:
        raise ConflictError(f"{there_is} of other answers, or of none", "answers")
    if _blocks(stored.layers) != _blocks(new.layers):
        recorded = "without layers" if stored.layers is None else "with other layers, or with layers"
        raise ConflictError(f"{there_is} recorded {recorded}: delete it, or choose another name", "layers")
    if stored.routes != new.routes:
        recorded = "without" if stored.routes is None else "with"
        raise ConflictError(f"{there_is} recorded {recorded} routes: delete it, or choose another name", "routes")


def flaw_of_cuts(layers: ReferenceLayers, dtype: str, floor: Sequence[float], not_resumed: float) -> str:
    """Why the layers after a boundary do not follow from the stream there; empty if they do. `floor` says how far, in
    nats, a model is from itself if it is fed other tokens and resumed from each boundary, and `not_resumed` how far if
    it is not resumed."""
    largest = LARGEST_FLOOR_16_BITS if "16" in dtype else LARGEST_FLOOR
    if max(floor) <= (limit := min(largest, LARGEST_SHARE * not_resumed)):
        return ""
    return (
        f"{layers.layer_class} cannot be measured: resumed from boundary {int(np.argmax(floor))}, the model is "
        f"{max(floor):.3g} nats away from itself, more than {limit:g}"
    )


def _blocks(layers: ReferenceLayers | None) -> list[LayerBlock] | None:
    return None if layers is None else layers.blocks
