"""A W4A16 copy of a model, calibrated with GPTQ by llm-compressor.

    PYTHONPATH=SITE python bench/calibrate.py MODEL COPY [--ignore NAME ...] [--samples 200] [--length 512]

llm-compressor needs another compressed-tensors than vLLM, so it is in a folder of its own, SITE (bench/README.md has
the packages). Half of the samples are text that MODEL generates at temperature 1 after its BOS token, the others are
spread over Python's language reference, `pydoc_data.topics` of the Python that runs this: do not measure on that.
Calibrated on the reference alone, a copy is better there and worse on other text. `--ignore` takes names and patterns
as in the recipe of `ppl-client layers`.
"""

import argparse
import sys
import time
from math import gcd
from os import environ
from pathlib import Path
from pydoc_data.topics import topics

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from quantized_oracle import DEVICE
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rounded_model import copy_all_but_weights


def generated_samples(model: PreTrainedModel, number: int, length: int) -> list[list[int]]:
    """Texts that the model samples from its whole distribution."""
    torch.manual_seed(0)
    first = torch.full((number, 1), model.config.bos_token_id, device=model.device)
    sizes = {"min_new_tokens": length - 1, "max_new_tokens": length - 1}
    samples: list[list[int]] = model.generate(first, do_sample=True, temperature=1.0, top_k=0, **sizes).tolist()
    return samples


def reference_samples(tokenizer: PreTrainedTokenizerBase, number: int, length: int) -> list[list[int]]:
    """Windows of the reference that do not overlap, each after the tokens that the tokenizer puts first.

    Raises:
        SystemExit: the reference is too short.
    """
    first: list[int] = tokenizer("")["input_ids"]
    tokens = tokenizer("\n\n".join(topics.values()), add_special_tokens=False)["input_ids"]
    step, size = len(tokens) // number, length - len(first)
    if step < size:
        raise SystemExit(f"{number} samples of {length} tokens are more than the {len(tokens):,} of pydoc_data.topics")
    return [first + tokens[place * step : place * step + size] for place in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("copy", type=Path)
    parser.add_argument("--ignore", nargs="+", default=["lm_head"], help="modules to leave in 16 bits")
    parser.add_argument("--samples", type=int, default=environ.get("CALIBRATION_SAMPLES", "200"))
    parser.add_argument(
        "--length", type=int, default=environ.get("CALIBRATION_LENGTH", "512"), help="tokens of a sample"
    )
    options = parser.parse_args()
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = gcd(128, model.config.hidden_size, model.config.intermediate_size)
    half = options.samples // 2
    samples = generated_samples(model.to(DEVICE), half, options.length)
    samples += reference_samples(tokenizer, options.samples - half, options.length)
    batches = DataLoader([{"input_ids": torch.tensor([sample])} for sample in samples], batch_size=None)
    modifier = GPTQModifier(config_groups={"group_0": scheme}, ignore=options.ignore)
    oneshot(
        model=model.cpu(),
        tokenizer=tokenizer,
        dataset=batches,
        num_calibration_samples=options.samples,
        recipe=modifier,
    )
    copy_all_but_weights(options.model, options.copy)
    model.save_pretrained(options.copy, save_compressed=True)
    print(f"{options.copy}: {options.samples} samples of {options.length} tokens, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
