"""The texts of tokens, decoded once per token of the vocabulary."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache

import numpy as np
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from scoremode_server.vllm_patches.output_processor import INCOMPLETE, decode_within_character

CONTEXT = 4
"""Tokens before a position in which vLLM looks for the start of a character, without a prompt's first token."""


class TokenStrings:
    """A table of each token's text alone. `get_tokenizer` raises if the server has no tokenizer.

    Attributes:
        first_of_a_prompt: the text of a prompt's first token, which vLLM decodes as the start of a text.
    """

    def __init__(self, get_tokenizer: Callable[[], TokenizerLike]) -> None:
        self._get_tokenizer = get_tokenizer
        self._texts: dict[int, str] = {}
        self.first_of_a_prompt = cache(lambda token_id: get_tokenizer().decode(token_id))
        self._completed = lru_cache(maxsize=2**16)(
            lambda token_id, context: decode_within_character(get_tokenizer(), token_id, context)
        )

    def fill_vocabulary(self) -> None:
        """Fill the whole table, which takes some 3 µs per token."""
        self._fill(self._get_tokenizer().get_vocab().values())

    def _fill(self, token_ids: Iterable[int]) -> None:
        # A difference of sets would go through the whole table.
        missing = [token_id for token_id in set(token_ids) if token_id not in self._texts]
        if missing:
            self._texts.update(zip(missing, convert_ids_list_to_tokens(self._get_tokenizer(), missing), strict=True))

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token alone."""
        self._fill(token_ids)
        return [self._texts[token_id] for token_id in token_ids]

    def texts_within(
        self, prompt: Sequence[int], start: int, ids: np.ndarray, places: Sequence[int]
    ) -> list[tuple[int, str]]:
        """For ids [rows, columns] at positions from `start` of a prompt: the places of tokens that end within a
        character, and the text that each completes with the tokens before it, which may be empty."""
        num_columns = ids.shape[1]
        contexts = {row: self._context(prompt, start + row) for row in {place // num_columns for place in places}}
        # After a complete character there is nothing to complete.
        return [
            (place, self._completed(token_id, context) if (context := contexts[place // num_columns]) else "")
            for place, token_id in zip(places, ids.ravel()[places].tolist(), strict=True)
        ]

    def _context(self, prompt: Sequence[int], position: int) -> tuple[int, ...]:
        """The tokens before a position that may be part of its character."""
        context = prompt[max(1, position - CONTEXT) : position]
        for index in range(len(context), 0, -1):
            (text,) = self.texts_of(context[index - 1 : index])
            if text and not text.endswith(INCOMPLETE):
                return tuple(context[index:])
        return tuple(context)
