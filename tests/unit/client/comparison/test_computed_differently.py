"""A comparison says where two runs, or a run and its reference, differ in GPUs or kernels."""

import numpy as np
from run_files import made_up_nlls, made_up_reference, write_kld_run, write_perplexity_run

from scoremode.comparison import compare, load_run
from scoremode.comparison.report import write_report
from scoremode.comparison.tables import as_markdown, as_text
from scoremode.wire.protocol import ComputedBy

A100 = ComputedBy(
    device="NVIDIA A100",
    kernels=["Linear: gemm"],
    attention_backends=["FLASH_ATTN 2"],
    num_devices=1,
    model_runner="v2",
)
H200 = A100.model_copy(update={"device": "NVIDIA H200", "attention_backends": ["FLASH_ATTN 3"], "num_devices": 8})
NOT_ALIKE = "Not all was computed alike"


def run_of(tmp_path, label, computed_by, **server):
    server["computed_by"] = None if computed_by is None else computed_by.model_dump()
    path = write_perplexity_run(tmp_path / f"{label}.json", made_up_nlls(1), server=server)
    return load_run(path, label)


def sentence(*runs) -> str:
    lines = [line for line in as_text(compare(runs, num_resamples=50)).splitlines() if line.startswith(NOT_ALIKE)]
    assert len(lines) < 2
    return lines[0] if lines else ""


def test_runs_on_other_gpus_are_named_in_every_table_and_the_report(tmp_path):
    runs = [run_of(tmp_path, name, by) for name, by in {"one": A100, "two": H200, "three": A100, "old": None}.items()]
    found = sentence(*runs)
    assert found == (
        f"{NOT_ALIKE}, which may be a part of the differences. device: NVIDIA A100 (one, three), NVIDIA H200 (two); "
        "attention: FLASH_ATTN 2 (one, three), FLASH_ATTN 3 (two)."
    )
    comparison = compare(runs, num_resamples=50)
    assert "device: NVIDIA A100 (one, three)" in as_markdown(comparison)
    write_report(comparison, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert NOT_ALIKE in html
    assert "device NVIDIA H200; number of devices 8; model runner v2; attention FLASH_ATTN 3; kernels Linear" in html


def test_other_dtypes_are_named(tmp_path):
    one, two = (run_of(tmp_path, name, None, dtype=name) for name in ("float32", "bfloat16"))
    assert sentence(one, two).endswith("differences. dtype: float32 (float32), bfloat16 (bfloat16).")


def test_runs_that_were_computed_alike_or_do_not_say_are_not_named(tmp_path):
    assert not sentence(run_of(tmp_path, "one", A100), run_of(tmp_path, "two", A100))
    assert not sentence(run_of(tmp_path, "one", A100), run_of(tmp_path, "old", None))
    replicas = A100.model_copy(update={"num_devices": 8, "data_parallel_size": 8})
    assert not sentence(run_of(tmp_path, "one", A100), run_of(tmp_path, "eight", replicas))


def test_kernels_are_compared_among_equal_quantizations(tmp_path):
    marlin, machete = (A100.model_copy(update={"kernels": [name]}) for name in ("Marlin", "Machete"))
    base = run_of(tmp_path, "base", A100)
    quantized = [run_of(tmp_path, by.kernels[0], by, quantization="awq") for by in (marlin, machete)]
    assert not sentence(base, quantized[0])
    assert "kernels: Marlin (Marlin), Machete (Machete)." in sentence(base, *quantized)


def test_a_reference_of_another_gpu_is_named_once(tmp_path):
    reference = made_up_reference(computed_by=A100)
    nlls = made_up_nlls(1)
    runs = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.json"
        server = {"computed_by": H200.model_dump()}
        write_kld_run(path, nlls, np.full(len(nlls), 0.5), reference=reference, server=server)
        runs.append(load_run(path, name))
    assert "device: NVIDIA H200 (one, two), NVIDIA A100 (reference base)" in sentence(*runs)
