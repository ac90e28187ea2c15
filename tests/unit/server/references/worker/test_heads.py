"""A reference's LM head in the slot of a worker gives the logits of the model that it was taken from, bit for bit.

Ranks are processes with vLLM's own layers and collectives.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from scoremode_server.kernels.working_memory import LogitsShape
from scoremode_server.references.files.directory import ReferenceDirectory, StoredReference
from scoremode_server.references.worker import extension
from scoremode_server.references.worker.extension import ReferenceWorker
from scoremode_server.references.worker.heads import HeadLayer, LeasedHead, ReferenceHead, describe_head, gather_weight
from scoremode_server.references.worker.orders import SINK
from scoremode_server.references.worker.sinks import WorkerWindows
from scoremode_server.worker.lm_head import examine
from scoremode_server.worker.row_scorer import RowScorer, StepPart
from scoremode_server.worker.row_spec import RowSpec
from tests.unit.server.ranks import run_ranks
from tests.unit.server.references.reference_setup import TEXT, let_all_be_written, manifest
from tests.unit.server.worker.linear_scorer import check_rows, rows_of

pytestmark = pytest.mark.processes

HIDDEN = 16
CPU = torch.device("cpu")


class Model(nn.Module):
    """A head of vLLM's layers, tied to the embeddings or not, with weights that follow from its vocabulary."""

    def __init__(
        self,
        vocab: int,
        dtype: torch.dtype = torch.float32,
        *,
        tied: bool = False,
        bias: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        layer = VocabParallelEmbedding if tied else ParallelLMHead
        self.lm_head = layer(vocab, HIDDEN, params_dtype=dtype, **({} if tied else {"bias": bias}))
        self.logits_processor = LogitsProcessor(vocab, scale=scale, soft_cap=soft_cap)
        generator = torch.Generator().manual_seed(vocab + seed)
        self.lm_head.weight_loader(self.lm_head.weight, torch.randn(vocab, HIDDEN, generator=generator).to(dtype))
        if bias:
            self.lm_head.weight_loader(self.lm_head.bias, torch.randn(vocab, generator=generator).to(dtype))
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden_states, getattr(self.lm_head, "bias", None))

    def hidden_states(self) -> torch.Tensor:
        return 3 * torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9)).to(self.dtype)


class Masked(Model):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        logits[:, 7] = -torch.inf
        return logits


class Quantized(Model):
    class Method:
        def __init__(self, method: Any) -> None:
            self.apply = method.apply

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lm_head.quant_method = self.Method(self.lm_head.quant_method)


def models() -> list[Model]:
    return [
        Model(1000),
        Model(1000, torch.bfloat16),
        Model(1000, tied=True),
        Model(1000, torch.bfloat16, tied=True, soft_cap=30.0),
        Model(1000, bias=True),
        Model(1000, torch.bfloat16, bias=True, scale=0.3, soft_cap=5.0),
        Model(128),
        # vLLM pads vocabularies to multiples of 64; the second of two ranks has little but padding, or nothing else.
        Model(70, scale=2.0),
        Model(20, bias=True),
    ]


def taken_from(model: Model, root: Path, name: str) -> StoredReference:
    """The reference of a model; the first rank writes it."""
    group = get_tp_group()
    source = examine(model.compute_logits, HIDDEN, model.dtype, group).source
    head = describe_head(source, HIDDEN, model.dtype)
    parts = [part.data for part in (source.lm_head.weight, source.bias) if part is not None]
    weights = [gather_weight(part, head.vocab_size, group) for part in parts]
    assert weights[0].shape == (model.logits_processor.org_vocab_size, HIDDEN)
    if group.rank_in_group == 0:
        ReferenceDirectory(root).create(name, manifest(name, head), TEXT).write_head(*weights)
    group.barrier()
    return ReferenceDirectory(root).open(name)


def room_for(num_bytes: int, config: VllmConfig) -> LeasedHead:
    num_bytes //= config.parallel_config.tensor_parallel_size
    return LeasedHead(num_bytes, CPU, partial(HeadLayer, config=config))


def load(room: LeasedHead, reference: StoredReference, *, local: bool = False) -> ReferenceHead:
    """Load a head as an API server orders it, and find it as a step does."""
    layer = room.make_layer(reference.manifest.head)
    room.place(reference.name, layer, layer.read(reference))
    room.progress(reference.name).result()
    return room.find(reference.name, local=local)


def logits_are_those_of_the_model(room: LeasedHead, reference: StoredReference, model: Model) -> None:
    hidden_states, head = model.hidden_states(), examine(model.compute_logits, HIDDEN, model.dtype, get_tp_group())
    whole = load(room, reference).logits_fn(hidden_states)
    assert whole.dtype == model.dtype
    assert torch.equal(whole, model.compute_logits(hidden_states))
    if head.shard is not None:
        columns = head.shard.columns
        own = load(room, reference, local=True).logits_fn(hidden_states)
        assert torch.equal(own[:, :columns], head.project(hidden_states)[:, :columns])
        assert torch.equal(own[:, :columns], whole[:, head.shard.first : head.shard.first + columns])


def heads_in_one_place(root: Path, config: VllmConfig) -> None:
    """Each takes the place of the one before it, and the first comes back."""
    room = room_for(1000 * (HIDDEN + 1) * 4, config)
    room._memory = room._memory[: 1024 * (HIDDEN + 1) * 4 // config.parallel_config.tensor_parallel_size]
    made = models()
    references = [taken_from(model, root, f"model-{number}") for number, model in enumerate(made)]
    for number in [*range(len(made)), 0, 0, len(made) - 1]:
        logits_are_those_of_the_model(room, references[number], made[number])


def bytes_of_a_logit(root: Path, config: VllmConfig) -> None:
    """A cap needs both what it caps and what comes of it."""
    room = room_for(1 << 20, config)
    made = (Model(64), Model(64, torch.bfloat16), Model(64, torch.bfloat16, soft_cap=2.0))
    references = [taken_from(each, root, f"bytes-{number}") for number, each in enumerate(made)]
    assert [load(room, each).logit_bytes for each in references] == [4, 2, 4]


def models_that_cannot_be_references(root: Path, config: VllmConfig) -> None:
    group = get_tp_group()
    for model, dtype, reason in (
        (Quantized(100), torch.float32, "quantized .Method."),
        (Model(100, torch.float64), torch.float64, "has dtype float64"),
        (Model(100), torch.bfloat16, "is .* torch.float32, not"),
    ):
        source = examine(model.compute_logits, HIDDEN, model.dtype, group).source
        with pytest.raises(ValueError, match=reason):
            describe_head(source, HIDDEN, dtype)


class Runner(SimpleNamespace):
    """As much of a model runner as `ReferenceWorker` asks for."""


def worker_of(model: Model, config: VllmConfig) -> ReferenceWorker:
    model_config = SimpleNamespace(dtype=torch.float32, get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: 1000)
    vllm_config = SimpleNamespace(parallel_config=config.parallel_config, model_config=model_config)
    worker = ReferenceWorker()
    worker.model_runner = Runner(  # type: ignore[attr-defined]
        model=model, model_config=model_config, vllm_config=vllm_config, device=CPU
    )
    return worker


def what_api_servers_ask_of_workers(root: Path, config: VllmConfig) -> None:
    windows = WorkerWindows(ReferenceDirectory(root))
    Runner._scoremode_sinks = {SINK: windows}  # type: ignore[attr-defined]
    group, worker = get_tp_group(), worker_of(Model(1000, scale=0.5), config)
    described = worker.scoremode_describe_head()
    assert described["vocab_size"] == 1000  # type: ignore[index]
    assert described["scale"] == 0.5  # type: ignore[index]

    worker.scoremode_write_head("none", "none", "first")
    let_all_be_written(windows)
    if group.rank_in_group == 0:
        ReferenceDirectory(root).create("asked", manifest("asked"), TEXT)
    group.barrier()
    worker.scoremode_write_head("asked", "asked", "second")
    let_all_be_written(windows)
    group.barrier()
    answer = worker.scoremode_exchange({0: ([], ["first", "second"])})
    by_rank = (
        {"first": None, "second": None}
        if group.rank_in_group
        else {"first": "there is no reference 'none'", "second": ""}
    )
    assert answer == {"outcomes": by_rank, "lease": None}
    assert worker.scoremode_exchange({1: ([], [])}) is None
    weight, bias = ReferenceDirectory(root).open("asked").read_head()
    assert bias is None
    assert torch.equal(weight, torch.randn(1000, HIDDEN, generator=torch.Generator().manual_seed(1000)))

    worker = worker_of(Masked(1000), config)
    assert "not one projection" in str(worker.scoremode_describe_head())


def rows_of_a_step(root: Path, config: VllmConfig) -> None:
    """Check a model whose parts ranks have for themselves, and one whose logits each rank gathers."""
    group = get_tp_group()
    targets = torch.tensor([7, 999, 0, 3, 8, 8])
    plain, warm = RowSpec(1, 500, 3), RowSpec(2, 501, 2, 0.5, 2, np.array([5, 998], np.int32).tobytes())
    for model, shape in ((Model(1000), LogitsShape(1000, 4, group.world_size)), (Masked(1000), LogitsShape(1000, 4))):
        states = model.hidden_states()
        scorer = RowScorer(2**30, shape, group)
        scorer.begin("plain", plain)
        scorer.begin("warm", warm)
        parts = [StepPart("plain", 0, 0, 3, 3), StepPart("warm", 0, 3, 2, 2)]
        found = scorer.score(parts, states, targets.clone(), model.compute_logits)
        logits = model.compute_logits(states)
        check_rows(rows_of(found["plain"], plain), plain, logits[:3], [7, 999, 500])
        check_rows(rows_of(found["warm"], warm), warm, logits[4:5], [501])


def ranks_without_a_head(root: Path, config: VllmConfig) -> None:
    """Check the pipeline stages before the last."""

    last, worker = extension.get_pp_group, worker_of(Model(100), config)
    extension.get_pp_group = lambda: SimpleNamespace(is_last_rank=False)
    assert worker.scoremode_exchange({0: ([], [])}) is None
    assert worker.scoremode_describe_head() == "this rank has no LM head"
    worker.scoremode_write_head("none", "none", "first")
    extension.get_pp_group = last


def one_rank(_: int, config: VllmConfig, root: Path) -> None:
    for check in (
        heads_in_one_place,
        bytes_of_a_logit,
        models_that_cannot_be_references,
        what_api_servers_ask_of_workers,
        rows_of_a_step,
        ranks_without_a_head,
    ):
        check(root / check.__name__, config)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks(num_ranks: int, tmp_path: Path):
    run_ranks(num_ranks, one_rank, tmp_path)
