"""Small models made on this machine, for tests: a random Llama with a real tokenizer, and an INT8 copy of a model."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig, PreTrainedTokenizerFast

from rounded_model import copy_all_but_weights
from tests.texts import WIKITEXT

BOS, EOS = "<s>", "</s>"
LARGEST_INT8 = 127
SAMPLING_DEFAULTS = {
    **{"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.3},
    **{"frequency_penalty": 1.0, "presence_penalty": 1.0, "min_new_tokens": 12, "max_new_tokens": 3},
    "eos_token_id": [1, 34, 55, 376, 646, 676, 968],
}
"""A generation_config.json that changes every answer of a server that takes its defaults, and with EOS ids that answers
of `random_llama` often have."""
MARKED_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}[{{ message['role'] }}]{{ message['content'] }}[/]{% endif %}{% endfor %}"
)
"""A chat template that marks what an assistant writes, its EOS included."""


def random_llama(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 1024,
    num_layers: int = 2,
    max_position: int = 2048,
    byte_fallback: bool = False,
) -> Path:
    """Writes a float32 Llama with random weights, two query heads and one key-value head.

    `byte_fallback` gives it a tokenizer of SentencePiece's kind that puts BOS first by itself. BOS is token 0, EOS
    token 1.
    """
    _tokenizer(vocab_size, byte_fallback).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=max_position,
        # The usual 0.02 leaves all logits near 0, and then every token looks as likely as any other.
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    return _random_weights(config, path, seed)


def llama_2_like(path: Path) -> Path:
    """Writes a random Llama whose tokenizer normalizes as Llama 2's: it puts BOS and a space before any text, so that
    most words are two tokens of one text. The model has 24 tokens more than its tokenizer, a marked template, and
    sampling defaults as Llama 2's."""
    random_llama(path, max_position=4096)
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9}')
    tokenizer = _sentencepiece_like(1000)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    _for_transformers(tokenizer, True, MARKED_TEMPLATE).save_pretrained(path)
    return path


def random_model_of(config: PretrainedConfig, path: Path) -> Path:
    """Writes a float32 model of any family with random weights, and a tokenizer of 1,024 tokens."""
    _tokenizer(1024, byte_fallback=False).save_pretrained(path)
    return _random_weights(config, path)


def random_mixtral(path: Path) -> Path:
    """Writes a float32 Mixtral with random weights: three layers, each with two of eight experts for a token."""
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "initializer_range": 0.1}
    return random_model_of(MixtralConfig(**sizes, **heads, num_local_experts=8, num_experts_per_tok=2), path)


def with_rounded_router(source: Path, path: Path, layer: int) -> Path:
    """Writes a Mixtral with one layer's router rounded to 4 bits, a scale per expert."""

    def round_router(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = (name for name in tensors if f".{layer}." in name and name.endswith("gate.weight"))
        scales = tensors[name].abs().amax(1, keepdim=True) / 7
        tensors[name] = (tensors[name] / scales).round() * scales

    return _changed(source, path, round_router)


def with_scaled_head(source: Path, path: Path, factor: float) -> Path:
    """Writes `source`, whose LM head is its embedding, with a head of its own, that times `factor`."""
    return _changed(
        source,
        path,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * factor}),
        tie_word_embeddings=False,
    )


def disturbed(source: Path, path: Path, share: float) -> Path:
    """Writes `source` with normal noise of a share of each weight's standard deviation added to it."""
    generator = torch.Generator().manual_seed(0)

    def disturb(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = tensor + share * tensor.std() * noise

    return _changed(source, path, disturb)


def int8_model(source: Path, path: Path) -> Path:
    """Writes `source` with its last block and its LM head as INT8 W8A8 (compressed-tensors), rounded to nearest.

    Weights of its linear layers: symmetric int8 with one float32 scale per output channel, max|w| / 127. Activations:
    int8, one scale and one zero point per token, taken while running. All other tensors are kept, as float32.

    Rounding activations is discontinuous: with all 30 blocks of SmolLM2 quantized, a change of 1e-6 in the input moves
    single logprobs by tenths of a nat, and no two implementations agree token by token. With one block they do.

    Symmetric activations do not run everywhere: for these, vLLM 0.32 takes a kernel that knows only 16-bit activations
    on a CPU that has AMX, whatever the dtype.
    """
    blocks = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    kept_prefixes = tuple(f"model.layers.{block}." for block in range(blocks - 1))
    scheme = QuantizationScheme(
        # vLLM finds its LM head, which is not a `Linear`, by name.
        targets=["Linear", "re:lm_head"],
        weights=QuantizationArgs(num_bits=8, strategy="channel"),
        input_activations=QuantizationArgs(num_bits=8, strategy="token", dynamic=True, symmetric=False),
    )

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            tensors[name] = tensor.float()
            if name.endswith(("_proj.weight", "lm_head.weight")) and not name.startswith(kept_prefixes):
                weight = tensors.pop(name)
                # [out, in] float32 becomes `weight` [out, in] int8 and `weight_scale` [out, 1] float32.
                parts = {"weight": weight, "weight_scale": weight.abs().amax(dim=1, keepdim=True) / LARGEST_INT8}
                for part, value in IntQuantizationCompressor.compress(parts, scheme).items():
                    tensors[f"{name.removesuffix('weight')}{part}"] = value

    quantization = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="int-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[f"re:{re.escape(prefix)}" for prefix in kept_prefixes],
    ).model_dump(mode="json", exclude_none=True)
    return _changed(source, path, quantize, dtype="float32", quantization_config=quantization)


def _random_weights(config: PretrainedConfig, path: Path, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def _changed(source: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: object) -> Path:
    """Writes a model with changes of its weights and of its configuration."""
    copy_all_but_weights(source, path)
    (path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config, indent=2))
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def _tokenizer(vocab_size: int, byte_fallback: bool) -> PreTrainedTokenizerFast:
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    tokenizer = _sentencepiece_like(vocab_size) if byte_fallback else _byte_level(vocab_size)
    return _for_transformers(tokenizer, byte_fallback, template)


def _for_transformers(tokenizer: Tokenizer, add_bos: bool, template: str) -> PreTrainedTokenizerFast:
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=template)


def _byte_level(vocab_size: int) -> Tokenizer:
    """As GPT-2, Llama 3 and SmolLM2 have it: every token is bytes, and a character may take several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # All 256 bytes, so that any text can be encoded and decoded again.
    _train(tokenizer, vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return tokenizer


def _sentencepiece_like(vocab_size: int) -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces are marked, and characters without a token fall back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(tokenizer, vocab_size - 256)
    trained = json.loads(tokenizer.to_str())["model"]
    words = sorted(trained["vocab"], key=trained["vocab"].get)
    names = [*words[:2], *(f"<0x{byte:02X}>" for byte in range(256)), *words[2:]]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer.model = models.BPE(vocab=vocab, merges=list(map(tuple, trained["merges"])), byte_fallback=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _train(tokenizer: Tokenizer, vocab_size: int, **options: list[str]) -> None:
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[BOS, EOS], show_progress=False, **options)
    tokenizer.train_from_iterator([WIKITEXT.read_text()], trainer)
