"""`--preset categories`: the texts that come with the package, and runs over them."""

import hashlib
import re
import shlex
from collections import Counter
from pathlib import Path

from fake_server import FakeServer, serve

from scoremode.cli.main import main
from scoremode.runs import load_corpus
from scoremode.runs.corpora import _CATEGORIES
from scoremode.runs.presets import CATEGORIES_VERSION

HASHES = {1: "2ca72c24b8353ec47f337ec2c19782b25cca605690b8ae1ac05a9c5f723cc0b0"}
"""`LC_ALL=C cat *.txt | sha256sum`, by version of the set."""
CODE = ["code-c", "code-javascript", "code-python", "code-rust"]
LANGUAGES = ["chinese", "french", "german", "russian", "spanish"]
LABELS = sorted([*CODE, *LANGUAGES, "dialogue", "long-document", "mathematics", "prose", "tool-calls"])


def test_a_changed_text_is_another_version():
    assert load_corpus(preset="categories").fingerprint == HASHES.get(CATEGORIES_VERSION), (
        "the texts have changed: add 1 to CATEGORIES_VERSION in scoremode/runs/presets.py, and the hash here"
    )


def test_sources_describes_each_category_which_has_enough_documents_for_an_interval():
    corpus = load_corpus(preset="categories")
    assert Counter(corpus.labels) == {**dict.fromkeys(LABELS, 20), "long-document": 1}
    assert all(text.strip() == text != "" and "\r" not in text for text in corpus.documents)
    for label, letters in {"russian": r"[\u0430-\u0451]", "chinese": r"[\u4e00-\u9fff]"}.items():
        texts = [text for text, name in zip(corpus.documents, corpus.labels, strict=True) if name == label]
        assert all(len(re.findall(letters, text)) > len(text) / 2 for text in texts)
    sources = (_CATEGORIES / "SOURCES.md").read_text().replace(",", "")
    rows = re.findall(r"\| `(.+)\.txt` \| .+ \| (\d+) \| (\d+) \| \d+ \|", sources)
    sizes = {file.stem: file.stat().st_size for file in _CATEGORIES.glob("*.txt")}
    assert [(name, int(number), int(size)) for name, number, size in rows] == [
        (label, corpus.labels.count(label), sizes[label]) for label in LABELS
    ]
    assert sum(sizes.values()) < 300_000


def test_runs_and_cards_name_the_set_and_only_runs_over_one_set_are_compared(tmp_path, monkeypatch, capsys):
    """On two versions of the set that have the beginning of each document."""
    monkeypatch.chdir(tmp_path)
    corpus, original = load_corpus(preset="categories"), FakeServer()
    pairs = [*zip(corpus.labels, corpus.documents, strict=True)]
    with serve(original) as base_url, serve(FakeServer(noise=0.5, references=original.references)) as copy_url:
        for version in (1, 2):
            folder = tmp_path / f"v{version}"
            folder.mkdir()
            for label in LABELS:
                starts = [f"{version}{text[:20]}" for name, text in pairs if name == label]
                (folder / f"{label}.txt").write_text("\n%\n".join(starts) + "\n")
            monkeypatch.setattr("scoremode.runs.corpora._CATEGORIES", folder)
            monkeypatch.setattr("scoremode.runs.presets.CATEGORIES_VERSION", version)
            for command, url in (
                (f"record --preset categories --reference base{version}", base_url),
                (f"kld --reference base{version} --output kld{version}.json", copy_url),
                (f"--preset categories --context-length 64 --output perplexity{version}.json", copy_url),
            ):
                assert main(shlex.split(f"{command} --quiet --url {url}")) == 0
    request = original.references["base1"].request
    assert [request[name] for name in ("method", "context_length", "stride")] == ["sliding", 4096, 1024]
    content = b"".join(file.read_bytes() for file in sorted(tmp_path.glob("v1/*")))
    words = f"categories v1, 261 rows, sha256 {hashlib.sha256(content).hexdigest()[:12]}"
    for kind in ("kld", "perplexity"):
        capsys.readouterr()
        assert main(f"compare {kind}1.json --resamples 100 --write-card {kind}.md".split()) == 0
        printed = capsys.readouterr().out
        assert words in Path(f"{kind}.md").read_text()
        assert re.search(f"{words}.*\n.*other runs of --preset categories", printed)
        assert [label for label in LABELS if re.search(f"^{label} ", printed, re.MULTILINE)] == LABELS
        assert main(["compare", f"{kind}1.json", f"{kind}2.json"]) == 1
        assert f"the text is {words} in the first and categories v2, " in capsys.readouterr().err
