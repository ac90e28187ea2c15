"""What Scoremode uses of vLLM that vLLM does not promise to keep: all that is replaced, wrapped, overridden or private.

`private.toml` next to this file lists it. `manifest.json` has a hash of each one's source text for every supported
version, and of every name that Scoremode imports from vLLM. `scripts/check_vllm.py VERSION --write` writes it.
"""

import json
import tomllib
from pathlib import Path

HASHES_FILE = Path(__file__).with_name("manifest.json")
PRIVATE_FILE = Path(__file__).with_name("private.toml")

Hashes = dict[str, dict[str, str | None]]
"""Version -> "module:name" -> hash of the source text, None where that version has no such name."""


def recorded_hashes() -> Hashes:
    """The content of `manifest.json`."""
    hashes: Hashes = json.loads(HASHES_FILE.read_text(encoding="utf-8"))
    return hashes


PRIVATE: dict[str, str] = {
    f"{module}:{name}": why
    for module, names in tomllib.loads(PRIVATE_FILE.read_text(encoding="utf-8")).items()
    for name, why in names.items()
}
"""What is listed: "module:name" -> what is done with it. Names are dotted inside the module, such as `Class.method`;
`Class.*` is the set of a class's names."""
