"""`make lint` fails for prose that stops a reader."""

import sys

import pytest

import check_docstrings

BEGINNINGS = '''"""{0} a module."""

# {0} a comment.
# {1} its second line.
FIRST = 1  # {1} a comment at the end of a line.
"""{1} a constant."""


class Class:
    """{1} a class."""

    field: int
    """
    {0} a field."""

    async def method(self):
        """{0} a method.

        {1} its second paragraph.
        """
        return """{1} a string."""
'''


def findings(monkeypatch, *places):
    monkeypatch.setattr(sys, "argv", ["check_docstrings.py", *map(str, places)])
    try:
        check_docstrings.main()
    except SystemExit as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "beginning",
    [
        *("Of", "What", "That", "Which", "With", "In which", "By", "Those", "These"),
        *("None that", "Not for", "Nothing", "The same of", "As of"),
    ],
)
def test_docs_and_comments_do_not_begin_without_a_subject(tmp_path, monkeypatch, beginning):
    file = tmp_path / "some.py"
    for beginnings, lines in (((beginning, "Offset of"), [1, 3, 13, 17]), (("Offset of", beginning), [5, 6, 10])):
        file.write_text(BEGINNINGS.format(*beginnings))
        *found, last = findings(monkeypatch, tmp_path)
        assert last == f"{len(lines)} findings"
        message = f"a docstring or comment begins with {beginning}: write a sentence with a verb"
        assert set(found) == {f"{file}:{line}: {message}" for line in lines}


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("`x` is", " no ", "file"), "is not"),
        (("The names are\n    # no", " reference's"), "is not"),
        (("The sweep goes", " on after it"), "resume or continue"),
        (("the like", "liest token"), "top or most likely"),
        (("one a", " window"), "one per"),
        (("a text of", " so many tokens"), "the number itself"),
    ],
)
@pytest.mark.parametrize("name", ["page.md", "page.js", "code.py"])
def test_phrases_are_found_with_what_replaces_them(tmp_path, monkeypatch, name, words, instead):
    (tmp_path / name).write_text(f"# Fine.\n# {''.join(words)}\n")
    (tmp_path / "text.txt").write_text("".join(words))
    found = findings(monkeypatch, tmp_path / name, tmp_path / "text.txt")
    assert [line.rpartition(": ")[2] for line in found] == [instead, "1 findings"]
    assert found[0].startswith(f"{tmp_path / name}:{2 + words[0].count(chr(10))}: ")


def test_plain_english_passes(tmp_path, monkeypatch):
    text = "There is no file, and it is no longer needed.\nRuns are told apart. It is one of the files."
    (tmp_path / "page.md").write_text(text)
    assert findings(monkeypatch, tmp_path) == []
