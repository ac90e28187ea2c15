"""`--preset categories`: the texts that come with the package, and runs over them."""

import ast
import hashlib
import json
import re
import shlex
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


def documents(label: str) -> list[str]:
    corpus = load_corpus(preset="categories")
    return [text for text, name in zip(corpus.documents, corpus.labels, strict=True) if name == label]


def test_a_changed_text_is_another_version():
    assert load_corpus(preset="categories").fingerprint == HASHES.get(CATEGORIES_VERSION), (
        "the texts have changed: add 1 to CATEGORIES_VERSION in scoremode/runs/presets.py, and the hash here"
    )


def test_each_category_has_enough_documents_for_an_interval():
    corpus = load_corpus(preset="categories")
    assert [*dict.fromkeys(corpus.labels)] == LABELS
    assert {label: len(documents(label)) for label in LABELS} == {**dict.fromkeys(LABELS, 20), "long-document": 1}
    assert all(text.strip() == text != "" and "\r" not in text for text in corpus.documents)


def test_sources_describes_every_file_as_it_is():
    rows = re.findall(
        r"\| `(.+)\.txt` \| .+ \| (\d+) \| ([\d,]+) \| ([\d,]+) \|", (_CATEGORIES / "SOURCES.md").read_text()
    )
    sizes = {file.stem: file.stat().st_size for file in _CATEGORIES.glob("*.txt")}
    assert {name: int(size.replace(",", "")) for name, _, size, _ in rows} == sizes
    assert {name: int(number) for name, number, _, _ in rows} == {label: len(documents(label)) for label in LABELS}
    assert sum(sizes.values()) < 300_000
    assert sum(int(tokens.replace(",", "")) for *_, tokens in rows) < 60_000


def test_parts_are_what_their_labels_say():
    for text in documents("code-python"):
        ast.parse(text)
    for text in documents("tool-calls"):
        tools, *messages = map(json.loads, text.split("\n"))
        calls = [call for message in messages for call in message.get("tool_calls", [])]
        assert calls
        for call in calls:
            [parameters] = [tool["parameters"] for tool in tools["tools"] if tool["name"] == call["name"]]
            assert {*parameters["required"]} <= call["arguments"].keys() <= parameters["properties"].keys()
    for label, letters in {"russian": r"[\u0430-\u0451]", "chinese": r"[\u4e00-\u9fff]"}.items():
        assert all(len(re.findall(letters, text)) > len(text) / 2 for text in documents(label))
    assert all(text.count("$") or text.count(r"\[") for text in documents("mathematics"))


def test_runs_and_cards_name_the_set_and_only_runs_over_one_set_are_compared(tmp_path, monkeypatch, capsys):
    """On two versions of the set that have the beginning of each document."""
    monkeypatch.chdir(tmp_path)
    original = FakeServer()
    copy = FakeServer(noise=0.5, references=original.references)
    for version in (1, 2):
        folder = tmp_path / str(version)
        folder.mkdir()
        for label in LABELS:
            starts = [f"{version}{text[:20]}" for text in documents(label)]
            (folder / f"{label}.txt").write_text("\n%\n".join(starts) + "\n")
    with serve(original) as base_url, serve(copy) as copy_url:
        for version in (1, 2):
            monkeypatch.setattr("scoremode.runs.corpora._CATEGORIES", tmp_path / str(version))
            monkeypatch.setattr("scoremode.runs.presets.CATEGORIES_VERSION", version)
            for command, url in (
                (f"record --preset categories --reference base{version}", base_url),
                (f"kld --reference base{version} --output kld{version}.json", copy_url),
                (f"--preset categories --context-length 64 --output perplexity{version}.json", copy_url),
            ):
                assert main(shlex.split(f"{command} --quiet --url {url}")) == 0
    request = original.references["base1"].request
    assert [request[name] for name in ("method", "context_length", "stride")] == ["sliding", 4096, 1024]
    assert [len(request[name]) for name in ("texts", "labels")] == [261, 261]
    set_in_words = re.escape(f"categories v1, 261 rows, sha256 {digest(tmp_path / '1')[:12]}")
    for kind in ("kld", "perplexity"):
        capsys.readouterr()
        assert main(f"compare {kind}1.json --resamples 100 --write-card {kind}.md".split()) == 0
        assert re.search(set_in_words, (tmp_path / f"{kind}.md").read_text())
        printed = capsys.readouterr().out
        assert re.search(f"{set_in_words}.*\n.*other runs of --preset categories", printed)
        assert [label for label in LABELS if re.search(f"^{label} ", printed, re.MULTILINE)] == LABELS
        assert main(["compare", f"{kind}1.json", f"{kind}2.json"]) == 1
        assert re.search(f"the text is {set_in_words} in the first and categories v2, ", capsys.readouterr().err)


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.iterdir()))).hexdigest()
