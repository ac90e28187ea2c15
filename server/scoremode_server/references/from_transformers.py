"""Records references without vLLM: of a model of the transformers library, such as a trainer's own object with its own
forward pass. A Scoremode server compares with them like with its own. Imports neither vLLM nor FastAPI."""

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import align_module_device
from torch import nn
from xxhash import xxh3_128

from scoremode.metrics import perplexity
from scoremode.wire.protocol import ComputedBy, PerplexityWindow
from scoremode.wire.references import ReferenceLayers, ReferenceRequest
from scoremode_server.errors import RequestError
from scoremode_server.references.files.directory import NoReferenceError, ReferenceDirectory, StoredReference
from scoremode_server.references.files.manifest import HeadFormat, Manifest, Result
from scoremode_server.references.files.tensors import BrokenFileError
from scoremode_server.references.plans import check_same, flaw_of_cuts, plan_texts
from scoremode_server.references.streams import Cut, CutLayers, Stream
from scoremode_server.scoring.limits import Limits
from scoremode_server.scoring.model_files import model_identity
from scoremode_server.scoring.model_identity import ModelIdentity
from scoremode_server.scoring.text_windows import RunningPerplexity, TextWindows, cut_texts

CHECKED_TOKENS = 16
"""Tokens with which layers are checked: those of one sequence per boundary, all in one forward pass."""

ROWS_AT_ONCE = 256
"""Rows of logits that are in float64 at once."""

Forward = Callable[[torch.Tensor], Any]
"""Runs a model on token ids [sequences, tokens] int64 on the CPU. Returns logits [sequences, tokens, vocabulary], or an
object that has them as `logits`."""


def record(
    model: Any,
    tokenizer: Any,
    directory: Path | str,
    request: ReferenceRequest,
    *,
    forward: Forward | None = None,
    identity: ModelIdentity | None = None,
    on_window: Callable[[PerplexityWindow], object] = lambda window: None,
) -> StoredReference:
    """Record a model's distributions over a text as a reference. Call this again with the same arguments to resume.

    Args:
        model: A model of the transformers library. All its weights must be in this process, on any devices that it
            computes on. It is in evaluation mode meanwhile.
        tokenizer: Its tokenizer.
        directory: The folder of references: `--reference-dir` of the server that compares.
        request: The name, the text, how it is cut into windows, and `layers`, as for `POST /v1/references`.
        forward: Runs the model; by default `model(input_ids=..., use_cache=False)`.
        identity: Describes the model, as `identity_of` does; by default its fingerprint is that of its tensors.
        on_window: Called with each window that is recorded, or was before.

    Raises:
        RequestError: the model or the text cannot be recorded. Its subclass ConflictError: the name is that of another
            reference.
        WindowError: the windows do not fit the model or the method.
    """
    if request.messages is not None or request.answers is not None:
        raise RequestError("messages and answers are recorded on a server: give a text or token ids", "messages")
    if (head := model.get_output_embeddings()) is None:
        raise RequestError(f"{type(model).__name__} has no LM head", "model")
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) and _attention(model) == "sdpa":
        raise RequestError(
            f"{type(model).__name__}: the sdpa attention of transformers leaves out the config's "
            'attn_logit_softcapping: load the model with attn_implementation="eager"',
            "model",
        )
    # accelerate moves token ids to where it puts weights that are elsewhere.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    forward = forward or (lambda token_ids: model(input_ids=token_ids.to(device), use_cache=False))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            identity = identity or identity_of(model, tokenizer)
            texts = _cut(request, model, tokenizer, len(head.weight))
            return _Recorder(model, head, forward).record(Path(directory), request, texts, identity, on_window)
    finally:
        model.train(was_training)


def identity_of(
    model: Any, tokenizer: Any, checkpoint: str = "", revision: str | None = None, *, trust_remote_code: bool = False
) -> ModelIdentity:
    """Describe a model. If its weights are those of a checkpoint, given by its folder or its name on the hub, a server
    of that checkpoint in the same dtype has the same fingerprint, so that it can measure a noise floor. Otherwise the
    fingerprint is that of the tensors."""
    name = checkpoint or model.name_or_path or type(model).__name__
    config = SimpleNamespace(
        model=name,
        revision=revision,
        dtype=model.dtype,
        quantization=None,
        quantization_config=None,
        hf_overrides={},
        hf_config_path=None,
        model_weights="",
        hf_config=model.config,
        hf_text_config=model.config.get_text_config(),
        trust_remote_code=trust_remote_code,
    )
    load = SimpleNamespace(download_dir=None, load_format="auto" if checkpoint else "dummy")
    gpus = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    package = type(model).__module__.partition(".")[0]
    computed_by = ComputedBy(
        implementation=f"{package} {getattr(sys.modules[package], '__version__', '')}".rstrip(),
        attention_backends=[_attention(model)],
        device=torch.cuda.get_device_name(min(gpus, key=str)) if gpus else "cpu",
        num_devices=len(gpus) or 1,
    )
    identity = model_identity(SimpleNamespace(model_config=config, load_config=load), tokenizer, computed_by)
    return identity if checkpoint else identity.model_copy(update={"fingerprint": f"v2-tensors-{_digest(model)}"})


def _digest(model: nn.Module) -> str:
    """Make a digest of all stored tensors of a model."""
    digest, stored_names = xxh3_128(), {*model.state_dict()}
    for prefix, module in model.named_modules():
        with align_module_device(module):
            tensors = chain(module.named_parameters(prefix, recurse=False), module.named_buffers(prefix, recurse=False))
            for name, tensor in tensors:
                if name in stored_names:
                    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                    digest.update(_on_host(tensor, tensor.dtype).view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _cut(request: ReferenceRequest, model: Any, tokenizer: Any, vocab_size: int) -> TextWindows:
    """Cut a request's texts as a server does."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    adds_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def encode(texts: Sequence[str], add_special_tokens: bool) -> Any:
        return tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    core: Any = SimpleNamespace(
        limits=Limits(longest, vocab_size, 0, sys.maxsize, sys.maxsize),
        tokenizer=SimpleNamespace(
            encode_all=lambda *texts: asyncio.to_thread(encode, *texts),
            decode=lambda token_ids: asyncio.to_thread(tokenizer.decode, token_ids),
        ),
        info=SimpleNamespace(prefix_token_id=eos if bos is None else bos, chunk_token_id=bos if adds_bos else None),
    )
    # In a thread, because the caller's may run an event loop, as that of a notebook does.
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, cut_texts(request, core)).result()


@dataclass(slots=True)
class _Recorder:
    """Runs a model, and writes what a reference stores."""

    model: nn.Module
    head: nn.Module
    forward: Forward

    def record(
        self,
        directory: Path,
        request: ReferenceRequest,
        texts: TextWindows,
        identity: ModelIdentity,
        on_window: Callable[[PerplexityWindow], object],
    ) -> StoredReference:
        text, plan = plan_texts(texts, request.labels)
        first_window = text.window(0)[0][:-1]
        head, weights = self._head(first_window)
        layers, cuts = self._layers(first_window[:CHECKED_TOKENS], identity.dtype) if request.layers else (None, ())
        new = Manifest(
            identity=uuid.uuid4().hex,
            created=int(time.time()),
            model=identity,
            head=head,
            text=plan,
            corpus=request.corpus,
            layers=layers,
        )
        references = ReferenceDirectory(directory)
        try:
            reference = references.open(request.name)
            check_same(reference, new, text)
        except NoReferenceError:
            reference = references.create(request.name, new, text)
        if not reference.has_head():
            reference.write_head(*weights)
        running = RunningPerplexity(plan.num_windows)
        for index in range(plan.num_windows):
            try:
                logprobs = reference.read_window(index)
            except BrokenFileError:
                logprobs = self._window(reference, index, cuts)
            on_window(running.add(-logprobs.double().numpy()))
        result = Result.model_validate(perplexity(np.concatenate(running.nlls).tolist()), from_attributes=True)
        return references.update(reference, lambda _: {"result": result})

    def _run(self, batch: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on sequences of equal length. Returns the head's input [sequences, tokens, hidden], and logits
        [sequences, tokens, vocabulary]."""
        ids, inputs = torch.tensor(batch), list[torch.Tensor]()
        with self.head.register_forward_pre_hook(lambda _, args: inputs.extend(args)):
            output = self.forward(ids)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        if [part.shape[:-1].numel() for part in (*inputs, logits)] != [ids.numel()] * 2:
            raise RequestError(
                f"{type(self.model).__name__}: its LM head is not called once, with one row per token", "model"
            )
        return inputs[0].view(*ids.shape, -1), logits.view(*ids.shape, -1)

    def _head(self, token_ids: Sequence[int]) -> tuple[HeadFormat, list[torch.Tensor]]:
        """Find how the head's input becomes logits, and the head's weight and bias. RequestError if the model's own
        logits are not one projection of it that is capped and scaled."""
        hidden_states, own = (part[0, -ROWS_AT_ONCE:].cpu() for part in self._run([token_ids]))
        with align_module_device(self.head):
            weights = [_on_host(part, part.dtype) for part in self.head.parameters(recurse=False)]
        dtype = torch.promote_types(hidden_states.dtype, weights[0].dtype)
        wide = torch.promote_types(dtype, torch.float32)
        # Each of few operations rounds values of 16 bits; longer sums round more often.
        eps = max(torch.finfo(part.dtype).eps for part in (hidden_states, own, *weights))
        tolerance = eps if eps > 1e-4 else 1000 * eps
        projected = nn.functional.linear(hidden_states.to(wide), *(part.to(wide) for part in weights))
        config = self.model.config.get_text_config()
        caps = [getattr(config, name, None) or None for name in ("final_logit_softcapping", "logits_soft_cap")]
        for cap in (*caps, None):
            capped = projected if cap is None else cap * (projected / cap).tanh()
            scale = float((capped * own).sum() / capped.square().sum())
            if (own - scale * capped).norm() <= tolerance * own.norm():
                break
        else:
            raise RequestError(
                f"{type(self.model).__name__}: its logits are not its LM head's, capped and scaled: a reference "
                "cannot store how it computes them",
                "model",
            )
        stored = dtype if dtype.itemsize == 2 else torch.float32
        name: Any = str(stored).removeprefix("torch.")
        head = HeadFormat(
            vocab_size=len(weights[0]),
            hidden_size=hidden_states.shape[1],
            weight_dtype=name,
            head_dtype=name,
            has_bias=len(weights) > 1,
            scale=1.0 if abs(scale - 1) <= tolerance else scale,
            soft_cap=cap,
        )
        return head, [weight.to(stored) for weight in weights]

    def _layers(self, token_ids: Sequence[int], dtype: str) -> tuple[ReferenceLayers, Sequence[Cut]]:
        """Find the layers and where they are cut: before each MLP too if the model can be resumed there."""
        with suppress(RequestError):
            return self._checked(CutLayers(self.model), token_ids, dtype)
        return self._checked(CutLayers(self.model, stream_parts=0), token_ids, dtype)

    def _checked(
        self, layers: CutLayers, token_ids: Sequence[int], dtype: str
    ) -> tuple[ReferenceLayers, Sequence[Cut]]:
        """Describe layers with their floor. RequestError if they cannot be cut, or the model cannot be resumed: fed
        other tokens, it must compute the same if its stream is replaced at a boundary."""
        with layers.watching():
            self._run([token_ids])
        if isinstance(layers.described, str):
            raise RequestError(f"layers: this model's layers cannot be cut: {layers.described}", "layers")
        others = [(token_id + 1) % len(self.head.weight) for token_id in token_ids]

        def resume(boundary: int, stream: Stream) -> None:
            stream.hidden_states[2 + boundary] = stream.hidden_states[0]

        with _hooking(layers.cuts, resume):
            _, logits = self._run([token_ids, others, *[others] * len(layers.cuts)])
        base, *rows = (row.double().log_softmax(-1) for row in logits)
        not_resumed, *floor = (max(0.0, float((base.exp() * (base - row)).sum(-1).mean())) for row in rows)
        if flaw := flaw_of_cuts(layers.described, dtype, floor, not_resumed):
            raise RequestError(f"layers: {flaw}: record it without layers", "layers")
        return layers.described.model_copy(update={"floor": floor}), layers.cuts

    def _window(self, reference: StoredReference, index: int, cuts: Sequence[Cut]) -> torch.Tensor:
        """Record a window, and return its logprobs [scored]."""
        dtype = getattr(torch, reference.manifest.head.weight_dtype)
        token_ids, first = reference.text.window(index)
        streams: dict[int, torch.Tensor] = {}

        def copy(boundary: int, stream: Stream) -> None:
            streams[boundary] = _on_host(stream.hidden_states, dtype)

        with _hooking(cuts, copy):
            hidden_states, logits = (part[0, first - 1 :] for part in self._run([token_ids[:-1]]))
        targets = torch.tensor(token_ids[first:], device=logits.device)[:, None].split(ROWS_AT_ONCE)
        chunks = zip(logits.split(ROWS_AT_ONCE), targets, strict=True)
        logprobs = torch.cat([rows.double().log_softmax(-1).gather(1, own)[:, 0] for rows, own in chunks])
        if logprobs.isnan().any():
            raise RequestError(f"the model computed NaN in window {index}", "model")
        for boundary, stream in streams.items():
            reference.write_stream(index, boundary, stream)
        # Write this file last: a window that has it has the others.
        reference.write_shard(index, _on_host(hidden_states, dtype), _on_host(logprobs, torch.float32))
        return logprobs.float().cpu()


def _hooking(cuts: Sequence[Cut], use: Callable[[int, Stream], None]) -> ExitStack:
    """Call `use` with each boundary and the stream there, in forward passes that run inside."""
    hooks = ExitStack()
    for boundary, cut in enumerate(cuts):
        hooks.enter_context(cut(partial(use, boundary)))
    return hooks


def _attention(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", None))


def _on_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()
