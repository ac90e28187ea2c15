"""Makes the parts of a finished run's JSON and arrays that perplexity and KL divergence share."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from textwrap import shorten
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from scoremode._texts import model_name
from scoremode._version import __version__
from scoremode.runs.conversations import token_classes
from scoremode.wire import Reference, ServedModel, ServerInfo, TokenTexts, WindowOrigins

RECORD_VERSION = 1
"""Version of the JSON of every `kind` of run. A version may gain fields; no field is removed or gets a new meaning."""

Arrays = dict[str, NDArray[Any]]
"""Arrays of a run by name."""


def weights_in_words(model: ServedModel) -> str:
    words = f"{model.quantization or 'not quantized'}, {model.dtype}"
    # The dtype of the checkpoint's other tensors says little about quantized weights.
    if model.quantization is not None or model.stored_dtype in (None, model.dtype):
        return words
    return f"{words} (stored in {model.stored_dtype})"


def reference_in_words(reference: Reference) -> str:
    """The weights of a reference's model, its revision, and the library that computed it if that is not vLLM."""
    revision = reference.revision and f"revision {reference.revision}"
    library = None if reference.vllm_version else f"computed by {reference.engine}"
    return ", ".join(filter(None, (weights_in_words(reference), revision, library)))


def chat_differences(label: str, server: ServedModel, reference: Reference) -> Iterator[str]:
    """Yield reasons why chat answers of a served model differ from the recorded model's even if logits are equal."""
    if reference.method != "conversation":
        return
    original = model_name(reference.model)
    missing, added = (
        shorten(", ".join(map(str, stops)), 100, placeholder=" ...") for stops in reference.other_stops(server)
    )
    if missing:
        yield (
            f"{label} continues after token {missing}, where {original} stops: "
            "its generation_config.json and tokenizer lack these EOS ids."
        )
    if added:
        yield f"{label} stops after token {added}, where {original} continues, by its EOS ids."
    if len({reference.chat_template_fingerprint, server.chat_template_fingerprint, None}) > 2:
        yield (
            f"{label} has another chat template than {original}: if it renders prompts differently, answers in chats "
            "differ from the beginning, which figures on the same tokens do not show."
        )


def origin_arrays(origins: WindowOrigins | None, run_arrays: Arrays, token_texts: Mapping[int, str]) -> Arrays:
    """Arrays with the sources of a run's windows, and the classes of targets if texts of tokens are given."""
    if origins is None:
        return {}
    arrays: Arrays = {"window_contexts": np.array(origins.num_context, np.int32)}
    if origins.documents[-1] or origins.roles:
        arrays["window_documents"] = np.array(origins.documents, np.int32)
    if origins.labels is not None:
        names = {name: index for index, name in enumerate(dict.fromkeys(origins.labels))}
        arrays["window_labels"] = np.array([names[label] for label in origins.labels], np.int32)
    if origins.roles and token_texts:
        sizes = run_arrays["window_sizes"].tolist()
        arrays["classes"] = token_classes(run_arrays["token_ids"], sizes, origins.roles, token_texts)
    return arrays


def record_beginning(kind: str, urls: Sequence[str], model: str, server: ServerInfo) -> dict[str, object]:
    return {
        "kind": kind,
        "version": RECORD_VERSION,
        "client_version": __version__,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "urls": [str(httpx.URL(url).copy_with(userinfo=b"")) for url in urls],
        "model": model_name(model),
        "server": server.model_dump(exclude={"bounds"}),
    }


def record_end(texts: TokenTexts, origins: WindowOrigins | None) -> dict[str, object]:
    """The texts and bytes of a run's tokens by their ids, and the labels and prompts of its windows."""
    by_id = {"token_texts": texts, "token_bytes": texts.contents}
    record: dict[str, object] = {
        name: {str(token): text for token, text in values.items()} for name, values in by_id.items()
    }
    if origins is not None and origins.labels is not None:
        record["labels"] = list(dict.fromkeys(origins.labels))
    if origins is not None and origins.prompts is not None and texts:
        record["prompts"] = [texts.joined(prompt) for prompt in origins.prompts]
    return record
