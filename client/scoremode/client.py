"""`AsyncScoreClient`: Scoremode's HTTP API from Python, over httpx.

`scripts/write_sync_client.py` writes `ScoreClient` from it. How answers are read is in `wire.calls`, which requests are
sent again in `wire.retries`.
"""

import asyncio
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self, Unpack

import httpx

from scoremode.results import KldResult, KldWindowValues, Score, kld_reader, parse_scores
from scoremode.windows import WindowSettings
from scoremode.wire import (
    MAX_CANDIDATES,
    Answers,
    Candidates,
    Continuations,
    CorpusInfo,
    Lane,
    Messages,
    PerplexityResponse,
    Prompt,
    Reference,
    ReferenceDeleted,
    ReferenceList,
    ReferenceWindows,
    ServedLayers,
    ServerInfo,
    Statistic,
    Text,
    TokenTexts,
    Tools,
    TurnSequence,
)
from scoremode.wire.calls import (
    BYTES_PER_BYTE,
    FIXED_BYTES,
    LISTING_BYTES,
    REFERENCE_BYTES,
    Answer,
    BytesReader,
    Call,
    call,
    stream,
)
from scoremode.wire.heads import end_head, watch
from scoremode.wire.requests import (
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT,
    MAX_POSITIONS,
    NEUTRAL_SAMPLING,
    OVERLAPS,
    VALUE_BYTES,
    DetokenizedText,
    OnWindow,
    connection_settings,
    info_path,
    kld_bytes,
    lane_request,
    most_tokens,
    origins_bytes,
    parse_answer,
    parse_token_texts,
    parse_turns,
    reference_path,
    scored_sequences,
    server_root,
    tokenization,
    window_reader,
)
from scoremode.wire.retries import Attempts, Retries


class AsyncScoreClient:
    """Client of a Scoremode server, for asyncio.

    Args:
        base_url: Address of the server, with or without `/v1`.
        model: Served model or LoRA adapter to ask for; the served model when left out.
        api_key: Sent as a bearer token; the environment's SCOREMODE_API_KEY when left out.
        timeout: Seconds to wait for the next byte of an answer.
        max_retries: Attempts after the first one, on 429, 502, 503, 504 and on dropped or refused connections.
        retry_for: Seconds since the first failure of a request for which it is sent again, in place of `max_retries`.
            An error of status 500, which a server gives while it dies, is then tried again a few times as well.
        transport: What carries the requests, in place of the network.

    Every method raises `TransportError` when no answer comes, an `APIStatusError` when the answer is an error, and
    `ResponseError` when the answer is not what the protocol says.

    Cancelling a call closes its connection, and the server then drops the request.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
        retry_for: float | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = server_root(base_url)
        self.address = str(httpx.URL(self.base_url).copy_with(userinfo=b""))
        """`base_url` without user and password, to be shown."""
        self.model = model
        self.retries = Retries(self.address, max_retries, retry_for)
        """May be changed while requests are under way."""
        self._http = httpx.AsyncClient(**connection_settings(api_key, timeout), transport=transport)

    def __repr__(self) -> str:
        model = "" if self.model is None else f", model={self.model!r}"
        return f"{type(self).__name__}({self.address!r}{model})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def send(self, call: Call[Answer]) -> Answer:
        """Send a request, again where that may help, and read its answer."""
        with Attempts(self.retries) as attempts:
            while True:
                reader = call.new_reader()
                try:
                    async with self._http.stream(
                        call.method, self.base_url + call.path, json=call.body, extensions={"trace": self._trace}
                    ) as response:
                        end_head(response)
                        receiver = call.receiver(response, reader)
                        async for chunk in response.aiter_bytes():
                            receiver.receive(chunk)
                        if response.is_success:
                            return reader.finish()
                    wait = attempts.wait_after_status(response, receiver.finish())
                except httpx.RequestError as error:
                    wait = attempts.wait_after_failure(error, can_restart=reader.can_restart)
                await asyncio.sleep(wait)

    async def _trace(self, event: str, info: dict[str, Any]) -> None:
        watch(event, info)

    async def info(self) -> ServerInfo:
        """Ask what the server runs: model, context length, special tokens, versions."""
        return await self.send(call("GET", info_path(self.model), ServerInfo.model_validate))

    async def score(
        self,
        prompt: Prompt,
        continuations: Continuations | None = None,
        *,
        add_special_tokens: bool = True,
        top_logprobs: int = 0,
        candidate_token_ids: Candidates | None = None,
        temperature: float | None = None,
        statistics: list[Statistic] | None = None,
        sinks: dict[str, Any] | None = None,
        logprobs_from: int | list[int] | None = None,
        return_ranks: bool = False,
        return_tokens: bool = False,
        use_cache: bool = True,
        lane: Lane = "prefill",
        context: int | None = None,
        model: str | None = None,
    ) -> list[Score]:
        """Score every token of one or several texts, or of their continuations: exact log-probabilities, in nats.

        Args:
            prompt: A text, several, the token ids of a text, or those of several.
            continuations: Score these instead, each after each prompt; or a list of them for each prompt.
            add_special_tokens: Let the tokenizer add its special tokens (BOS) to a text.
            top_logprobs: Return the k most likely tokens at every position, at most what the server's `--max-logprobs`
                allows, and 256.
            candidate_token_ids: Score these tokens too: a list for all positions; for a single prompt also a list for
                each position that is returned, for several such lists for each. All have as many tokens.
            temperature: T of the distribution that is scored, the softmax of logits / T; 1 when left out.
            statistics: Return figures of the whole distribution at every position, in `columns`: "entropy", and
                "std_logprob", the standard deviation of the logprobs under it.
            sinks: Return figures of packages that are installed on the server, in `columns`: by name, what each needs
                to know.
            logprobs_from: Return only positions from this one on; one for all prompts, or a list with one for each.
            return_ranks: Return the rank of every token in the vocabulary.
            return_tokens: Return every token as text.
            use_cache: Accept logprobs that were computed for an earlier request.
            lane: Feed as many tokens a step as fit, or one ("decode"), or as many as speculative decoding ("verify").
            context: In these other lanes, prefill at most this many tokens, and none whose step gives a logprob.
            model: In place of the client's.

        Returns:
            One score per prompt; with continuations one for each, those of the first prompt first.
        """
        sequences = scored_sequences(prompt, continuations)
        num_values = top_logprobs + len(statistics or ())
        # A sink's column may be as wide as candidates.
        num_values += MAX_CANDIDATES * ((candidate_token_ids is not None) + len(sinks or ()))
        return await self.send(
            call(
                "POST",
                "/v1/score",
                lambda body: parse_scores(body, sequences, logprobs_from or 0),
                # A continuation may be scored after many prompts.
                fixed_bytes=FIXED_BYTES + (BYTES_PER_BYTE + VALUE_BYTES * num_values) * most_tokens(sequences),
                model=model or self.model,
                prompt=prompt,
                continuations=continuations,
                add_special_tokens=add_special_tokens,
                top_logprobs=top_logprobs,
                candidate_token_ids=candidate_token_ids,
                temperature=temperature,
                statistics=statistics,
                sinks=sinks,
                logprobs_from=logprobs_from,
                return_ranks=return_ranks,
                return_tokens=return_tokens,
                use_cache=use_cache,
                **lane_request(lane, context),
                encoding_format="base64",
            )
        )

    async def perplexity(
        self,
        prompt: Text | None = None,
        *,
        texts: list[str] | None = None,
        on_window: OnWindow | None = None,
        lane: Lane = "prefill",
        context: int | None = None,
        model: str | None = None,
        **windows: Unpack[WindowSettings],
    ) -> PerplexityResponse:
        """Measure the perplexity of a text, or of several that share no context; the server cuts the windows.

        Args:
            prompt: One text, or its token ids.
            texts: Several texts, in place of `prompt`.
            on_window: An ordinary function, called with each window's NLL and the running perplexity as the server gets
                there.
            lane: As for `score`, with its `context`.
            model: In place of the client's.
            **windows: How the text is cut into windows: `WindowSettings` says which.

        The answer is streamed, so a long run does not time out. A connection lost after the first window is an error,
        not tried again.
        """
        return await self.send(
            stream(
                "/v1/perplexity",
                lambda: window_reader("perplexity", PerplexityResponse.model_validate, on_window),
                bytes_per_byte=OVERLAPS * BYTES_PER_BYTE,
                model=model or self.model,
                prompt=prompt,
                texts=texts,
                **lane_request(lane, context),
                **dict[str, Any]({"method": "sliding", **windows}),
            )
        )

    async def record_reference(
        self,
        name: str,
        prompt: Text | None = None,
        *,
        texts: list[str] | None = None,
        messages: Messages | list[Messages] | None = None,
        tools: Tools | list[Tools | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        labels: Sequence[str] | None = None,
        corpus: CorpusInfo | None = None,
        return_ranks: bool = False,
        layers: bool = False,
        answers: Answers | None = None,
        on_window: OnWindow | None = None,
        model: str | None = None,
        **windows: Unpack[WindowSettings],
    ) -> Reference:
        """Record the served model's distributions over a text, for other models to be compared with.

        Args:
            name: The reference's name.
            prompt: One text, or its token ids.
            texts: Several texts, in place of `prompt`.
            messages: Or conversations, whose turns are windows, with `tools` and `chat_template_kwargs` as for `turns`.
            labels: A label for each text or conversation, such as its language, kept with the reference.
            corpus: Where the text is from, kept with the reference.
            return_ranks: Have the logprobs and ranks of its targets in each window.
            layers: Record the residual stream at the boundaries of the decoder layers too, for `kld` to resume from.
            answers: In place of a text, prompts and the model's answers to them, whose tokens are scored.
            on_window: An ordinary function, called with each window as it is recorded, and the running perplexity.
            model: In place of the client's.
            **windows: As for `perplexity`.

        The answer is streamed. The server resumes an interrupted recording when the same request is sent again, as the
        client does when the connection is lost. `BadRequestError` or another `APIStatusError` says that there is
        another reference of that name.
        """
        return await self.send(
            stream(
                "/v1/references",
                # Sent again, the server reports only the windows that were missing.
                lambda: window_reader("reference", Reference.model_validate, on_window, repeatable=True),
                bytes_per_byte=OVERLAPS * BYTES_PER_BYTE,
                model=model or self.model,
                name=name,
                prompt=prompt,
                texts=texts,
                corpus=None if corpus is None else corpus.model_dump(exclude_none=True),
                return_ranks=return_ranks or None,
                layers=layers or None,
                answers=None if answers is None else answers.model_dump(),
                messages=messages,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                labels=labels and list(labels),
                **windows if messages is not None or answers is not None else {"method": "sliding", **windows},
            )
        )

    async def references(self) -> list[Reference]:
        """List all references of the server."""
        return await self.send(
            call(
                "GET",
                "/v1/references",
                lambda body: ReferenceList.model_validate(body).data,
                fixed_bytes=LISTING_BYTES,
            )
        )

    async def layers(self) -> ServedLayers:
        """Look up how the served model's decoder layers can be cut, and the free space for references.
        `BadRequestError` says why they cannot."""
        return await self.send(call("GET", "/v1/layers", ServedLayers.model_validate))

    async def reference(self, name: str) -> Reference:
        """Look up a reference."""
        return await self.send(call("GET", reference_path(name), Reference.model_validate, fixed_bytes=REFERENCE_BYTES))

    async def reference_windows(self, name: str) -> ReferenceWindows:
        """Look up where each window of a reference is from."""
        num_bytes = origins_bytes(await self.reference(name))
        return await self.send(
            call("GET", f"{reference_path(name)}/windows", ReferenceWindows.model_validate, fixed_bytes=num_bytes)
        )

    async def llama_cpp_base(self, name: str, first: int, write: Callable[[bytes], object]) -> None:
        """Fetch a reference as a base file of llama.cpp, from a window on; the first window comes after the header.

        Args:
            name: Name of a complete reference that was recorded with method `llama.cpp`.
            first: Index of the first window.
            write: Called with the file's bytes as they come; raises an exception if there are too many. A connection
                lost after the first is an error, not tried again.
        """
        await self.send(
            Call(
                "GET",
                f"{reference_path(name)}/llama.cpp?first={first}",
                lambda: BytesReader(write),
                fixed_bytes=sys.maxsize,
            )
        )

    async def delete_reference(self, name: str) -> None:
        """Delete a reference."""
        await self.send(call("DELETE", reference_path(name), ReferenceDeleted.model_validate))

    async def kld(
        self,
        reference: str,
        windows: tuple[int, int] | None = None,
        *,
        top_logprobs: int = 0,
        num_positions: int = MAX_POSITIONS,
        as_noise_floor: bool = False,
        from_boundary: int | None = None,
        on_window: Callable[[KldWindowValues], object] | None = None,
        lane: Lane = "prefill",
        context: int | None = None,
        model: str | None = None,
    ) -> KldResult:
        """Measure the served model's KL divergence from a reference, over the whole vocabulary at every position.

        Args:
            reference: Name of a complete reference.
            windows: The first window and the one after the last, from 0; all when left out.
            top_logprobs: Return the k most likely tokens of both models at every position, at most what the server's
                `--max-logprobs` allows, and 256.
            num_positions: The most that these windows have, at most 8,388,608: an answer with many more is refused.
            as_noise_floor: Keep the result with the reference as its noise floor in this lane; all windows, and the
                reference's own model.
            from_boundary: Replace the served model's residual stream by the reference's at this boundary of its decoder
                layers; 0 is before the first. The reference must be recorded with `layers`.
            on_window: An ordinary function, called with each window as it is done.
            lane: The served model's lane, as for `score`, with its `context`. References are of the prefill lane.
            model: In place of the client's.

        The answer is streamed. With `on_window`, a connection lost after the first window is an error, not tried again.
        """
        return await self.send(
            stream(
                "/v1/kld",
                lambda: kld_reader(on_window, windows),
                fixed_bytes=kld_bytes(windows, num_positions, top_logprobs),
                model=model or self.model,
                reference=reference,
                windows=None if windows is None else list(windows),
                top_logprobs=top_logprobs,
                as_noise_floor=as_noise_floor,
                encoding_format="base64",
                from_boundary=from_boundary,
                **lane_request(lane, context),
            )
        )

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text with the server's tokenizer."""
        return await self.send(tokenization(model=self.model, prompt=text, add_special_tokens=add_special_tokens))

    async def tokenize_messages(
        self,
        messages: Messages,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render a conversation with the served model's chat template, up to where the assistant answers, as token ids.
        The arguments are as for `turns`."""
        return await self.send(
            tokenization(model=self.model, messages=messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        )

    async def generate(
        self, prompt_token_ids: Sequence[int], max_new_tokens: int, *, seed: int | None = None
    ) -> tuple[list[int], str]:
        """Have the served model answer a prompt: greedily, or with a `seed` sampled at temperature 1.

        No other sampling parameter has an influence, whatever the model's generation_config.json says. The answer ends
        with an end-of-text token, which it has, or after `max_new_tokens`.

        Returns:
            The answer's token ids and its text.
        """
        return await self.send(
            call(
                "POST",
                "/v1/completions",
                lambda body: parse_answer(body, max_new_tokens),
                fixed_bytes=FIXED_BYTES + BYTES_PER_BYTE * max_new_tokens,
                model=self.model,
                prompt=list(prompt_token_ids),
                max_tokens=max_new_tokens,
                return_token_ids=True,
                temperature=0 if seed is None else 1,
                seed=seed,
                **NEUTRAL_SAMPLING,
            )
        )

    async def turns(
        self,
        messages: Messages | list[Messages],
        tools: Tools | list[Tools | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        roles: list[str] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> list[TurnSequence]:
        """Render conversations with the served model's chat template, and find their turns to score.

        Args:
            messages: One conversation or several.
            tools: Tools of all conversations, or a list for each.
            chat_template_kwargs: Passed to the template.
            roles: Roles of the turns to score; the assistant's when left out.
            add_generation_prompt: Render each conversation up to where the assistant answers, without turns.
        """
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        return await self.send(
            call(
                "POST",
                "/v1/turns",
                lambda body: parse_turns(body, len(conversations)),
                # A conversation has at most a sequence for each of its messages.
                bytes_per_byte=BYTES_PER_BYTE * max(map(len, conversations)),
                model=self.model,
                messages=messages,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                roles=roles,
                # A server that is older than this field refuses it.
                add_generation_prompt=add_generation_prompt or None,
            )
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text with the server's tokenizer."""
        return await self.send(
            call(
                "POST",
                "/detokenize",
                lambda body: DetokenizedText.model_validate(body).prompt,
                model=self.model,
                tokens=list(token_ids),
            )
        )

    async def token_texts(self, token_ids: Collection[int]) -> TokenTexts:
        """Look up the text of single tokens, by id. A token that ends within a character has U+FFFD for it, and its
        bytes in `contents`."""
        wanted = sorted(set(token_ids))
        return await self.send(
            call("POST", "/v1/tokens", lambda body: parse_token_texts(body, wanted), model=self.model, token_ids=wanted)
        )
