"""Plant faults in client and server, one at a time, and see which of them the tests find.

    python scripts/planted_faults.py [--only 1-12,40] [--engine] [--all] [--report FILE]

Each fault is one change of one file in a copy of the checkout, whose tests then run until one fails: those that are
listed with the fault, and with `--all`, if these pass, all unit tests of the client or of the server. `--engine` runs
the faults that only tests with a real engine can find.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = (".git", ".venv", ".cache", ".hypothesis", ".*_cache", "__pycache__", "node_modules")
# Tests that a checkout leaves out by default are among these, such as those in Triton's interpreter.
# What the plugins would rewrite has been imported before each run forks.
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-W", IMPORTED)
LONGEST_RUN = 1800
"""Seconds, after which tests hang, and so have found the fault."""

# Files, the tests that should notice first, and changes: of a text that the file has once, to another.
CLIENT_FAULTS = {
    "windows.py < test_windows.py": [
        ("max(reached, start + 1)", "max(reached, start)"),
        ("num_tokens - context_length, stride", "num_tokens - context_length + 1, stride"),
        ("context_length // 2 + 1, bos", "context_length // 2, bos"),
        ("num_tokens - context_length + 1, context_length", "num_tokens - context_length, context_length"),
        ("begin = 0 if bos_token_id is None else 1", "begin = 0"),
        ("Window(end - context_length - 1, end, reached)", "Window(reached - 1, end, reached)"),
        ("self.first_target - self.start + (self.leading_token is not None)", "self.first_target - self.start"),
    ],
    "wire/retries.py < test_retries.py": [
        ("self._num_failures > retries.max_retries", "self._num_failures >= retries.max_retries"),
        ("max(0.0, (when - datetime.now(UTC)).total_seconds())", "(when - datetime.now(UTC)).total_seconds()"),
        ("if is_over or (asked_wait is not None and asked_wait > longest):", "if is_over:"),
        ("(self.grace, self.first_contact, self.retry_for)", "(self.grace, self.first_contact)"),
        ("error, RETRIED_ERRORS) or not can_restart", "error, RETRIED_ERRORS)"),
    ],
    "runs/pool.py < test_pool.py": [
        ("client.address, error)\n            self._set_retries()", "client.address, error)"),
        ("server.in_flight < server.concurrency", "server.in_flight <= server.concurrency"),
    ],
    "runs/journal.py < test_journal.py": [
        ("self._file.truncate(size)", "self._file.seek(size)"),
        ('raise ValueError("a window that occurs twice, or is not of this run")', "return"),
    ],
    "runs/plan.py < test_journal.py test_divergence.py": [('            "model": self.model,\n', "")],
    "kld.py < test_kld.py test_divergence.py": [
        ("(values - values.mean()).mean() / (len(values) - 1)", "(values - values.mean()).mean() / len(values)"),
        ("np.square(residuals).sum() * len(sizes) / (len(sizes) - 1)", "np.square(residuals).sum()"),
        ("fraction * (len(ordered) - 1)", "fraction * len(ordered)"),
        ("-(-len(kld) // 100)", "max(1, len(kld) // 100)"),
    ],
    "comparison/bootstrap.py < comparison/test_bootstrap.py": [
        ("list(2 * wanted[", "list(wanted["),
        ("/ (counts @ sizes)[:, None]", "/ sizes.sum(axis=0)[:, None]"),
    ],
    "comparison/compare.py < comparison/test_compare.py": [
        ("if all(multiple is not None and", "if any(multiple is not None and"),
        ("if first.kind == second.kind and", 'if first.kind == second.kind == "perplexity" and'),
    ],
    "comparison/figures.py < comparison/test_comparison_tables.py comparison/test_report.py": [
        ("{number(scale * figure.stderr, digits)}", "{number(figure.stderr, digits)}")
    ],
    "corpus/documents.py < corpus/test_documents.py": [
        ("(answer.token_ids) > self.context_length", "(answer.token_ids) > self.pool.info.max_model_len")
    ],
    "corpus/output_file.py < corpus/test_corpus_files.py": [
        ("            self._file.truncate(size)", "            self._file.seek(size)")
    ],
    "corpus/rows.py < corpus/test_json_lines.py corpus/test_corpus_files.py": [
        ('promote_options="permissive"', 'promote_options="default"')
    ],
    "sweep/reuse.py < sweep/test_reuse.py": [
        ("file.stat().st_size, file.stat().st_mtime_ns)", "file.stat().st_size, 0)")
    ],
    "sweep/sweep.py < sweep/test_run_sweep.py": [("else self._is_reference_missing())", "else False)")],
}

SERVER_FAULTS = {
    "worker/row_scorer.py < worker/test_row_scorer.py references/worker/test_sinks.py": [
        ("max(part.position, spec.first - 1)", "max(part.position, spec.first)"),
        ("offset + end - 1)", "offset + end - 2)"),
        ("slice(start, start + piece.num_wanted)", "slice(piece.start, piece.start + piece.num_wanted)"),
        ("logits if num_rows == len(logits) else", "logits[slices[0].start : slices[-1].stop] if True else"),
        ("self.waiting.pop_all(self._ready(requests, head))", "self.waiting.pop_all(requests)"),
    ],
    "worker/waiting_rows.py < worker/test_row_scorer.py references/worker/test_sinks.py": [
        ("range(start, start + piece.num_rows)", "range(piece.start, piece.start + piece.num_rows)"),
        ("if piece.request in requests:", "if True:"),
    ],
    "worker/sinks.py < kernels/test_statistics.py": [
        ("chunk.add_up(sums).double()", "sums.double()"),
        ("scores, chunk.temperature)", "scores, 1.0)"),
        ("mean_square - mean.square()", "mean_square"),
    ],
    "kernels/fused_logprobs.py < kernels/test_statistics.py references/worker/test_kl_divergence.py": [
        ("gather_rows(shard.group, scores, temperature) if shard else scores", "scores"),
    ],
    "rows.py < test_rows.py engine references": [
        (" & ~computed.has_nan", ""),
        ("values if values.ndim == 1 else values.sum(1)", "values if values.ndim == 1 else values[:, 0]"),
    ],
    "worker/row_spec.py < worker/test_row_spec.py": [
        (" and not self.sinks:", ":"),
        (", repr(sorted(self.sinks.items()))", ""),
    ],
    "engine/store.py < engine/test_store.py": [
        ("blake2b(first, key=key", "blake2b(key=key"),
        ("len(data) - step + 1, step", "len(data) - step, step"),
        ("in reversed(block_hashes):\n            block = self", "in block_hashes:\n            block = self"),
        ("popitem(last=False)[1]) + BLOCK_OVERHEAD_BYTES", "popitem(last=False)[1])"),
        (
            "if not blocks or generation != self.generation or not self.is_usable:",
            "if not blocks or not self.is_usable:",
        ),
    ],
    "engine/engine.py < engine scoring/test_scorer.py": [
        ("repr((self._store.generation, adapter, salt,", "repr((self._store.generation, salt,"),
        ('f"{owner}.{salt}"', 'f"scoremode.{salt}"'),
    ],
    "engine/cached_request.py < engine": [
        ("num_left_out = -(-num_missing // size)", "num_left_out = num_missing // size"),
        (" and other.engine_pass.spec.num_top >= self.engine_pass.spec.num_top:", ":"),
    ],
    "engine/admission.py < engine/test_admission.py engine": [
        ("queue.add(-queue.num_sequences, -queue.num_tokens)", "queue.add(-queue.num_sequences, 0)"),
        ("self._waiting.setdefault(queue, line)", "self._waiting = {queue: line, **self._waiting}"),
        ("max(first.num_tokens / self.size.tokens, 1 / self.size.sequences)", "first.num_tokens / self.size.tokens"),
        ("chain(single, self._waiting.values())", "self._waiting.values()"),
    ],
    "engine/passes.py < engine": [("num_fed - num_known", "num_fed")],
    "kernels/torch_kernels.py < kernels/test_fused_logprobs.py references/worker/test_kl_divergence.py": [
        ("torch.ge(values", "torch.gt(values"),
        ("(column < columns)", "(column < logits.shape[1])"),
        (".masked_fill_(p == q, 0.0)", ""),
        ("    terms.masked_fill_(log_ratios == math.inf, math.inf)\n", ""),
    ],
    "kernels/fused_logprobs.py < kernels/test_fused_logprobs.py": [("candidates[part]", "candidates[: len(logits)]")],
    "kernels/reduced_rows.py < kernels": [("0.0)).div_(temperature))", "0.0)))")],
    "kernels/triton_kernels.py < kernels": [
        ('tl.sum(counts, 0) - tl.where(target == float("-inf"), padding, 0)', "tl.sum(counts, 0)"),
        ("tl.where(held, tl.maximum(logit, LOWEST), ", "tl.where(held, logit, "),
        ("sums * _exp(maxima - base, scale, SCALED)", "sums * tl.exp(maxima - base)"),
        ("1 / 2 + square * (1 / 24", "1 / 2 + square * (1 / 12"),
        ('if not (forward + backward < float("inf")):', 'if forward + backward == float("inf"):'),
    ],
    "rows.py < test_rows.py engine": [("np.flatnonzero(~trusted)[-1]", "np.flatnonzero(~trusted)[0]")],
    "worker/runners.py < worker/test_runners.py": [("position != rows.end", "False")],
    "vllm_compat/output_processor.py < vllm_compat/test_engine_client.py completions": [
        ("if not text or text.endswith(INCOMPLETE):", "if not text:")
    ],
    "http/requests.py < http": [("body += chunk", "body = bytearray(chunk)")],
    "http/middleware.py < http/test_middleware.py": [
        ('path.rstrip("/") in OPEN_PATHS', "path.startswith(tuple(OPEN_PATHS))")
    ],
    "http/requests.py < http/test_refused_requests.py": [('str(detail["loc"][0])', 'str(detail["loc"][-1])')],
    "references/comparison.py < references/test_kld_route.py references": [
        ("            indices.reverse()\n", ""),
        ("max(1, min(2, len(indices) - 1)) if", "None if"),
    ],
    "references/recording.py < references": [("windows, loads=2,", "windows, loads=9,")],
    "references/plans.py < references": [("    if stored.answers != new.answers:\n", "    if False:\n")],
    "completions/logprobs_json.py < completions": [
        ("lengths.cumsum() - lengths", "lengths.cumsum()"),
        ("shown.cumsum(axis=1) > num_top + 1", "shown.cumsum(axis=1) > num_top"),
        ("num_columns, style) for", "num_columns, Style(style.num_top, False)) for"),
    ],
    "scoring/tokenizer.py < completions/test_texts.py": [("text.endswith(before.lstrip(INCOMPLETE))", "True")],
    "http/json_fields.py < http/test_refused_requests.py": [("if field in fields", "if field in ()")],
    "references/files/manifest.py < references/files/test_tensors.py": [
        ("(_CHECKSUM, None) != _checksum(fields)", "(_CHECKSUM, None) not in (None, _checksum(fields))")
    ],
    "references/files/tensors.py < references/files/test_tensors.py": [
        ('        checksum.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())\n', ""),
    ],
    "references/files/directory.py < references/files/test_directory.py references/test_references_route.py": [
        ("_SHARD.fullmatch(path.name)", "_SHARD.search(path.name)"),
    ],
    "references/files/directory.py < references": [
        ("reference.manifest.identity != identity", "reference.name != name")
    ],
    "references/worker/expert_routes.py < references/worker/test_routers.py": [
        ("recorded).all(1, keepdim=True)", "recorded).any(1, keepdim=True)"),
        ("argsort(dim=2, descending=True, stable=True)", "argsort(dim=2, stable=True)"),
        ("weights = weights / weights.sum(-1, keepdim=True)", "pass"),
        ("scales[ids.flatten()] = ratios.flatten()", "pass"),
        ("if len(step.called) < len(self._routers):", "if False:"),
        (
            "slice(part.row, part.row + min(part.num_tokens, part.num_fed - part.position))",
            "slice(part.row, part.row + part.num_tokens)",
        ),
        ("experts[part.position : part.position + own.stop - own.start]", "experts[: own.stop - own.start]"),
        ("del router._compute_routing", "pass"),
    ],
    "references/worker/sinks.py < references/worker/test_sinks.py": [
        ("window.mark.num_fed - window.mark.num_scored + piece.first", "piece.first"),
        ("not self.mark.num_routed_layers or self.num_routed == end", "True"),
    ],
}

ENGINE_FAULTS = {
    "scoring/routes.py < test_chosen_tokens.py": [
        ("(rows.ranks == 1).all()", "(rows.ranks == 1).any()"),
        ("logprobs[:, 1 : 1 + sequence.num_candidates]", "logprobs[:, -sequence.num_candidates :]"),
    ],
    "scoring/text_windows.py < test_methods.py": [("        max_tokens -= len(token_ids)\n", "")],
    "scoring/sequences.py < test_chosen_tokens.py": [("(prompt.rstrip(), *(", "(prompt, *(")],
    "completions/handler.py < test_completions.py": [
        ("[] if request.max_tokens == 0 or request.logprobs is None", "[] if request.logprobs is None")
    ],
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A change that makes the product wrong, and where to look for a test that notices."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    all_tests: tuple[str, ...]
    """Where to look after that; empty for a fault that needs an engine."""


def listed(
    package: str, folder: str, faults: Mapping[str, Sequence[tuple[str, str]]], *, in_all: bool = True
) -> list[Fault]:
    """The faults of files of a package; the names of their tests are below a folder."""
    found = []
    for places, changes in faults.items():
        path, *names = places.replace("<", "").split()
        tests = tuple(f"{folder}/{name}" for name in names)
        # Triton's interpreter takes minutes, and what is tested there imports nothing but kernels.
        all_tests = (folder, *([] if path.startswith("kernels/") else [f"--ignore={folder}/kernels"])) if in_all else ()
        found += [Fault(f"{package}/{path}", old, new, tests, all_tests) for old, new in changes]
    return found


FAULTS = [
    *listed("client/scoremode", "tests/unit/client", CLIENT_FAULTS),
    *listed("server/scoremode_server", "tests/unit/server", SERVER_FAULTS),
    *listed("server/scoremode_server", "tests/e2e", ENGINE_FAULTS, in_all=False),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=numbers, default=range(1, len(FAULTS) + 1), help="numbers such as 1-12,40")
    parser.add_argument("--engine", action="store_true", help="the faults that need an engine, not the others")
    parser.add_argument("--all", action="store_true", help="where the listed tests pass, all unit tests")
    parser.add_argument("--report", type=Path, help="append a line per fault to this file")
    arguments = parser.parse_args()
    chosen = {number: FAULTS[number - 1] for number in arguments.only}
    chosen = {number: fault for number, fault in chosen.items() if bool(fault.all_tests) is not arguments.engine}
    os.environ.setdefault("SCOREMODE_CACHE", str(ROOT / ".cache"))
    if any(fault.path.startswith("server/") for fault in chosen.values()):
        import_what_takes_long()
    with copy_of_checkout() as folder:
        if failure := first_failure(folder, [test for fault in chosen.values() for test in fault.tests]):
            print(f"{failure} fails without a fault: nothing can be said of faults")
            return 1
        print("without a fault all listed tests pass", flush=True)
        missed = []
        for number, fault in chosen.items():
            started = time.monotonic()
            found_by = find(fault, folder, in_all=arguments.all)
            if found_by is None:
                missed.append(number)
            line = f"{number:2} {'missed' if found_by is None else 'found '} {time.monotonic() - started:4.0f} s  "
            line += f"{fault.path}: {fault.old.strip()!r}: {found_by}"
            print(line, flush=True)
            if arguments.report is not None:
                with arguments.report.open("a") as report:
                    report.write(f"{line}\n")
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found; missed: {', '.join(map(str, missed)) or 'none'}")
    return 0


def find(fault: Fault, folder: Path, *, in_all: bool) -> str | None:
    """The first test that fails for a fault, and passes without it."""
    with planted(fault, folder):
        found_by = first_failure(folder, fault.tests)
        if found_by is not None or not in_all:
            return found_by
        found_by = first_failure(folder, fault.all_tests)
    if found_by is not None and first_failure(folder, [found_by.partition("[")[0]]):
        raise SystemExit(f"{found_by} fails without a fault: nothing can be said of faults")
    return found_by


def numbers(text: str) -> list[int]:
    """Such as 1-12,40."""
    ends = [list(map(int, part.split("-"))) for part in text.split(",")]
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


@contextmanager
def copy_of_checkout() -> Iterator[Path]:
    """A copy of the sources and tests, in which files can be changed."""
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as scratch:
        folder = Path(scratch) / ROOT.name
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        yield folder


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Inside, the copy has the fault."""
    path = folder / fault.path
    text, times = path.read_text(), path.stat()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.path} has {text.count(fault.old)} times, instead of once: {fault.old!r}")
    faulty = text.replace(fault.old, fault.new)
    compile(faulty, path, "exec")
    path.write_text(faulty)
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def import_what_takes_long() -> None:
    """Import all modules of vLLM that the server uses, so that runs of its tests need not import them again."""
    found: set[str] = set()
    for path in (ROOT / "server").rglob("*.py"):
        found.update(
            re.findall(r"^(?:from|import) ((?:vllm|torch|transformers)[\w.]*)", path.read_text(), re.MULTILINE)
        )
    for name in sorted(found):
        importlib.import_module(name)


def first_failure(folder: Path, tests: Sequence[str]) -> str | None:
    """The first test that fails, or the first name if they hang; None where all pass."""
    if not tests:
        return None
    output = folder.parent / "output"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, tests, output))
    process.start()
    process.join(LONGEST_RUN)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return tests[0]
    if process.exitcode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"pytest ended with status {process.exitcode}:\n{output.read_text()[-4000:]}")
    return found[1]


def run_tests(folder: Path, tests: Sequence[str], output: Path) -> None:
    """In a process of its own: run tests of the copy, on the product in the copy, though another is installed."""
    os.setsid()
    os.chdir(folder)
    with output.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sources = [str(folder / "client"), str(folder / "server")]
    # The first path is that of this script.
    sys.path[:1] = [str(folder), *sources]
    # Bytecode goes by the size of a file and its age in seconds, and could be that of another fault.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    for name, source in zip(("scoremode", "scoremode_server"), sources, strict=True):
        assert name not in sys.modules
        assert str(importlib.import_module(name).__file__).startswith(source)
    # Folder by folder: pytest 9.1 loses the fixtures of a conftest.py that it comes back to.
    sys.exit(pytest.main([*PYTEST, *sorted(set(tests))]))


if __name__ == "__main__":
    sys.exit(main())
