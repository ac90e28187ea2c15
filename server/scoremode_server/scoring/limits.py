"""The bounds of every request to a server, which are checked before the engine gets it."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.config import ModelConfig

from scoremode.wire.protocol import MAX_TOP_LOGPROBS
from scoremode_server.errors import RequestError, TooLargeError
from scoremode_server.settings import MAX_REQUEST_BYTES, MAX_SEQUENCES

MAX_VALUES = {"base64": 2**26, "float": 2**23}
"""Logprobs in an answer. They take 512 MiB with their token ids; `float` makes an object of each. Completions, which
are written from arrays too, have the bound of `base64`."""

MAX_SEQUENCE_VALUES = 2**24
"""Logprobs of one sequence. They take 128 MiB with their token ids on the device."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one served model. Each check refuses what is outside."""

    max_model_len: int
    vocab_size: int
    max_top_logprobs: int
    max_sequences: int
    """Of one request."""
    max_request_bytes: int

    @classmethod
    def from_model(
        cls, model: ModelConfig, max_sequences: int = MAX_SEQUENCES, max_request_bytes: int = MAX_REQUEST_BYTES
    ) -> "Limits":
        """The bounds that the server's flags set."""
        allowed = MAX_TOP_LOGPROBS if model.max_logprobs == -1 else min(MAX_TOP_LOGPROBS, model.max_logprobs)
        vocab_size = model.get_vocab_size()
        return cls(model.max_model_len, vocab_size, min(allowed, vocab_size), max_sequences, max_request_bytes)

    def check_num_sequences(self, num_sequences: int, field: str) -> None:
        """Check the number of prompts, of continuations of all prompts together, or of windows."""
        if num_sequences > self.max_sequences:
            raise RequestError(
                f"the request has {num_sequences} sequences to score, more than {self.max_sequences} "
                "(--max-request-sequences)",
                field,
            )

    def check_sequence(self, token_ids: Sequence[int], name: str) -> None:
        """`name` is its place in the request, such as `prompt[1]`."""
        if not token_ids:
            raise RequestError(f"{name} is empty: there is no token to score", name.partition("[")[0])
        self.check_length(len(token_ids), name)
        self.check_vocabulary(token_ids, name)

    def check_length(self, num_tokens: int, name: str) -> None:
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"{name} has {num_tokens} tokens, but the model takes at most {self.max_model_len}",
                name.partition("[")[0],
            )

    def check_vocabulary(self, token_ids: Sequence[int], name: str) -> None:
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{name} has token id {token_id}, outside the vocabulary of {self.vocab_size} tokens",
                    name.partition("[")[0],
                )

    def check_single_tokens(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) > self.vocab_size:
            raise RequestError(
                f"token_ids has {len(token_ids)} tokens, and the vocabulary has {self.vocab_size}", "token_ids"
            )
        self.check_vocabulary(token_ids, "token_ids")

    def check_top_logprobs(self, top_logprobs: int) -> None:
        if top_logprobs > self.max_top_logprobs:
            raise RequestError(
                f"top_logprobs: {top_logprobs} exceeds this server's limit of {self.max_top_logprobs} (--max-logprobs)",
                "top_logprobs",
            )

    def check_num_values(
        self, of_sequences: Sequence[int], encoding_format: str = "base64", field: str = "prompt"
    ) -> None:
        """The logprobs of an answer, top tokens and candidates included, in all and for each sequence."""
        most, largest = MAX_VALUES[encoding_format], max(of_sequences, default=0)
        if sum(of_sequences) > most:
            raise TooLargeError(
                f"the answer would have {sum(of_sequences)} logprobs with top tokens and candidates, and may have "
                f"at most {most} in {encoding_format}: request fewer sequences or top tokens at once",
                field,
            )
        if largest > MAX_SEQUENCE_VALUES:
            raise TooLargeError(
                f"a sequence would have {largest} logprobs with top tokens and candidates, and may have at most "
                f"{MAX_SEQUENCE_VALUES}: request fewer per position",
                field,
            )
