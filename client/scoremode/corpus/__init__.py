"""Scores corpora document by document, for `ppl-client corpus` and as a library. Calls need pyarrow."""

from collections.abc import Sequence
from pathlib import Path

from scoremode.client import AsyncScoreClient
from scoremode.corpus.documents import FIGURE_COLUMNS, REQUESTS_IN_FLIGHT, DocumentScorer, Figure
from scoremode.corpus.settings import CorpusProgress, OnCorpusProgress, find_inputs
from scoremode.errors import extra
from scoremode.runs import Pool, server_header

__all__ = ["CorpusProgress", "OnCorpusProgress", "score_corpus"]


async def score_corpus(
    clients: AsyncScoreClient | Sequence[AsyncScoreClient],
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    text_column: str = "text",
    column_prefix: str = "",
    per_token: bool = False,
    figures: Sequence[Figure] = (),
    context_length: int | None = None,
    concurrency: int | None = None,
    resume: bool = False,
    on_progress: OnCorpusProgress | None = None,
) -> CorpusProgress:
    """Score every document of parquet and jsonl files, and write its row with its figures.

    Each row gets `num_tokens`; `nll`, the sum over all tokens in nats; `perplexity`, exp of NLL / tokens; and
    `bits_per_byte`, NLL / (ln 2 * UTF-8 bytes). They equal those of `/v1/perplexity` with method `rolling` for the
    document alone. They are null for a document without text or one that a server refuses.

    Args:
        clients: One client, or one per server; all servers have the same model.
        inputs: Files (.parquet, .jsonl, .jsonl.zst, .jsonl.gz), or folders with such files at any depth.
        output: A folder. Every input becomes a parquet file in it, with the rows in their order.
        text_column: The column with the documents.
        column_prefix: Put before the names of the added columns.
        per_token: Add `token_ids` and `token_logprobs` (nats) too, both [num_tokens].
        figures: Add columns for some of "entropy", "min_k", "min_k++" and "fast_detect"; docs/corpora.md has formulas.
        context_length: Targets per window; by default as many as fit the model's context.
        concurrency: Requests in flight at once at each server, each of some 8,000 tokens.
        resume: Resume an earlier run: finished files stay as they are, others continue after their last stored rows.
        on_progress: Called as requests and files are done.

    Returns:
        The figures of the run.

    Raises:
        WindowError: windows of `context_length` do not fit the model, or it has no token to put before a text.
        ResponseError: the server is too old to return statistics, which all figures but `min_k` need.
        ScoremodeError: the last server failed, the servers differ, a file cannot be read or written, or the output
            has other settings or another model. Finished files stay, and so do the journals from which a run resumes.
    """
    with extra("corpora"):
        from scoremode.corpus.pipeline import Pipeline
    folder = Path(output)
    files = find_inputs([Path(path) for path in inputs], folder)
    pool = await Pool.connect(clients, concurrency or REQUESTS_IN_FLIGHT)
    scorer = DocumentScorer(pool, context_length=context_length, figures=figures)
    settings = {
        "text_column": text_column,
        "column_prefix": column_prefix,
        "per_token": per_token,
        # None equals the header of an earlier version, which has no such field.
        "figures": [figure for figure in FIGURE_COLUMNS if figure in figures] or None,
        "context_length": scorer.context_length,
        "model": pool.clients[0].model or pool.info.model,
        **server_header(pool.info),
    }
    pipeline = Pipeline(files, folder, settings, scorer, resume=resume, on_progress=on_progress)
    with pool.taking_over():
        return await pipeline.run()
