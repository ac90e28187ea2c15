"""Write an lm-eval task that needs no network into a folder, for `lm_eval --include_path FOLDER`.

    python scripts/lm_eval_tasks.py FOLDER

python_reference: multiple choice, which of four endings continues a sentence of the Python language reference.
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

NUM_QUESTIONS = 120
NUM_EXAMPLES = 20
NUM_OPTIONS = 4
HALVES = range(5, 13)
"""Words that each half of a sentence may have."""

SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")

MULTIPLE_CHOICE = """\
task: python_reference
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/python_reference.train.jsonl
    test: {folder}/python_reference.test.jsonl
output_type: multiple_choice
test_split: test
fewshot_split: train
num_fewshot: 3
fewshot_config:
  sampler: first_n
doc_to_text: "The Python reference says: {{{{beginning}}}}"
doc_to_choice: endings
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1.0
"""


def sentences() -> Iterator[tuple[str, str]]:
    """Sentences of the Python language reference, each cut in half between two words."""
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            for sentence in SENTENCE.split(" ".join(paragraph.split())):
                words = sentence.split(" ")
                half = len(words) // 2
                if half in HALVES and sentence.endswith(".") and sentence.isascii() and words[0].istitle():
                    yield " ".join(words[:half]), " ".join(words[half:])


def questions() -> list[dict[str, object]]:
    """Multiple-choice questions; the wrong endings are those of other sentences."""
    rng = random.Random(0)
    halves = rng.sample(sorted(set(sentences())), NUM_OPTIONS * (NUM_QUESTIONS + NUM_EXAMPLES))
    made = []
    for start in range(0, len(halves), NUM_OPTIONS):
        (beginning, ending), *others = halves[start : start + NUM_OPTIONS]
        endings = [ending, *(other for _, other in others)]
        rng.shuffle(endings)
        made.append({"beginning": beginning, "endings": endings, "answer": endings.index(ending)})
    return made


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_task(folder: Path) -> None:
    """The task and its data."""
    folder.mkdir(parents=True, exist_ok=True)
    made = questions()
    write_jsonl(folder / "python_reference.train.jsonl", made[:NUM_EXAMPLES])
    write_jsonl(folder / "python_reference.test.jsonl", made[NUM_EXAMPLES:])
    (folder / "python_reference.yaml").write_text(MULTIPLE_CHOICE.format(folder=folder.resolve()))


if __name__ == "__main__":
    write_task(Path(sys.argv[1]))
