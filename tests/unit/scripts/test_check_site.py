"""`make docs` fails for a link, a picture or an anchor of the site that leads nowhere."""

import pytest

from check_site import broken_links


@pytest.mark.parametrize(
    ("element", "is_broken"),
    [
        ('<a href="docs/page.html#there">', False),
        ('<a href="#here">', False),
        ('<a href="data.json">', False),
        ('<img src="docs/a%20picture.png#only-light">', False),
        ('<a href="https://example.com/nowhere#x">', False),
        ('<a href="docs/page.html#nowhere">', True),
        ('<a href="#there">', True),
        ('<a href="docs/other.html">', True),
        ('<a href="docs">', True),
        ('<img src="docs/picture.png">', True),
    ],
)
def test_a_link_leads_to_a_file_and_an_element(tmp_path, element, is_broken):
    (tmp_path / "docs").mkdir()
    for name in ("data.json", "docs/a picture.png"):
        (tmp_path / name).touch()
    (tmp_path / "docs" / "page.html").write_text('<h2 id="there">')
    (tmp_path / "index.html").write_text(f'<h1 id="here">{element}')
    assert bool(broken_links(tmp_path)) == is_broken
