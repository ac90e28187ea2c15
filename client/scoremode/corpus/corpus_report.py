"""What `ppl-client corpus` prints at the end."""

from scoremode._printable import two_columns
from scoremode.corpus.settings import CorpusProgress


def as_text(done: CorpusProgress) -> str:
    """The figures of a finished run, one per line."""
    files = f"{done.files_done:,}"
    if done.num_finished_before:
        files += f", {done.num_finished_before:,} of them finished before"
    documents = f"{done.num_documents:,}"
    if done.num_resumed:
        documents += f", {done.num_resumed:,} of them scored before"
    lines = {"files": files, "documents": documents, "kept": f"{done.num_kept:,}"}
    if done.num_unscored:
        reason = "" if done.first_error is None else f", the first because {done.first_error}"
        lines["without figures"] = f"{done.num_unscored:,}{reason}"
    lines["tokens"] = f"{done.num_tokens:,}"
    if done.perplexity is not None:
        lines["perplexity"] = f"{done.perplexity:.4f}"
    rate = (done.num_tokens - done.num_tokens_resumed) / done.seconds if done.seconds else 0
    lines["time"] = f"{done.seconds:.1f} s, {rate:,.0f} tokens/s"
    return two_columns(list(lines.items()))
