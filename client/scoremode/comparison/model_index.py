"""Edits the key `model-index` in the front matter of a model card, whose figures the hub shows. No other key of an
existing card changes."""

import re

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

LANE = " lane"
"""The end of `dataset_split` in each result that Scoremode wrote, which tells it apart from other people's."""
_KEY = "model-index"
_COMMENT = re.compile(r"(?:^|[ \t])#", re.MULTILINE)


def with_model_index(head: str, ours: ModelCardData, newline: str) -> str | None:
    """Replace Scoremode's earlier figures in the front matter `head` by `ours`, and leave other people's unchanged.

    None if this is not safe: `head` is not a YAML mapping, or its `model-index` would lose something.
    """
    try:
        metadata = yaml.safe_load(head) or {}
        name, results = ours.model_name, ours.eval_results or []
        if old := metadata.get(_KEY):
            old_name, old_results = model_index_to_eval_results(old)
            if eval_results_to_model_index(old_name, old_results) != old:
                return None
            others = [result for result in old_results if not (result.dataset_split or "").endswith(LANE)]
            # Keep the name that other people's figures belong to.
            name, results = old_name if others else name, [*others, *results]
        block = ModelCardData(model_name=name, eval_results=results).to_yaml(line_break=newline) + newline
        start, stop = _place(head)
        merged = head[:start] + block + head[stop:]
        is_alone = yaml.safe_load(merged) == {**metadata, _KEY: yaml.safe_load(block)[_KEY]}
        return merged if is_alone and not _COMMENT.search(head[start:stop]) else None
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _place(head: str) -> tuple[int, int]:
    """The range of `model-index` and its value in the front matter `head`; the end of `head` if it has no such key."""
    node = yaml.compose(head)
    for key, value in () if node is None else node.value:
        if key.value == _KEY:
            start, lines = key.start_mark.index, head[key.start_mark.index : value.end_mark.index].splitlines(True)
            # Comments after the value belong to the next key.
            while lines[-1].lstrip()[:1] in ("", "#"):
                lines.pop()
            return start, start + len("".join(lines))
    return len(head), len(head)
