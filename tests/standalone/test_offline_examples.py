"""The examples of README.md and docs/ that make an engine of their own, with a small model in the place of MODEL."""

from pathlib import Path

from tests.doc_examples import examples, run

EXAMPLES = examples('LLM("MODEL"')
# An engine takes long to start: examples that make the same one share it.
ONE_ENGINE = """\
import functools, os
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
import vllm
vllm.LLM = functools.cache(functools.partial(vllm.LLM, enforce_eager=True))
"""
THE_END = "if __name__ == '__main__': print('the end of an example', flush=True)\n"


def test_examples_without_a_server(random_model: Path, tmp_path: Path):
    code = ONE_ENGINE + "".join(code + THE_END for _, code in EXAMPLES.values())
    *printed, _ = run("python", code.replace('"MODEL"', f'"{random_model}"'), tmp_path).split("the end of an example\n")
    assert len(printed) == len(EXAMPLES)
    assert all(text.strip() for text in printed)
