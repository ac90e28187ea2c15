"""`ScoreClient`, generated from `client.py` by `python scripts/write_sync_client.py`. Do not edit it."""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Self, Unpack

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


class ScoreClient:
    """Client of a Scoremode server.

    Args:
        base_url: Address of the server, with or without `/v1`.
        model: Name of the served model or of a LoRA adapter; the server's default model when left out.
        api_key: Sent as a bearer token; the environment's SCOREMODE_API_KEY when left out.
        timeout: Seconds to wait for the next byte of an answer.
        max_retries: Attempts after the first one, on 429, 502, 503, 504 and on dropped or refused connections.
        retry_for: Keep retrying for this many seconds after a request's first failure, instead of counting
            `max_retries`. A status 500, which a dying server gives, is then also retried a few times.
        transport: An httpx transport in place of the network.

    Every method raises `TransportError` when no answer comes, an `APIStatusError` when the answer is an error, and
    `ResponseError` when the answer does not follow the protocol.
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = server_root(base_url)
        self.address = str(httpx.URL(self.base_url).copy_with(userinfo=b""))
        """`base_url` without user and password, for messages."""
        self.model = model
        self.retries = Retries(self.address, max_retries, retry_for)
        """Limits on retries, which you may change while requests are in flight."""
        self._http = httpx.Client(**connection_settings(api_key, timeout), transport=transport)

    def __repr__(self) -> str:
        model = "" if self.model is None else f", model={self.model!r}"
        return f"{type(self).__name__}({self.address!r}{model})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def send(self, call: Call[Answer]) -> Answer:
        """Send a request, with retries if they may help, and read its answer."""
        with Attempts(self.retries) as attempts:
            while True:
                reader = call.new_reader()
                try:
                    with self._http.stream(
                        call.method, self.base_url + call.path, json=call.body, extensions={"trace": self._trace}
                    ) as response:
                        end_head(response)
                        receiver = call.receiver(response, reader)
                        for chunk in response.iter_bytes():
                            receiver.receive(chunk)
                        if response.is_success:
                            return reader.finish()
                    wait = attempts.wait_after_status(response, receiver.finish())
                except httpx.RequestError as error:
                    wait = attempts.wait_after_failure(error, can_restart=reader.can_restart)
                time.sleep(wait)

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        watch(event, info)

    def info(self) -> ServerInfo:
        """Ask what the server runs: model, context length, special tokens, versions."""
        return self.send(call("GET", info_path(self.model), ServerInfo.model_validate))

    def score(
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
            prompt: One text or several, as strings or as token ids.
            continuations: Texts or ids to score instead of the prompts: one list for all prompts, or one per prompt.
            add_special_tokens: Let the tokenizer add its special tokens (BOS) to a text.
            top_logprobs: Return the k most likely tokens at every position. k is at most 256, and at most the server's
                `--max-logprobs`.
            candidate_token_ids: Tokens to score at every position in addition to the text's: one list for all
                positions. For a single prompt, it may also be one list per returned position; for several prompts, a
                list of such lists per prompt. All lists must have the same length.
            temperature: T of the scored distribution, softmax(logits / T); 1 when left out.
            statistics: Return figures of the whole distribution at every position, in `Score.columns`: "entropy", and
                "std_logprob", the standard deviation of the logprobs under this distribution.
            sinks: Settings of sinks, by name. A sink is code in a package on the server that computes more figures at
                every position; they are returned in `Score.columns`.
            logprobs_from: First position to return, from 0: one for all prompts, or a list with one per prompt.
            return_ranks: Return each scored token's rank in the vocabulary, 1 for the most likely.
            return_tokens: Return every token as text.
            use_cache: Accept logprobs that were computed for an earlier request.
            lane: How many tokens of a sequence one engine step takes: as many as fit ("prefill"), one ("decode"), or as
                many as speculative decoding verifies at once ("verify").
            context: For "decode" and "verify": prefill at most this many tokens. Returned logprobs never come from the
                prefill step.
            model: Model to use in place of the client's.

        Returns:
            One score per prompt, or one per continuation, in the order of prompts.
        """
        sequences = scored_sequences(prompt, continuations)
        num_values = top_logprobs + len(statistics or ())
        # A sink may return up to MAX_CANDIDATES numbers per position.
        num_values += MAX_CANDIDATES * ((candidate_token_ids is not None) + len(sinks or ()))
        return self.send(
            call(
                "POST",
                "/v1/score",
                lambda body: parse_scores(body, sequences, logprobs_from or 0),
                # The limit grows with the scored tokens, not the request: one continuation may follow many prompts.
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

    def perplexity(
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
            on_window: A synchronous function, called with each window's NLL and the running perplexity.
            lane: As for `score`; likewise `context`.
            model: Model to use in place of the client's.
            **windows: The fields of `WindowSettings`, which set how the text is cut into windows.

        The answer is streamed, so a long run does not time out. A connection lost after the first window is an error
        without a retry.
        """
        return self.send(
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

    def record_reference(
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
        routes: bool = False,
        answers: Answers | None = None,
        on_window: OnWindow | None = None,
        model: str | None = None,
        **windows: Unpack[WindowSettings],
    ) -> Reference:
        """Record the served model's distributions over a text, so that you can compare other models with it.

        Args:
            name: The reference's name.
            prompt: One text, or its token ids.
            texts: Several texts, in place of `prompt`.
            messages: Conversations in place of a text; each scored turn is one window. `tools` and
                `chat_template_kwargs` are as for `turns`.
            labels: One label per text or conversation, such as its language, stored with the reference.
            corpus: The source of the text, stored with the reference.
            return_ranks: Give `on_window` the logprobs and ranks of each window's targets.
            layers: Record the residual stream at the decoder layers' boundaries too, for `from_boundary` of `kld`.
            routes: Record the experts that mixture-of-experts layers choose for every token, for `routes` of `kld`.
            answers: Prompts and the model's answers, in place of a text; only the answers' tokens are scored.
            on_window: A synchronous function, called with each recorded window and the running perplexity.
            model: Model to use in place of the client's.
            **windows: As for `perplexity`.

        The answer is streamed. The server resumes an interrupted recording when the same request is sent again, as the
        client does when the connection is lost. An `APIStatusError` with status 409 says that the name belongs to
        another reference, or that a file of this one is damaged.
        """
        return self.send(
            stream(
                "/v1/references",
                # After a retry, the server reports only the missing windows.
                lambda: window_reader("reference", Reference.model_validate, on_window, repeatable=True),
                bytes_per_byte=OVERLAPS * BYTES_PER_BYTE,
                model=model or self.model,
                name=name,
                prompt=prompt,
                texts=texts,
                corpus=None if corpus is None else corpus.model_dump(exclude_none=True),
                return_ranks=return_ranks or None,
                layers=layers or None,
                routes=routes or None,
                answers=None if answers is None else answers.model_dump(),
                messages=messages,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                labels=labels and list(labels),
                **windows if messages is not None or answers is not None else {"method": "sliding", **windows},
            )
        )

    def references(self) -> list[Reference]:
        """List all references of the server."""
        return self.send(
            call(
                "GET",
                "/v1/references",
                lambda body: ReferenceList.model_validate(body).data,
                fixed_bytes=LISTING_BYTES,
            )
        )

    def layers(self) -> ServedLayers:
        """Look up the boundaries of decoder layers that `from_boundary` of `kld` can name, and the free space for
        references. If the server supports none, `BadRequestError` says why."""
        return self.send(call("GET", "/v1/layers", ServedLayers.model_validate))

    def reference(self, name: str) -> Reference:
        """Look up a reference."""
        return self.send(call("GET", reference_path(name), Reference.model_validate, fixed_bytes=REFERENCE_BYTES))

    def reference_windows(self, name: str) -> ReferenceWindows:
        """Look up the text or conversation, label and role of each window of a reference."""
        num_bytes = origins_bytes(self.reference(name))
        return self.send(
            call("GET", f"{reference_path(name)}/windows", ReferenceWindows.model_validate, fixed_bytes=num_bytes)
        )

    def llama_cpp_base(self, name: str, first: int, write: Callable[[bytes], object]) -> None:
        """Fetch a reference as llama.cpp's base file, from window `first` on. Only window 0 comes with a header.

        Args:
            name: Name of a complete reference that was recorded with method `llama.cpp`.
            first: Index of the first window.
            write: Called with the file's bytes as they arrive; must raise an exception if there are too many. A
                connection lost after the first bytes is an error without a retry.
        """
        self.send(
            Call(
                "GET",
                f"{reference_path(name)}/llama.cpp?first={first}",
                lambda: BytesReader(write),
                fixed_bytes=sys.maxsize,
            )
        )

    def delete_reference(self, name: str) -> None:
        """Delete a reference."""
        self.send(call("DELETE", reference_path(name), ReferenceDeleted.model_validate))

    def kld(
        self,
        reference: str,
        windows: tuple[int, int] | None = None,
        *,
        top_logprobs: int = 0,
        statistics: list[Statistic] | None = None,
        num_positions: int = MAX_POSITIONS,
        as_noise_floor: bool = False,
        from_boundary: int | None = None,
        routes: Literal["own", "forced"] | None = None,
        on_window: Callable[[KldWindowValues], object] | None = None,
        lane: Lane = "prefill",
        context: int | None = None,
        model: str | None = None,
    ) -> KldResult:
        """Measure the served model's KL divergence from a reference, over the whole vocabulary at every position.

        Args:
            reference: Name of a complete reference.
            windows: The range [first, end) of windows, from 0; all when left out.
            top_logprobs: Return the k most likely tokens of both models at every position. k is at most 256, and at
                most the server's `--max-logprobs`.
            statistics: Return figures of both whole distributions at every position, as for `score`, in each window's
                `columns`. The cross-entropy with the reference is the KL divergence plus `reference_entropy`.
            num_positions: Limit on positions, at most 8,388,608. The client stops reading a much longer answer.
            as_noise_floor: Store the result with the reference as its noise floor in this lane. Allowed only for all
                windows, on a server of the recorded model.
            from_boundary: Replace the served model's residual stream with the reference's at this boundary of its
                decoder layers; boundary 0 is before the first layer. The reference must be recorded with `layers`.
            routes: Compare the served model's choice of experts with the reference's, which must be recorded with
                `routes`. "forced" also computes every token with the reference's experts.
            on_window: A synchronous function, called with each compared window.
            lane: The served model's lane, as for `score`; likewise `context`. References are recorded in prefill.
            model: Model to use in place of the client's.

        The answer is streamed. With `on_window`, a connection lost after the first window is an error without a retry.
        """
        return self.send(
            stream(
                "/v1/kld",
                lambda: kld_reader(on_window, windows),
                fixed_bytes=kld_bytes(
                    windows, num_positions, top_logprobs + len(statistics or ()), has_routes=routes is not None
                ),
                model=model or self.model,
                reference=reference,
                windows=None if windows is None else list(windows),
                top_logprobs=top_logprobs,
                statistics=statistics,
                as_noise_floor=as_noise_floor,
                encoding_format="base64",
                from_boundary=from_boundary,
                routes=routes,
                **lane_request(lane, context),
            )
        )

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text with the server's tokenizer."""
        return self.send(tokenization(model=self.model, prompt=text, add_special_tokens=add_special_tokens))

    def tokenize_messages(
        self,
        messages: Messages,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render a conversation with the served model's chat template, up to where the assistant answers, as token ids.
        The arguments are as for `turns`."""
        return self.send(
            tokenization(model=self.model, messages=messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        )

    def generate(
        self, prompt_token_ids: Sequence[int], max_new_tokens: int, *, seed: int | None = None
    ) -> tuple[list[int], str]:
        """Generate the served model's answer to a prompt: greedy, or with a `seed`, sampled at temperature 1.

        Other sampling parameters have no effect, even those in the model's generation_config.json. The answer ends with
        a stop token, or after `max_new_tokens`.

        Returns:
            The answer's token ids, including the stop token, and its text.
        """
        return self.send(
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

    def turns(
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
            tools: Tools: one list for all conversations, or one list per conversation.
            chat_template_kwargs: Passed to the template.
            roles: Roles of the turns to score; the assistant's when left out.
            add_generation_prompt: Render each conversation up to where the assistant answers, without turns.
        """
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        return self.send(
            call(
                "POST",
                "/v1/turns",
                lambda body: parse_turns(body, len(conversations)),
                # A conversation has at most one sequence per message.
                bytes_per_byte=BYTES_PER_BYTE * max(map(len, conversations)),
                model=self.model,
                messages=messages,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                roles=roles,
                # Left out if false, because older servers refuse this field.
                add_generation_prompt=add_generation_prompt or None,
            )
        )

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text with the server's tokenizer."""
        return self.send(
            call(
                "POST",
                "/detokenize",
                lambda body: DetokenizedText.model_validate(body).prompt,
                model=self.model,
                tokens=list(token_ids),
            )
        )

    def token_texts(self, token_ids: Collection[int]) -> TokenTexts:
        """Look up the text of single tokens. A token that ends within a character has U+FFFD in its text, and its bytes
        in the result's `contents`."""
        wanted = sorted(set(token_ids))
        return self.send(
            call("POST", "/v1/tokens", lambda body: parse_token_texts(body, wanted), model=self.model, token_ids=wanted)
        )
