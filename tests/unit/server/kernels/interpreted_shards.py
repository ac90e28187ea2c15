"""A vocabulary in parts beside the whole of it, in float64. `test_triton_kernels.py` runs these.

Two parts are two processes with vLLM's own layers and collectives; more are made by hand.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from row_checks import check, random_logits
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group, tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from scoremode_server.kernels import fused_logprobs, triton_kernels
from scoremode_server.kernels.reduced_rows import ReducedRows
from scoremode_server.kernels.tensor_parallel import from_words, merge, to_words
from scoremode_server.kernels.working_memory import LogitsShape
from scoremode_server.vllm_patches import runner_v2
from scoremode_server.vllm_patches.lm_head import examine
from tests.unit.server.ranks import run_ranks

HIDDEN = 16
ROWS = 5
PADDING = 1000.0
"""What padding is filled with: it would win if it counted."""


def merged(logits: torch.Tensor, targets: torch.Tensor, ends: list[int], num_top: int) -> ReducedRows:
    """Reduce the columns up to each of `ends` apart, each with padding of its own, and put them together."""
    shards = []
    for first, end in zip([0, *ends], ends, strict=False):
        part = torch.full((len(logits), end - first + 5), PADDING, dtype=logits.dtype)
        part[:, : end - first] = logits[:, first:end]
        shards.append((first, end - first, part, ReducedRows.empty(len(logits), num_top, logits.device)))
    for first, columns, part, reduced in shards:
        triton_kernels.take_targets(part, targets, first, columns, reduced)
    known = torch.stack([reduced.logits[:, 0] for *_, reduced in shards]).amax(0)
    for first, columns, part, reduced in shards:
        reduced.logits[:, 0] = known
        triton_kernels.reduce_rows(part, first, columns, reduced)
    return merge([from_words(to_words(reduced)) for *_, reduced in shards])


@pytest.mark.parametrize(
    "ends",
    [
        [500, 1000],
        [334, 668, 1000],
        [250, 500, 750, 1000],
        [125, 250, 375, 500, 625, 750, 875, 1000],
        [4, 4, 995, 1000],
    ],
)
def test_parts_give_what_the_whole_gives(ends: list[int]):
    logits = random_logits(9, 1000, 1000, torch.bfloat16, seed=len(ends))
    logits[1, ends[0] :] = -math.inf
    logits[2, : ends[-2]] = -math.inf
    logits[3, 6:] = -math.inf  # fewer entries than the top 20 has
    logits[4] = logits[4, 0]
    logits[5] = -math.inf
    targets = torch.tensor([0, 999, 0, 999, 500, 3, ends[0], ends[0] - 1, ends[-2]])
    for num_top in (1, 20):
        rows = merged(logits, targets, ends, num_top)
        check(logits, targets, (rows.tokens, rows.logprobs(), rows.ranks))


@pytest.mark.parametrize("num_top", [0, 1, 4])
def test_nan_in_any_part_is_never_a_number(num_top: int):
    logits = random_logits(4, 300, 300, torch.bfloat16, seed=4)
    for row, column in enumerate((0, 150, 299)):
        logits[row, column] = math.nan
    rows = merged(logits, torch.tensor([0, 0, 0, 0]), [100, 200, 300], num_top)
    assert rows.logprobs()[:3].isnan().all()
    assert rows.logprobs()[3].isfinite().all()


class Model(nn.Module):
    """A head with vLLM's layers."""

    def __init__(
        self, vocab: int, added: int = 0, bias: bool = False, scale: float = 1.0, soft_cap: float | None = None
    ):
        super().__init__()
        self.lm_head = ParallelLMHead(vocab + added, HIDDEN, org_num_embeddings=vocab, bias=bias)
        self.logits_processor = LogitsProcessor(vocab + added, vocab, scale=scale, soft_cap=soft_cap)
        generator = torch.Generator().manual_seed(vocab)
        self.lm_head.weight.data.fill_(PADDING)
        rows = self.lm_head.shard_indices
        width = rows.num_org_elements
        whole = torch.randn(vocab, HIDDEN, generator=generator)
        self.lm_head.weight.data[:width] = whole[rows.org_vocab_start_index : rows.org_vocab_end_index]
        if bias:
            self.lm_head.bias.data.copy_(torch.arange(len(self.lm_head.bias)) / 100 + rows.org_vocab_start_index)
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)


class Masked(Model):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        logits[:, 70] = -math.inf
        return logits


class Scaled(Model):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states) * 0.5


class ScaledBefore(Model):
    """Its logits are one projection, but not of the hidden states that it is given."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states * 0.5)


class Twice(Model):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        super().compute_logits(hidden_states)
        return super().compute_logits(hidden_states)


class Bare(Model):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(hidden_states, self.lm_head.weight)
        return tensor_model_parallel_all_gather(logits)[:, : self.lm_head.org_vocab_size]


class Uncertain(Model):
    """One rank sees something else than the other."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        return logits if get_tp_group().rank_in_group == 0 else logits.clone()


def scores_of(model: Model, hidden_states: torch.Tensor, targets: torch.Tensor, num_top: int, limit: int):
    head = examine(model.compute_logits, HIDDEN, torch.float32, get_tp_group())
    return head, fused_logprobs.compute(targets, hidden_states, head.project, num_top, limit, head.shard)


def one_rank(rank: int, _: VllmConfig) -> None:
    in_parts(rank)
    as_ever()
    source()
    in_the_runner()


def in_parts(rank: int) -> None:
    for made, copies in (
        (Model(1000), 1),
        (Model(1000, scale=0.3), 1),
        (Model(1000, scale=0.3, soft_cap=5.0), 2),
        (Model(1000, bias=True), 2),
        (Model(70), 1),
        # The second rank has nothing but padding.
        (Model(20), 1),
        # vLLM takes its gathered columns for tokens here too, the first rank's additional ones among them.
        (Model(300, added=20), 1),
    ):
        vocab = made.logits_processor.org_vocab_size
        hidden_states = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(vocab))
        targets = torch.arange(ROWS) * (vocab - 1) // (ROWS - 1)
        gathered = made.compute_logits(hidden_states)
        for num_top, limit in ((0, 100), (min(20, vocab), 3)):
            head, scores = scores_of(made, hidden_states, targets, num_top, limit)
            assert head.shard is not None
            assert head.shard.first == rank * made.lm_head.num_embeddings_per_partition
            assert head.copies == copies
            check(gathered, targets, scores)
        # The model is as it was.
        assert torch.equal(made.compute_logits(hidden_states), gathered)
        hidden_states[3, 2] = math.nan
        logprobs = scores_of(made, hidden_states, targets, 1, 4)[1][1]
        assert logprobs.isnan().any(1).tolist() == [row == 3 for row in range(ROWS)]


def as_ever() -> None:
    for kind, copies in ((Masked, None), (Scaled, None), (Twice, None), (Bare, None), (Uncertain, "either")):
        made = kind(1000)
        hidden_states = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
        targets = torch.arange(ROWS) * 200
        head, scores = scores_of(made, hidden_states, targets, 3, 4)
        assert head.shard is None
        assert copies == "either" or head.copies is copies
        assert kind is Uncertain or head.source is None
        check(made.compute_logits(hidden_states), targets, scores)


def source() -> None:
    """What a reference can keep is what takes hidden states to logits by itself."""
    for kind in (Model, ScaledBefore):
        made = kind(1000)
        found = examine(made.compute_logits, HIDDEN, torch.float32, get_tp_group()).source
        assert (found is None) == (kind is ScaledBefore)
        assert found is None or found.lm_head is made.lm_head


def in_the_runner() -> None:
    """Chunks of half the logits, found by the first call; and what a rank projects is half as wide."""
    made = Model(1000)
    widths: list[tuple[int, ...]] = []
    apply = made.lm_head.quant_method.apply

    def recording(*arguments: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        logits = apply(*arguments, **options)
        widths.append(tuple(logits.shape))
        return logits

    made.lm_head.quant_method.apply = recording
    compute = runner_v2.PromptLogprobs(4 * (512 * 4 + 28), lambda *_: pytest.fail("vLLM's own was called"))
    compute.load(LogitsShape(1000, 4, 2))
    hidden_states, targets = torch.ones(ROWS, HIDDEN), torch.arange(ROWS)
    scores = compute(targets, hidden_states, made.compute_logits, 0)
    assert widths == [(2, 512), (2, 512), (4, 512), (1, 512)]
    check(made.compute_logits(hidden_states), targets, scores)


def test_two_ranks():
    run_ranks(2, one_rank)


@pytest.mark.parametrize("logits_fn", [lambda rows: rows, SimpleNamespace(compute=len).compute])
def test_what_is_no_method_of_a_model_is_not_known(logits_fn: Callable):
    group = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    head = examine(logits_fn, HIDDEN, torch.float32, group)
    assert (head.project, head.copies, head.shard) == (logits_fn, None, None)
