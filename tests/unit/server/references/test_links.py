"""Links and plain files in the folder of references."""

import os
from pathlib import Path

from reference_setup import create, files

from scoremode_server.references.directory import ReferenceDirectory


def test_deleting_a_link_leaves_what_it_leads_to_and_nothing_else(tmp_path: Path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    create(elsewhere)
    before = files(elsewhere)
    root.mkdir()
    (root / "link").symlink_to(elsewhere / "base")
    (root / "broken").symlink_to(elsewhere / "none")
    (root / "file").write_text("")
    directory = ReferenceDirectory(root)
    for name in ("link", "broken", "file"):
        directory.delete(name)
    assert os.listdir(root) == []
    assert files(elsewhere) == before
