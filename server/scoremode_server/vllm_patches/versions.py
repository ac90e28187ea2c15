"""Which versions of vLLM Scoremode runs on, and with which of its API servers."""

import os
from pathlib import Path

from scoremode_server.vllm_patches.manifest import PRIVATE, Hashes, recorded_hashes
from scoremode_server.vllm_patches.source import Sources, digest

SUPPORTED = ">=0.32,<0.34"
SUPPORTED_SERIES = ("0.32.", "0.33.")
RUST_FRONTEND_VARIABLE = "VLLM_USE_RUST_FRONTEND"


def require_supported() -> None:
    """Make sure that the installed vLLM is one that Scoremode runs on: a release that the manifest knows, or another
    one in the supported range, if all that is private has the same source text as in one that the manifest knows.

    Raises:
        RuntimeError: it is not; the message says what changed. Or the API server is that in Rust, without plugins.
    """
    import vllm

    if os.environ.get(RUST_FRONTEND_VARIABLE, "0") != "0":
        raise RuntimeError(
            f"{RUST_FRONTEND_VARIABLE}={os.environ[RUST_FRONTEND_VARIABLE]}: vLLM's API server in Rust has none of "
            f"Scoremode's routes. Unset {RUST_FRONTEND_VARIABLE}"
        )

    hashes = recorded_hashes()
    # Builds for one platform differ in the local part only: 0.32.0+cpu.
    version = str(vllm.__version__).partition("+")[0]
    if version in hashes:
        return
    refusal = f"Scoremode runs on vLLM {' and '.join(hashes)} (range: {SUPPORTED}), and found vLLM {vllm.__version__}"
    if not version.startswith(SUPPORTED_SERIES):
        raise RuntimeError(f"{refusal}. Install one of these: pip install 'vllm{SUPPORTED}'")
    closest, changes = closest_release(hashes, Sources(Path(vllm.__file__).parents[1]))
    if changes:
        raise RuntimeError(f"{refusal}, which differs from {closest} in what Scoremode patches: {', '.join(changes)}")


def closest_release(hashes: Hashes, sources: Sources) -> tuple[str, list[str]]:
    """The recorded release that differs least from these sources in what is private, and the names that differ."""
    found = {key: digest(sources.segment(key)) for key in PRIVATE}
    differences = {
        version: [
            f"{key} ({'gone' if now is None else 'changed'})" for key, now in found.items() if recorded.get(key) != now
        ]
        for version, recorded in hashes.items()
    }
    return min(differences.items(), key=lambda difference: len(difference[1]))
