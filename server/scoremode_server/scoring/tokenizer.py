"""Encodes and decodes text with the server's tokenizer."""

from collections.abc import Sequence
from typing import Any, Literal

from vllm.inputs import TextPrompt, TokensPrompt
from vllm.renderers import TokenizeParams
from vllm.renderers.base import BaseRenderer
from vllm.tokenizers import TokenizerLike

from scoremode_server.errors import RequestError
from scoremode_server.scoring.token_strings import TokenStrings


class Tokenizer:
    """Encodes and decodes in the threads of vLLM's renderer."""

    def __init__(self, renderer: BaseRenderer) -> None:
        self._renderer = renderer
        self.strings = TokenStrings(self._tokenizer)

    async def encode(self, text: str | list[int], add_special_tokens: bool) -> list[int]:
        """Token ids of a text of any length; token ids as they are."""
        if not isinstance(text, str):
            return text
        (token_ids,) = await self.encode_all([text], add_special_tokens)
        return token_ids

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self._tokenizer()
        params = TokenizeParams(max_total_tokens=None, add_special_tokens=add_special_tokens)
        encoded = await self._renderer.tokenize_prompts_async([TextPrompt(prompt=text) for text in texts], params)
        return [list(prompt["prompt_token_ids"]) for prompt in encoded]

    async def encode_continuations(
        self, context: str, continuations: Sequence[str], add_special_tokens: bool
    ) -> tuple[int, list[list[int]]]:
        """(number of tokens of the context, token ids of the context with each continuation), as in lm-eval: white
        space at the context's end moves to the continuations, both are encoded as one text, and the continuation begins
        after as many tokens as the context has alone.
        """
        stripped = context.rstrip()
        moved = context[len(stripped) :]
        texts = [stripped, *(stripped + moved + continuation for continuation in continuations)]
        alone, *joined = await self.encode_all(texts, add_special_tokens)
        return len(alone), joined

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        self._tokenizer()
        params = TokenizeParams(max_total_tokens=None, needs_detokenization=True)
        decoded = await self._renderer.tokenize_prompt_async(TokensPrompt(prompt_token_ids=list(token_ids)), params)
        return str(decoded["prompt"])

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        if self._renderer.tokenizer is None:
            raise RequestError("this server has no tokenizer, so it knows no token's text", "token_ids")
        return self.strings.texts_of(token_ids)

    def special_token_id(self, name: Literal["bos", "eos"]) -> int | None:
        token_id: int | None = getattr(self._renderer.tokenizer, f"{name}_token_id", None)
        return token_id

    async def adds_bos(self) -> bool:
        """Whether the tokenizer puts BOS before a text."""
        bos = self.special_token_id("bos")
        return bos is not None and (await self.encode("", add_special_tokens=True))[:1] == [bos]

    def _tokenizer(self) -> TokenizerLike:
        tokenizer = self._renderer.tokenizer
        if tokenizer is None:
            raise RequestError("this server has no tokenizer: send token ids, not text", "prompt")
        return tokenizer


def as_prompts(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    """OpenAI's four shapes of a prompt as a list of texts or token lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty: there is no token to score", "prompt")
    items: list[Any] = list(prompt)
    return [items] if isinstance(items[0], int) else items
