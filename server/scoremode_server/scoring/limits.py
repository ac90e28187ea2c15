"""Checks a request against the server's limits, before the engine gets it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scoremode.wire.protocol import MAX_TOP_LOGPROBS
from scoremode_server.errors import RequestError, TooLargeError
from scoremode_server.settings import MAX_REQUEST_BYTES, MAX_SEQUENCES

MAX_VALUES = {"base64": 2**26, "float": 2**23}
"""Limit on logprobs in an answer, by encoding. In base64 they take 512 MiB with their token ids; as `float` each is a
Python object. Completions are written from arrays, so the limit of `base64` applies."""

MAX_VALUES_PER_SEQUENCE = 2**24
"""Limit on logprobs of one sequence. On the device they take 128 MiB with their token ids."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server. Each check raises RequestError, or TooLargeError, if a limit is exceeded."""

    max_model_len: int
    vocab_size: int
    max_top_logprobs: int
    max_sequences: int
    """Sequences per request."""
    max_request_bytes: int

    @classmethod
    def from_model(
        cls, model: Any, max_sequences: int = MAX_SEQUENCES, max_request_bytes: int = MAX_REQUEST_BYTES
    ) -> "Limits":
        """The limits that follow from vLLM's `ModelConfig` and from the server's flags."""
        max_top = MAX_TOP_LOGPROBS if model.max_logprobs == -1 else min(MAX_TOP_LOGPROBS, model.max_logprobs)
        vocab_size = model.get_vocab_size()
        return cls(model.max_model_len, vocab_size, min(max_top, vocab_size), max_sequences, max_request_bytes)

    def check_num_sequences(self, num_sequences: int, field: str) -> None:
        """Check the number of prompts, of continuations of all prompts together, or of windows."""
        if num_sequences > self.max_sequences:
            raise RequestError(
                f"the request has {num_sequences} sequences to score, more than {self.max_sequences} "
                "(--max-request-sequences)",
                field,
            )

    def check_sequence(self, token_ids: Sequence[int], name: str) -> None:
        """Check the tokens of a sequence; `name` is its place in the request, such as `prompt[1]`."""
        if not token_ids:
            raise RequestError(f"{name} is empty: there is no token to score", name.partition("[")[0])
        self.check_length(len(token_ids), name)
        self.check_vocabulary(token_ids, name)

    def check_length(self, num_tokens: int, name: str) -> None:
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"{name} has {num_tokens} tokens, but the model takes at most {self.max_model_len} "
                "(POST /v1/perplexity cuts texts of any length into windows)",
                name.partition("[")[0],
            )

    def check_vocabulary(self, token_ids: Sequence[int], name: str) -> None:
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{name} has token id {token_id}, outside the vocabulary of {self.vocab_size} tokens",
                    name.partition("[")[0],
                )

    def check_token_list(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) > self.vocab_size:
            raise RequestError(
                f"token_ids has {len(token_ids)} tokens, more than the vocabulary's {self.vocab_size}", "token_ids"
            )
        self.check_vocabulary(token_ids, "token_ids")

    def check_top_logprobs(self, top_logprobs: int) -> None:
        if top_logprobs > self.max_top_logprobs:
            raise RequestError(
                f"top_logprobs: {top_logprobs} exceeds this server's limit of {self.max_top_logprobs} (--max-logprobs)",
                "top_logprobs",
            )

    def check_num_values(
        self, num_values: Sequence[int], encoding_format: str = "base64", field: str = "prompt"
    ) -> None:
        """Check how many logprobs each sequence has in the answer, including top tokens and candidates."""
        limit, largest = MAX_VALUES[encoding_format], max(num_values, default=0)
        if sum(num_values) > limit:
            raise TooLargeError(
                f"the answer would have {sum(num_values)} logprobs with top tokens and candidates, more than "
                f"{limit} in {encoding_format}: request fewer sequences or top tokens at once",
                field,
            )
        if largest > MAX_VALUES_PER_SEQUENCE:
            raise TooLargeError(
                f"a sequence would have {largest} logprobs with top tokens and candidates, more than "
                f"{MAX_VALUES_PER_SEQUENCE}: request fewer top tokens or candidates",
                field,
            )
