"""The `model-index` in the front matter of a model card, which has the figures that the hub shows. Of a card that
exists nothing but this key changes."""

import re

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

LANE = " lane"
"""The end of the `split` of every result that is ours, by which they are told apart from other people's."""
_KEY = "model-index"
_COMMENT = re.compile(r"(?:^|[ \t])#", re.MULTILINE)


def with_model_index(head: str, ours: ModelCardData, newline: str) -> str | None:
    """Front matter with our figures in place of earlier ones of ours, next to those of other people.

    None if that is not clear: it is not YAML of a mapping, or what it has for `model-index` would lose something.
    """
    try:
        metadata = yaml.safe_load(head) or {}
        name, results = ours.model_name, ours.eval_results or []
        if old := metadata.get(_KEY):
            old_name, old_results = model_index_to_eval_results(old)
            if eval_results_to_model_index(old_name, old_results) != old:
                return None
            others = [result for result in old_results if not (result.dataset_split or "").endswith(LANE)]
            # Their figures are of the model that they name.
            name, results = old_name if others else name, [*others, *results]
        block = ModelCardData(model_name=name, eval_results=results).to_yaml(line_break=newline) + newline
        start, stop = _place(head)
        merged = head[:start] + block + head[stop:]
        is_alone = yaml.safe_load(merged) == {**metadata, _KEY: yaml.safe_load(block)[_KEY]}
        return merged if is_alone and not _COMMENT.search(head[start:stop]) else None
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _place(head: str) -> tuple[int, int]:
    """Where the key and its value begin and end; the end of the front matter where it has none."""
    node = yaml.compose(head)
    for key, value in () if node is None else node.value:
        if key.value == _KEY:
            start, lines = key.start_mark.index, head[key.start_mark.index : value.end_mark.index].splitlines(True)
            # Comments after the value belong to what follows.
            while lines[-1].lstrip()[:1] in ("", "#"):
                lines.pop()
            return start, start + len("".join(lines))
    return len(head), len(head)
