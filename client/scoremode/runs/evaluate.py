"""Measures the perplexity of a corpus on one or several servers, for `ppl-client` and for Python.

The client cuts the windows and scores them over `/v1/score`, so it gets every token's NLL.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from scoremode.client import AsyncScoreClient
from scoremode.metrics import Perplexity, TextMetrics, finite_or_none, perplexity, text_metrics
from scoremode.runs.corpora import Corpus
from scoremode.runs.divergence import texts_of_occurring
from scoremode.runs.lanes import lane_fields, mean_batch
from scoremode.runs.plan import Plan, WindowNlls, make_plan
from scoremode.runs.pool import Pool
from scoremode.runs.report import Arrays, origin_arrays, record_beginning, record_end
from scoremode.runs.run import OnProgress, StartJournal, measure
from scoremode.windows import WindowSettings
from scoremode.wire import Lane, TokenTexts


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation: its figures, and everything that is needed to repeat it."""

    plan: Plan
    concurrency: int
    """Windows in flight at once, at all servers together."""
    result: Perplexity
    windows: list[WindowNlls]
    seconds: float
    """Time from the first request for scores to the last answer, summed over sessions."""
    token_texts: TokenTexts = field(default_factory=TokenTexts)
    """The text of every target, by its id; empty unless requested and given by a server."""

    @property
    def mean_batch(self) -> float | None:
        """The mean of the windows' mean batches; None in the prefill lane."""
        return mean_batch(window.mean_batch for window in self.windows)

    @property
    def text_metrics(self) -> TextMetrics:
        """Bits per byte and word perplexity, which can be compared across tokenizers."""
        plan = self.plan
        return text_metrics(
            self.result,
            plan.method,
            num_tokens=len(plan.tokens),
            num_bytes=plan.num_bytes,
            num_words=plan.num_words,
        )

    @property
    def window_sizes(self) -> list[int]:
        return [window.num_scored for window in self.windows]

    @property
    def target_ids(self) -> list[int]:
        """Token ids of all targets, in the order of windows."""
        return self.plan.target_ids()

    def figures_of(self, windows: NDArray[np.bool_]) -> Perplexity:
        """The figures of the windows that a mask [windows] selects."""
        return perplexity(nll for window in compress(self.windows, windows) for nll in window.nlls)

    @property
    def tokens_per_second(self) -> float:
        return self.result.num_scored / self.seconds

    def record(self, urls: Sequence[str]) -> dict[str, object]:
        """The run as JSON, with everything that is needed to repeat it. Infinity, which JSON lacks, becomes null."""
        plan, result = self.plan, self.result
        return {
            **record_beginning("perplexity", urls, plan.model, plan.server),
            "corpus": {**plan.corpus.info.model_dump(), "source": plan.corpus.source},
            "settings": {
                "method": plan.method,
                "context_length": plan.context_length,
                "stride": plan.stride,
                "max_tokens": plan.max_tokens,
                "add_special_tokens": plan.add_special_tokens,
                # In files of earlier versions, this is true if the server cut the windows.
                "server_side": False,
                "concurrency": self.concurrency,
                **lane_fields(plan.lane, self.mean_batch),
            },
            "num_tokens": len(plan.tokens),
            "num_bytes": plan.num_bytes,
            "num_words": plan.num_words,
            **finite_or_none(asdict(result) | asdict(self.text_metrics)),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            # The names are those of the served model's figures in `KldStatistics`.
            "statistics": finite_or_none(
                {
                    "num_scored": result.num_scored,
                    "num_windows": len(self.windows),
                    "nll_q": result.nll_mean,
                    "nll_q_stderr": result.nll_stderr,
                    "ppl_q": result.perplexity,
                    "ppl_q_stderr": result.perplexity_stderr,
                }
            ),
            "windows": [
                # `asdict` would copy every NLL.
                {name: getattr(window, name) for name in ("index", "num_scored", "nll_sum", "nlls")}
                for window in self.windows
            ],
            **record_end(self.token_texts, plan.origins),
        }

    def arrays(self) -> Arrays:
        """The values of every target, in the order of windows, and the windows' sizes."""
        arrays: Arrays = {
            "token_ids": np.array(self.target_ids, np.int32),
            # The server sent float32, so nothing is lost.
            "logprobs": np.array([-nll for window in self.windows for nll in window.nlls], np.float32),
            "window_sizes": np.array(self.window_sizes, np.int32),
        }
        ranks = [rank for window in self.windows for rank in window.ranks or ()]
        if ranks:
            arrays["ranks"] = np.array(ranks, np.int32)
        return arrays | origin_arrays(self.plan.origins, arrays, self.token_texts)


async def evaluate(
    clients: AsyncScoreClient | Sequence[AsyncScoreClient],
    corpus: Corpus,
    *,
    return_ranks: bool = False,
    return_token_texts: bool = False,
    concurrency: int | None = None,
    lane: Lane = "prefill",
    start_journal: StartJournal[WindowNlls] | None = None,
    on_progress: OnProgress | None = None,
    **windows: Unpack[WindowSettings],
) -> Evaluation:
    """Measure the perplexity of a corpus. The client cuts the windows, and spreads them over servers of the same model.

    `return_ranks` includes the rank of every target, and `return_token_texts` its text. `windows` are fields of
    `WindowSettings`. The other arguments are those of `measure_kld`.

    Raises:
        WindowError: windows cannot be cut, or the text is too short for one.
        ScoremodeError: no server is left, the servers differ, or the journal cannot be written. Windows in flight are
            cancelled.
    """
    pool = await Pool.connect(clients, concurrency)
    plan = await make_plan(pool.clients[0], pool.info, corpus, return_ranks=return_ranks, lane=lane, **windows)
    run = await measure(plan, pool, start_journal, on_progress)
    scored = run.in_order()
    shown_ids = (plan.target_ids(), *(plan.prompts or ()))
    return Evaluation(
        plan=plan,
        concurrency=pool.concurrency,
        result=perplexity(nll for window in scored for nll in window.nlls),
        windows=scored,
        seconds=run.seconds(),
        token_texts=await texts_of_occurring(pool.clients[0], *shown_ids) if return_token_texts else TokenTexts(),
    )
