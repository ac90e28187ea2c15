"""Boundaries of decoder layers that a forward pass shows, and streams copied and replaced in steps."""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from scoremode_server.references.streams import Stream
from scoremode_server.references.worker.layers import DecoderLayers
from scoremode_server.worker.request_rows import StepPart

HIDDEN = 4
BLOCKS = [
    (["model.layers.0.mixer"], "attention"),
    (["model.layers.0.mlp"], "mlp"),
    (["model.layers.1.mixer"], "attention"),
    (["model.layers.1.mlp"], "mlp"),
]

WHOLE = [([f"model.layers.{index}.mixer", f"model.layers.{index}.mlp"], "layer") for index in (0, 1)]


class Mixer(nn.Module, AttentionLayerBase):
    """Adds up all that precedes a token in its request, as attention does; requests begin where positions are 0."""

    quant_method: Any = "none"

    def forward(self, positions, x):
        rows, start = [], 0
        for row in range(len(x)):
            start = row if positions[row] == 0 else start
            rows.append(x[start : row + 1].mean(0))
        return torch.stack(rows)

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


class Linear(nn.Linear):
    quant_method: Any = "none"


class Norm(nn.Module):
    """Adds in place, as vLLM's kernels do."""

    def forward(self, x, residual=None):
        if residual is None:
            return x / x.norm(dim=-1, keepdim=True)
        residual += x
        x.copy_(residual / residual.norm(dim=-1, keepdim=True))
        return x, residual


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.mixer, self.mlp = Mixer(), Linear(HIDDEN, HIDDEN)

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.mixer(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class SandwichLayer(Layer):
    """Norms what its mixer gives, under the name that others have for the norm before the MLP."""

    def __init__(self):
        super().__init__()
        self.pre_feedforward_layernorm = Norm()

    def forward(self, positions, hidden_states, residual):
        if residual is not None:
            hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(self.mixer(positions, self.input_layernorm(hidden_states)))
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class WholeLayer(Layer):
    """Adds by itself."""

    def forward(self, hidden_states, positions):
        hidden_states = hidden_states + self.mixer(positions, hidden_states)
        return hidden_states + self.mlp(hidden_states)


class BatchLayer(WholeLayer):
    """As those of transformers, which vLLM runs too, has a dimension for the batch."""

    def forward(self, hidden_states, positions):
        return super().forward(hidden_states[0], positions)[None]


class OneTensorLayer(Layer):
    """As Cohere's, calls a norm with one tensor twice."""

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = super().forward(positions, hidden_states.clone(), residual)
        return hidden_states, hidden_states


class NamelessLayer(Layer):
    def forward(self, positions, x, residual):
        return super().forward(positions, x, residual)


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module] = Layer, name: str = "layers"):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model = nn.Module()
            setattr(self.model, name, nn.ModuleList([layer(), layer()]))
        self.by_position, self.has_batch = not issubclass(layer, WholeLayer), layer is BatchLayer

    @torch.inference_mode()
    def forward(self, positions, embedded):
        hidden_states, residual = embedded.clone(), None
        if self.has_batch:
            hidden_states = hidden_states[None]
        for layer in next(self.model.children()):
            if self.by_position:
                hidden_states, residual = layer(positions, hidden_states, residual)
            else:
                hidden_states = layer(hidden_states, positions=positions)
        if self.has_batch:
            return hidden_states[0]
        return hidden_states if residual is None else hidden_states + residual


class Window:
    """Keeps copies, or replaces with what another kept."""

    def __init__(self, recorded: "Window | None" = None, boundary: int | None = None, num_boundaries: int = 5):
        self.boundaries = range(num_boundaries) if boundary is None else (boundary,)
        self.recorded, self.copies = recorded, [[] for _ in range(num_boundaries)]

    def cross(self, boundary: int, stream: Stream, rows: slice, position: int) -> None:
        if self.recorded is None:
            self.copies[boundary].append(stream.copy(rows))
        else:
            stored = torch.cat(self.recorded.copies[boundary])
            stream.replace(rows, stored[position : position + rows.stop - rows.start])


def tokens(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def watched(model: Model) -> DecoderLayers:
    layers = DecoderLayers(model)
    with layers.watching():
        model(torch.zeros(2), tokens(0, 2))
    return layers


def run(layers: DecoderLayers, requests: list[tuple[torch.Tensor, Window | None]]) -> list[torch.Tensor]:
    """One step of several requests."""
    row, parts, positions = 0, [], []
    for number, (embedded, window) in enumerate(requests):
        if window is not None:
            # A placeholder follows the prompt's last token.
            part = StepPart(str(number), 0, row, len(embedded) + 1, len(embedded))
            parts.append((window.cross, window.boundaries, part))
        positions += [*range(len(embedded) + 1)]
        row += len(embedded) + 1
    with layers.hooking(parts):
        padded = [torch.cat((embedded, torch.ones(1, HIDDEN))) for embedded, _ in requests]
        out = layers.model(torch.tensor(positions), torch.cat(padded))
    return [part[:-1] for part in out.split([len(embedded) + 1 for embedded, _ in requests])]


@pytest.mark.parametrize(
    ("layer", "blocks"),
    [
        (Layer, BLOCKS),
        (SandwichLayer, BLOCKS),
        (WholeLayer, WHOLE),
        (BatchLayer, WHOLE),
    ],
)
def test_a_pass_shows_boundaries_at_which_a_request_resumes_exactly(layer, blocks):
    layers = watched(Model(layer))
    described = layers.described
    assert (described.layer_class, described.hidden_size) == (layer.__name__, HIDDEN)
    assert [(block.modules, block.kind) for block in described.blocks] == blocks
    recorded, count = tokens(1, 5), len(blocks) + 1
    (expected,) = run(layers, [(recorded, window := Window(num_boundaries=count))])
    assert [len(torch.cat(parts)) for parts in window.copies] == [5] * count
    others = tokens(2, 3), tokens(3, 4)
    alone = [run(layers, [(other, None)])[0] for other in others]
    for boundary in range(count):
        # Fed other tokens, between two plain requests.
        replacing = Window(window, boundary, count)
        first, resumed, last = run(layers, [(others[0], None), (tokens(4, 5), replacing), (others[1], None)])
        assert torch.equal(resumed, expected)
        assert torch.allclose(first, alone[0])
        assert torch.allclose(last, alone[1])
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in layers.model.modules())


class TwoLists(Model):
    def __init__(self):
        super().__init__()
        self.more = nn.ModuleList([Layer()])


@pytest.mark.parametrize(
    ("model", "refusal"),
    [
        (Model(OneTensorLayer), "OneTensorLayer: its residual and its hidden_states are one tensor"),
        (Model(NamelessLayer), "NamelessLayer: it does not take hidden_states [tokens, hidden]"),
        (TwoLists(), "TwoLists: it has 2 lists of layers with attention, not one"),
    ],
)
def test_other_layers_are_refused_by_their_class(model, refusal):
    assert watched(model).described == refusal


def test_a_layer_of_the_models_list_that_is_not_called_is_no_boundary():
    model = Model()
    layers = DecoderLayers(model)
    with layers.watching():
        pass
    assert layers.described.startswith("Layer: its layers were not called")
