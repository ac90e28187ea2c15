"""Measures KL divergence from a reference on one or several servers, for `ppl-client kld` and for Python."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scoremode._texts import model_name
from scoremode.client import AsyncScoreClient
from scoremode.errors import ResponseError, RunError, ScoremodeError, ServersDifferError
from scoremode.kld import (
    POSITION_DTYPES,
    KldPositions,
    agreement_lengths,
    follows_stop,
    of_answers,
    over_noise_floor,
    statistics,
)
from scoremode.metrics import exp, finite_or_none
from scoremode.results import TOP_DTYPES, KldWindowValues, TopTokens, most_divergent
from scoremode.runs.expert_routes import ExpertRoutes, fits_routes
from scoremode.runs.lanes import lane_fields, mean_batch
from scoremode.runs.plan import differences, server_header
from scoremode.runs.pool import Pool
from scoremode.runs.report import Arrays, chat_differences, origin_arrays, record_beginning, record_end
from scoremode.runs.run import OnProgress, Run, StartJournal, measure
from scoremode.windows import EXHAUSTIVE_METHODS, Method
from scoremode.wire import (
    DivergentPosition,
    KldStatistics,
    Lane,
    Reference,
    ReferenceLayers,
    ReferenceRoutes,
    ServerInfo,
    TokenTexts,
    WindowOrigins,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ComparedModel:
    """A served model, and the reference to compare it with."""

    server: ServerInfo
    model: str
    reference: Reference

    @property
    def layers(self) -> ReferenceLayers:
        """The layers of the reference, which must be recorded with them."""
        assert self.reference.layers is not None
        return self.reference.layers


@dataclass(frozen=True, slots=True)
class KldPlan(ComparedModel):
    """The model and the reference that a run compares, as the `Measurement` of its journal."""

    top_logprobs: int = 0
    lane: Lane = "prefill"
    """The served model's lane; the reference was recorded in prefill."""
    routes: ReferenceRoutes | None = None
    """The layers whose experts are compared. Each window is then compared twice: with the served model's own experts,
    and with the reference's. None if experts are not compared."""

    @property
    def num_windows(self) -> int:
        return self.reference.num_windows

    async def measure(self, client: AsyncScoreClient, index: int) -> KldWindowValues:
        compared = partial(compared_window, client, self.server, self.reference, index, lane=self.lane)
        if self.routes is None:
            return await compared(top_logprobs=self.top_logprobs)
        window = await compared(top_logprobs=self.top_logprobs, routes="own")
        return self._checked(window.model_copy(update={"forced": await compared(routes="forced")}))

    def nats(self, window: KldWindowValues) -> float:
        return float(window.positions.kld.sum(dtype="f8"))

    def header(self) -> dict[str, object]:
        return {
            "kind": "kld",
            **reference_header(self.reference),
            "model": self.model,
            **({"top_logprobs": self.top_logprobs} if self.top_logprobs else {}),
            **({} if self.routes is None else {"routes": True}),
            **lane_fields(self.lane),
            **server_header(self.server),
        }

    def from_line(self, line: dict[str, object]) -> KldWindowValues:
        return self._checked(KldWindowValues.model_validate(line))

    def _checked(self, window: KldWindowValues) -> KldWindowValues:
        """Return the window. ResponseError if the run compares experts, and the window's counts do not fit."""
        if self.routes is not None and not fits_routes(window, self.routes):
            num_layers = len(self.routes.layers)
            raise ResponseError(f"the server's routes do not fit window {window.index} and the {num_layers} layers")
        return window


@dataclass(frozen=True, slots=True)
class DivergentToken:
    """A token of the text where the KL divergence is among the largest. Texts are None if the server gave none."""

    index: int
    """Index among the targets of all windows, in order, from 0."""
    window: int
    """Index of its window in the reference."""
    kld: float | None
    """Nats; None for infinity."""
    token_id: int
    reference_probability: float
    """The probability that the reference gives this token."""
    probability: float
    """The probability that the served model gives this token."""
    reference_top_token_id: int
    """The top token of the reference."""
    reference_confidence: float
    """The probability that the reference gives its own top token."""
    top_token_id: int
    """The top token of the served model."""
    text_before: str | None
    """The text of up to sixteen targets before this token."""
    num_context: int
    """Tokens of its window before the first target, which are not scored."""
    token: str | None
    reference_top_token: str | None
    top_token: str | None


@dataclass(frozen=True, slots=True, eq=False)
class KldMeasurement(ComparedModel):
    """A served model compared with all windows of a reference. The client read `reference` again after the last window,
    so it has the current noise floors."""

    concurrency: int | None
    """Windows in flight at once, at all servers together; None if the server decided, as for a noise floor."""
    as_noise_floor: bool
    window_sizes: list[int]
    """The number of targets of each window."""
    positions: KldPositions
    """The values of all windows' targets, in order."""
    statistics: KldStatistics
    most_divergent: list[DivergentToken]
    seconds: float
    """Time from the first request for a window to the last answer, summed over sessions."""
    token_texts: TokenTexts = field(default_factory=TokenTexts)
    """The text of every token id in `positions` and `top_tokens`; empty unless requested and given by a server."""
    top_tokens: TopTokens | None = None
    origins: WindowOrigins | None = None
    """The source of each window."""
    lane: Lane = "prefill"
    mean_batch: float | None = None
    """The mean of the windows' mean batches."""
    top_ties: NDArray[np.bool_] | None = None
    """[n], whether a target has the same logit as the served model's top token, which is another token. None if the
    text is not greedy answers, or the server gives no top tokens."""
    routes: ExpertRoutes | None = None
    """The choices of experts; None if they were not compared."""

    @property
    def agreement_lengths(self) -> list[int] | None:
        """How many tokens of each greedy answer the served model agrees with, in the order of prompts; None for other
        texts. Agreement ends at the first token that is not the served model's top token, or that follows a token after
        which only the served model stops."""
        answers = self.reference.answers
        if answers is None or not answers.are_greedy or self.origins is None:
            return None
        sizes, stops = np.array(self.window_sizes), self.reference.other_stops(self.server)[1]
        has_stopped = follows_stop(self.positions.token_ids, sizes, stops)
        is_same = (self.positions.top_token_ids == self.positions.token_ids) & ~has_stopped
        lengths = agreement_lengths(is_same, sizes)
        return of_answers(lengths, self.origins.documents, answers.num_answers)

    @property
    def target_ids(self) -> NDArray[np.int32]:
        """Token ids of all targets, in the order of windows."""
        return self.positions.token_ids

    def figures_of(self, windows: NDArray[np.bool_]) -> KldStatistics:
        """The statistics of the windows that a mask [windows] selects."""
        is_selected = np.repeat(windows, self.window_sizes)
        positions = KldPositions(**{name: getattr(self.positions, name)[is_selected] for name in POSITION_DTYPES})
        return statistics(positions, np.array(self.window_sizes)[windows].tolist())

    @property
    def positions_per_second(self) -> float:
        # Each position is computed twice if experts are compared.
        return len(self.positions) * (1 if self.routes is None else 2) / self.seconds

    @property
    def kld_over_noise_floor(self) -> float | None:
        """The mean KL divergence as a multiple of this lane's noise floor, by `kld.over_noise_floor`."""
        floor = self.reference.noise_floor_of(self.lane)
        return over_noise_floor(self.statistics["kld"]["mean"], None if floor is None else floor.mean)

    def record(self, urls: Sequence[str]) -> dict[str, object]:
        """The run as JSON, with everything that is needed to repeat it. Infinity, which JSON lacks, becomes null."""
        return {
            **record_beginning("kld", urls, self.model, self.server),
            "reference": finite_or_none(self.reference.model_dump()) | {"model": model_name(self.reference.model)},
            "settings": {
                "concurrency": self.concurrency,
                "as_noise_floor": self.as_noise_floor,
                **lane_fields(self.lane, self.mean_batch),
            },
            "statistics": self.statistics,
            "kld_over_noise_floor": self.kld_over_noise_floor,
            "most_divergent": finite_or_none([asdict(token) for token in self.most_divergent]),
            **({} if (lengths := self.agreement_lengths) is None else {"agreement_lengths": lengths}),
            **({} if self.routes is None else {"routes": self.routes.model_dump()}),
            "seconds": self.seconds,
            "positions_per_second": self.positions_per_second,
            **record_end(self.token_texts, self.origins),
        }

    def arrays(self) -> Arrays:
        """The values of every target, in the order of windows, and the windows' sizes."""
        arrays = {name: getattr(self.positions, name).astype(dtype) for name, dtype in POSITION_DTYPES.items()}
        if (top := self.top_tokens) is not None:
            arrays |= {f"top_tokens.{name}": getattr(top, name).astype(dtype) for name, dtype in TOP_DTYPES.items()}
        arrays["window_sizes"] = np.array(self.window_sizes, np.int32)
        if self.top_ties is not None:
            arrays["top_ties"] = self.top_ties.astype(np.uint8)
        if self.routes is not None:
            arrays |= self.routes.arrays
        return arrays | origin_arrays(self.origins, arrays, self.token_texts)


async def measure_kld(
    clients: AsyncScoreClient | Sequence[AsyncScoreClient],
    name: str,
    *,
    return_token_texts: bool = False,
    top_logprobs: int = 0,
    concurrency: int | None = None,
    lane: Lane = "prefill",
    routes: bool = False,
    start_journal: StartJournal[KldWindowValues] | None = None,
    on_progress: OnProgress | None = None,
) -> KldMeasurement:
    """Measure the KL divergence of a served model from a reference, on one server or on several of the same model.

    Args:
        clients: A client, or one client per server; every server must have the reference.
        name: The name of a complete reference.
        return_token_texts: Include the text of every token that is a target or either model's top token. If the server
            cannot give them, the run has no texts, and the log says so.
        top_logprobs: Include the k top tokens of both models at the most divergent positions, up to the server's limit.
        concurrency: Windows in flight at each server; by default as many sequences as it runs at once, at most 64.
        lane: The served model's lane, as for `AsyncScoreClient.score`.
        routes: Compare choices of experts too, and each window also with those of the reference, which must have them.
        start_journal: Called with the plan; returns the journal. Windows in the journal are not measured again, and
            the others are added to it. The caller closes it.
        on_progress: Called once for all windows in the journal, and then for each compared window.

    Raises:
        ScoremodeError: no server is left, the servers or their references differ, the reference is refused or was
            replaced during the run, or the journal cannot be written. Windows in flight are cancelled.
    """
    pool = await Pool.connect(clients, concurrency)
    reference = await same_references(pool, name)
    if routes and reference.routes is None:
        raise RunError(f"reference {name} was recorded without routes: record it again (ppl-client record --routes)")
    num_top = min(max(top_logprobs, _num_top(reference)), pool.info.max_top_logprobs)
    plan = KldPlan(
        pool.info,
        pool.clients[0].model or pool.info.model,
        reference,
        num_top,
        lane,
        reference.routes if routes else None,
    )
    for difference in chat_differences(plan.model, plan.server, reference):
        _log.warning("%s", difference)
    origins = await _origins(pool.clients[0], reference)
    run = await measure(plan, pool, start_journal, on_progress)
    return await _measurement(
        pool.clients[0], plan, origins, run, pool.concurrency, return_token_texts=return_token_texts
    )


def _num_top(reference: Reference) -> int:
    """How many top tokens a comparison needs: 1 for greedy answers, whose agreement depends on ties with the highest
    logit; else 0."""
    return int(reference.answers is not None and reference.answers.are_greedy)


async def same_references(pool: Pool, name: str) -> Reference:
    """Look up a reference on all servers. ServersDifferError if one has another reference with that name."""
    references = [await client.reference(name) for client in pool.clients]
    for client, other in zip(pool.clients, references, strict=True):
        if difference := differences(_identity(other), _identity(references[0])):
            raise ServersDifferError(
                f"the reference {name!r} at {client.address} differs from that at {pool.clients[0].address}: "
                f"{difference}"
            )
    return references[0]


async def measure_noise_floor(
    client: AsyncScoreClient,
    name: str,
    *,
    lane: Lane = "prefill",
    return_token_texts: bool = False,
    on_progress: OnProgress | None = None,
) -> KldMeasurement:
    """Compare a recorded model with its own reference, and store the result with the reference as its noise floor.

    One request does this. The server, whose fingerprint must equal the reference's, scores all windows again in
    different batches. Each lane has its own floor. The arguments are those of `measure_kld`.

    Raises:
        ScoremodeError: the server fails, or serves another model.
    """
    info = await client.info()
    reference = await client.reference(name)
    num_top = min(_num_top(reference), info.max_top_logprobs)
    plan = KldPlan(info, client.model or info.model, reference, num_top, lane)
    origins = await _origins(client, reference)
    run = Run(plan, None, on_progress)
    result = await client.kld(
        name,
        top_logprobs=num_top,
        num_positions=plan.reference.num_scored,
        as_noise_floor=True,
        on_window=run.store,
        lane=lane,
    )
    if missing := list(run.missing()):
        raise ResponseError(f"the server's answer lacks {len(missing)} windows of the reference")
    measurement = await _measurement(client, plan, origins, run, None, return_token_texts=return_token_texts)
    return replace(measurement, mean_batch=result.mean_batch)


async def _origins(client: AsyncScoreClient, reference: Reference) -> WindowOrigins:
    """Look up the sources of a reference's windows. ResponseError if they do not fit the reference."""
    origins = await client.reference_windows(reference.name)
    lists = (origins.num_context, origins.documents, origins.labels, origins.roles, origins.prompts)
    is_beyond = reference.answers is not None and max(origins.documents) >= reference.answers.num_answers
    if is_beyond or any(values is not None and len(values) != reference.num_windows for values in lists):
        raise ResponseError(
            f"the server's description of the windows does not fit the {reference.num_windows} of {reference.name}"
        )
    return origins


async def _measurement(
    client: AsyncScoreClient,
    plan: KldPlan,
    origins: WindowOrigins,
    run: Run[KldWindowValues],
    concurrency: int | None,
    *,
    return_token_texts: bool,
) -> KldMeasurement:
    """Make the result of a finished run; `concurrency` is None for a noise floor."""
    windows, seconds = run.in_order(), run.seconds()
    positions = KldPositions.concatenate([window.positions for window in windows])
    if len(positions) != (num_expected := plan.reference.num_scored):
        raise ResponseError(f"the server gave {len(positions)} positions for the {num_expected} of the reference")
    reference = await unreplaced(client, plan.reference)
    window_sizes = [window.num_scored for window in windows]
    try:
        top_tokens = most_divergent(windows, positions.kld) if plan.top_logprobs else None
    except ValueError as error:
        raise ResponseError(f"the server's top tokens do not fit the windows: {error}") from error
    shown_ids = [positions.token_ids, positions.top_token_ids, positions.reference_top_token_ids]
    shown_ids += [] if top_tokens is None else [top_tokens.token_ids.ravel()]
    figures = statistics(positions, window_sizes)
    return KldMeasurement(
        server=plan.server,
        model=plan.model,
        reference=reference,
        concurrency=concurrency,
        as_noise_floor=concurrency is None,
        window_sizes=window_sizes,
        positions=positions,
        statistics=figures,
        most_divergent=await _divergent_tokens(
            client, figures["most_divergent"], positions, window_sizes, reference.method, origins
        ),
        seconds=seconds,
        token_texts=await texts_of_occurring(client, *shown_ids, *origins.prompts or ())
        if return_token_texts
        else TokenTexts(),
        top_tokens=top_tokens,
        origins=origins,
        lane=plan.lane,
        mean_batch=mean_batch(window.mean_batch for window in windows),
        top_ties=_top_ties(windows) if _num_top(reference) else None,
        routes=None if plan.routes is None else ExpertRoutes.from_windows(windows, plan.routes),
    )


def _top_ties(windows: Sequence[KldWindowValues]) -> NDArray[np.bool_] | None:
    """[n], whether a target has the same logit as the top token, which is another token; None without top tokens."""
    ties = [
        (window.positions.ranks > 1) & (window.positions.logprobs == window.top_logprobs.logprobs[:, 0])
        for window in windows
        if window.top_logprobs is not None
    ]
    return np.concatenate(ties) if len(ties) == len(windows) else None


async def compared_window(
    client: AsyncScoreClient, server: ServerInfo, reference: Reference, index: int, **settings: Any
) -> KldWindowValues:
    """Compare one window, with the settings of `AsyncScoreClient.kld`. ServersDifferError if the client's
    server now has another model than `server` says."""
    result = await client.kld(reference.name, (index, index + 1), num_positions=reference.context_length, **settings)
    if server.fingerprint is not None and result.fingerprint != server.fingerprint:
        raise ServersDifferError(
            f"{client.address} compared another model: its fingerprint is {result.fingerprint!r} "
            f"instead of {server.fingerprint!r}"
        )
    return result.data[0]


async def unreplaced(client: AsyncScoreClient, reference: Reference) -> Reference:
    """Look up a reference again after a run, with its current noise floors. ResponseError if it was replaced."""
    now = await client.reference(reference.name)
    if difference := differences(_identity(now), _identity(reference)):
        raise ResponseError(f"the reference was replaced while the model was compared with it: {difference}")
    return now


def reference_header(reference: Reference) -> dict[str, object]:
    """The fields of a journal's header that identify a reference."""
    return {f"reference.{name}": value for name, value in _identity(reference).items()}


def _identity(reference: Reference) -> Mapping[str, object]:
    """The fields that identify a reference."""
    return reference.model_dump(
        include={"name", "created", "fingerprint", "text_fingerprint", "num_windows", "num_scored"}
    )


async def texts_of_occurring(client: AsyncScoreClient, *token_ids: Collection[int] | NDArray[Any]) -> TokenTexts:
    """Look up the text of every token id in some arrays. Empty if the server fails, or is too old for the route."""
    occurring = np.unique(np.concatenate([np.asarray(ids, np.int32) for ids in token_ids])).tolist()
    try:
        return await client.token_texts(occurring)
    except ScoremodeError as error:
        _log.warning("the run is stored without the texts of its tokens: %s", error)
        return TokenTexts()


async def _divergent_tokens(
    client: AsyncScoreClient,
    most_divergent: Sequence[DivergentPosition],
    positions: KldPositions,
    window_sizes: Sequence[int],
    method: Method,
    origins: WindowOrigins,
) -> list[DivergentToken]:
    """Describe the most divergent positions. If the server cannot give texts, they are None, and the log says so."""
    firsts = np.cumsum([0, *window_sizes[:-1]])
    if method in EXHAUSTIVE_METHODS:
        # Targets of these methods are consecutive in the whole document; those of other methods only within a window.
        firsts = np.maximum.accumulate(np.where(np.diff(origins.documents, prepend=-1) != 0, firsts, 0))
    starts = np.repeat(firsts, window_sizes)
    places = [entry["index"] for entry in most_divergent]
    sequences_before = [positions.token_ids[max(starts[at], at - 16) : at].tolist() for at in places]
    shown_ids = [
        ids[places].tolist()
        for ids in (positions.token_ids, positions.reference_top_token_ids, positions.top_token_ids)
    ]
    texts: dict[int, str] = {}
    texts_before: list[str | None] = [None] * len(places)
    try:
        texts = await client.token_texts({*chain(*shown_ids)})
        # Request the texts one by one over one connection, because they are few and short.
        texts_before = [await client.detokenize(sequence) if sequence else "" for sequence in sequences_before]
    except ScoremodeError as error:
        _log.warning("the most divergent tokens are shown without their text: %s", error)
    return [
        DivergentToken(
            **entry,
            token_id=token,
            reference_probability=exp(float(positions.reference_logprobs[at])),
            probability=exp(float(positions.logprobs[at])),
            reference_top_token_id=reference_top,
            reference_confidence=float(positions.reference_confidence[at]),
            top_token_id=top,
            text_before=text_before,
            num_context=origins.num_context[entry["window"]],
            token=texts.get(token),
            reference_top_token=texts.get(reference_top),
            top_token=texts.get(top),
        )
        for entry, at, text_before, token, reference_top, top in zip(
            most_divergent, places, texts_before, *shown_ids, strict=True
        )
    ]
