"""Compare what Scoremode uses of vLLM with the newest version that it knows, without installing or importing either.

python scripts/check_vllm.py VERSION             print what is the same, changed (with the diff) or gone in VERSION
python scripts/check_vllm.py VERSION --write     and record VERSION's hashes: from then on Scoremode runs on it

Compared is every name in `vllm_compat/private.toml` and every name that server/ imports from vLLM, by syntax tree, so
that comments and formatting do not count. The exit status is 0 only if all hashes are those recorded for VERSION.
Wheels are kept in .cache/vllm-wheels, or under SCOREMODE_CACHE.
"""

import argparse
import ast
import difflib
import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from scoremode_server.vllm_compat.versions import HASHES_FILE, PRIVATE, Sources, digest, recorded_hashes
from vllm_sources import PACKAGE, segment

ROOT = Path(__file__).parents[1]
SERVER = ROOT / "server" / "scoremode_server"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One name in two versions. `status` is same, changed or gone; `diff` is of the source texts where they changed."""

    key: str
    status: str
    diff: str = ""


def wheel_sources(version: str) -> Sources:
    """The source files of a version, in its wheel, which is downloaded unless it is in the cache.

    Raises:
        subprocess.CalledProcessError: pip cannot download it.
    """
    folder = Path(os.environ.get("SCOREMODE_CACHE", ROOT / ".cache")) / "vllm-wheels"
    pattern = f"vllm-{version}-*.whl"
    if not any(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(folder), f"vllm=={version}"], check=True)
    return Sources(zipfile.Path(next(folder.glob(pattern))))


def imported_names(folder: Path, sources: Sources) -> set[str]:
    """The names that the modules in a folder import from vLLM, as "module:name"; if they import a whole module, the
    names they use of it."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in folder.rglob("*.py")]
    return {key for tree in trees for key in _imported_names(tree, sources)}


def _imported_names(tree: ast.Module, sources: Sources) -> Iterator[str]:
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.ImportFrom) or (statement.module or "").partition(".")[0] != PACKAGE:
            continue
        for alias in statement.names:
            if sources.module(submodule := f"{statement.module}.{alias.name}") is None:
                yield f"{statement.module}:{alias.name}"
                continue
            bound = alias.asname or alias.name
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == bound:
                    yield f"{submodule}:{node.attr}"


def used_names(sources: Sources) -> list[str]:
    """All that Scoremode uses of vLLM, as "module:name"."""
    return sorted(PRIVATE.keys() | imported_names(SERVER, sources))


def compare(key: str, before: Sources, after: Sources) -> Comparison:
    """One name in two versions. A name that neither has is the same: it belongs to a third."""
    old, new = segment(before, key), segment(after, key)
    if old == new or (old is not None and new is not None and _tree(old) == _tree(new)):
        return Comparison(key, "same")
    if new is None:
        return Comparison(key, "gone")
    lines = difflib.unified_diff((old or "").splitlines(), new.splitlines(), "known", "found", lineterm="")
    return Comparison(key, "changed", "\n".join(lines))


def _tree(text: str) -> str:
    return ast.dump(ast.parse(text))


def record(version: str, hashes: dict[str, str | None]) -> None:
    """Replace the hashes of a version in the manifest."""
    recorded = recorded_hashes() | {version: hashes}
    ordered = {version: recorded[version] for version in sorted(recorded, key=Version)}
    HASHES_FILE.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


def check(version: str, write: bool = False) -> bool:
    """Print the comparison of a version; whether all is as recorded for it."""
    newest = max(recorded_hashes() or [version], key=Version)
    known, found = wheel_sources(newest), wheel_sources(version)
    names = used_names(known)
    comparisons = [compare(key, known, found) for key in names]
    for each in comparisons:
        print(f"{each.status:8} {each.key}  ({PRIVATE.get(each.key, 'imported')})")
        if each.diff:
            print(each.diff, end="\n\n")
    hashes = {key: digest(segment(found, key)) for key in names}
    if write:
        record(version, hashes)
    counts = Counter(comparison.status for comparison in comparisons)
    totals = ", ".join(f"{counts[status]} {status}" for status in ("same", "changed", "gone"))
    print(f"\nvLLM {version} compared with {newest}, the newest version known: {totals}")
    return _is_as_recorded(version, hashes)


def _is_as_recorded(version: str, hashes: dict[str, str | None]) -> bool:
    recorded = recorded_hashes().get(version)
    if recorded is None:
        print(f"vLLM {version} is not in the manifest")
        return False
    # Not None, which is the hash of a name that a version lacks.
    differing = [key for key in sorted({*hashes, *recorded}) if hashes.get(key, "") != recorded.get(key, "")]
    print(
        f"vLLM {version} compared with its own manifest: {len(hashes)} names, {len(differing)} differ",
        *differing,
        sep="\n  ",
    )
    return not differing


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", metavar="VERSION", help="such as 0.33.0")
    parser.add_argument("--write", action="store_true", help="record this version's hashes")
    options = parser.parse_args()
    return 0 if check(options.version, options.write) else 1


if __name__ == "__main__":
    sys.exit(main())
