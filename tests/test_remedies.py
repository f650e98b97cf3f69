"""Initialisation, warm-up and activations, against the formulas they stand for."""

import copy
import doctest
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holter.remedies
from holter.remedies import (
    advise_warmup_steps,
    bert_init_weights,
    get_linear_schedule_with_warmup,
    init_weights,
    replace_activations,
)

Init = Callable[[nn.Module], None]
WAYS: dict[str, Callable[[nn.Module, Init], object]] = {
    "call": lambda model, init: init(model),
    "apply": lambda model, init: model.apply(init),
}


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(holter.remedies)
    assert outcome.attempted > 10 and outcome.failed == 0


def spoiled(model: nn.Module) -> nn.Module:
    """A model of which no initialisation is left: everything is 7."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    return model


def is_normal(weight: Tensor, std: float) -> bool:
    """Mean 0 and this deviation, within what 4 standard errors of the sample allow, and not bounded like a uniform."""
    n = weight.numel()
    right = abs(weight.mean().item()) < 4 * std / math.sqrt(n)
    right &= abs(weight.std().item() / std - 1) < 4 / math.sqrt(2 * n)
    return right and weight.abs().max().item() > 2.5 * std


def is_xavier(weight: Tensor, fan_in: int, fan_out: int) -> bool:
    """Uniform within sqrt(6 / (fan_in + fan_out)), and filling it."""
    bound = math.sqrt(6 / (fan_in + fan_out))
    even = abs(weight.std().item() / (bound / math.sqrt(3)) - 1) < 4 / math.sqrt(2 * weight.numel())
    return even and 0.95 * bound < weight.abs().max().item() <= bound


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_layer_gets_its_initialisation(way: str) -> None:
    """C19: Xavier for linear, N(0, 0.02) for embeddings, 1/0 for norms, Kaiming for convolutions, biases 0."""
    torch.manual_seed(0)
    model = spoiled(
        nn.ModuleDict(
            {
                "linear": nn.Sequential(nn.Linear(200, 50), nn.ReLU(), nn.Linear(50, 10, bias=False)),
                "embedding": nn.Embedding(300, 20),
                "conv": nn.Conv2d(16, 32, 3),
                "transposed": nn.ConvTranspose1d(16, 40, 5),
                "norms": nn.ModuleList(
                    [
                        nn.LayerNorm(5),
                        nn.BatchNorm2d(5),
                        nn.GroupNorm(1, 5),
                        nn.InstanceNorm1d(5, affine=True),
                        nn.RMSNorm(5),
                        nn.LayerNorm(5, elementwise_affine=False),
                        nn.SyncBatchNorm(5),
                    ]
                ),
            }
        )
    )
    WAYS[way](model, init_weights)
    assert is_xavier(model["linear"][0].weight, 200, 50)
    assert is_xavier(model["linear"][2].weight, 50, 10)
    assert is_normal(model["embedding"].weight, 0.02)
    assert is_normal(model["conv"].weight, math.sqrt(2 / (16 * 9)))
    assert is_xavier(model["transposed"].weight, 16 * 5, 40 * 5)
    for norm in model["norms"]:
        assert all((parameter == (name == "weight")).all() for name, parameter in norm.named_parameters())
    assert model["norms"][1].running_mean.eq(0).all() and model["norms"][1].running_var.eq(1).all()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 8 and all((bias == 0).all() for bias in biases)


@pytest.mark.parametrize("way", WAYS)
def test_the_bert_style_is_normal_throughout(way: str) -> None:
    """C19: N(0, std) for linear, convolution and embedding, 1/0 for norms."""
    torch.manual_seed(0)
    model = spoiled(
        nn.Sequential(
            nn.Linear(100, 100), nn.Embedding(100, 100, padding_idx=3), nn.LayerNorm(9), nn.Conv1d(20, 50, 10)
        )
    )
    WAYS[way](model, bert_init_weights)
    assert all(is_normal(model[index].weight, 0.02) for index in (0, 3))
    assert is_normal(model[1].weight[4:], 0.02) and model[1].weight[3].eq(0).all()
    assert model[2].weight.eq(1).all()
    assert all(model[index].bias.eq(0).all() for index in (0, 2, 3))
    bert_init_weights(model, std=0.1)
    assert all(is_normal(model[index].weight, 0.1) for index in (0, 3))
    assert is_normal(model[1].weight[4:], 0.1)


@pytest.mark.parametrize("way", WAYS)
def test_padding_stays_zero_and_a_tied_output_keeps_the_embeddings_scale(way: str) -> None:
    """C19: Xavier for the output layer would give its 1000 x 64 weight a deviation of 0.043."""
    torch.manual_seed(0)
    embedding, bag, output = (
        nn.Embedding(1000, 64, padding_idx=0),
        nn.EmbeddingBag(9, 4, padding_idx=2),
        nn.Linear(64, 1000),
    )
    output.weight = embedding.weight
    WAYS[way](spoiled(nn.ModuleList([embedding, bag, output])), init_weights)
    assert embedding.weight[0].eq(0).all() and bag.weight[2].eq(0).all()
    assert is_normal(embedding.weight[1:], 0.02)


def test_the_projections_of_attention_are_three_linear_layers() -> None:
    """C19: torch's own fills the joint tensor as one of fan-out 3 x 64."""
    torch.manual_seed(0)
    joint, apart = nn.MultiheadAttention(64, 4), nn.MultiheadAttention(64, 4, kdim=32, vdim=16)
    init_weights(spoiled(nn.ModuleList([joint, apart])))
    assert all(is_xavier(part, 64, 64) for part in joint.in_proj_weight.chunk(3))
    sizes = (apart.q_proj_weight, 64), (apart.k_proj_weight, 32), (apart.v_proj_weight, 16)
    assert all(is_xavier(weight, fan_in, 64) for weight, fan_in in sizes)
    for layer in (joint, apart):
        assert is_xavier(layer.out_proj.weight, 64, 64)
        assert layer.in_proj_bias.eq(0).all() and layer.out_proj.bias.eq(0).all()


def test_gpt2s_transposed_linear_is_a_linear_and_the_unknown_is_left_alone() -> None:
    """C19: transformers.pytorch_utils.Conv1D has a weight of (in, out)."""

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(30, 90)), nn.Parameter(torch.empty(90))

    model = spoiled(nn.ModuleList([Conv1D(), nn.LSTM(3, 3)]))
    init_weights(model)
    assert is_xavier(model[0].weight, 30, 90) and model[0].bias.eq(0).all()
    assert all(parameter.eq(7).all() for parameter in model[1].parameters())


def test_initialisation_leaves_gradients_modes_and_identity_alone() -> None:
    """C19: the same Parameter objects, so that an optimizer still holds them, and no graph on them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(3, 3, padding_idx=0), nn.MultiheadAttention(4, 2))
    before = list(model.parameters())
    init_weights(model)
    assert all(a is b and a.requires_grad and a.is_leaf for a, b in zip(before, model.parameters(), strict=True))


# C20


@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (10, 10), (20, 10), (1, 1)])
def test_the_rate_rises_and_falls_in_straight_lines(warmup: int, total: int) -> None:
    """C20: step / warmup, then (total - step) / (total - warmup), for every group, and never below zero."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.5)]
    optimizer = torch.optim.SGD(groups)
    scheduler = get_linear_schedule_with_warmup(optimizer, warmup, total)
    for step in range(total + 3):
        share = step / warmup if step < warmup else max(0, total - step) / max(1, total - warmup)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([share, share / 2])
        optimizer.step()
        scheduler.step()


def test_a_schedule_goes_on_from_a_checkpoint() -> None:
    """C20: by state_dict and by last_epoch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    first = get_linear_schedule_with_warmup(optimizer, 2, 10)
    for _ in range(5):
        optimizer.step()
        first.step()
    second = get_linear_schedule_with_warmup(optimizer, 2, 10)
    second.load_state_dict(first.state_dict())
    third = get_linear_schedule_with_warmup(optimizer, 2, 10, last_epoch=5)
    optimizer.step()
    second.step()
    assert second.get_last_lr() == pytest.approx([4 / 8])
    assert third.get_last_lr() == pytest.approx([4 / 8])


@pytest.mark.parametrize(("warmup", "total"), [(-1, 10), (0, 0)])
def test_a_schedule_without_steps_is_refused(warmup: int, total: int) -> None:
    """C20."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=f"got {warmup} and {total}"):
        get_linear_schedule_with_warmup(optimizer, warmup, total)


def test_the_warm_up_follows_the_size_of_the_model() -> None:
    """C20: < 100 M: 500-1000 steps, 100 M-1 B: 2000-5000, > 1 B: 10000+."""
    assert advise_warmup_steps(1) == advise_warmup_steps(99_999_999) == (500, 1000)
    assert advise_warmup_steps(100_000_000) == advise_warmup_steps(1_000_000_000) == (2000, 5000)
    assert advise_warmup_steps(1_000_000_001) == (10_000, None)
    with pytest.raises(ValueError, match="got 0"):
        advise_warmup_steps(0)


# C21


@pytest.mark.parametrize("new", [nn.GELU, nn.SiLU, nn.LeakyReLU, lambda: nn.LeakyReLU(0.3)])
def test_activations_are_replaced_at_every_depth(new: Callable[[], nn.Module]) -> None:
    """C21: the model then computes what one built with the new activation computes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Tanh())
    expected = nn.Sequential(model[0], new(), nn.Sequential(model[2][0], new()), nn.Tanh())
    inputs = torch.randn(8, 4)
    wanted = expected(inputs)
    assert not torch.equal(model(inputs), wanted)
    assert replace_activations(model, nn.ReLU, new) == ["1", "2.1"]
    assert torch.equal(model(inputs), wanted)
    assert replace_activations(model, nn.ReLU, new) == []


def test_several_kinds_at_once_but_no_kind_that_was_not_named() -> None:
    """C21: ReLU6 is a Hardtanh by inheritance, and was not named."""
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Hardtanh(), nn.ReLU6(), nn.Sigmoid())
    assert replace_activations(model, (nn.ReLU, nn.Tanh, nn.Hardtanh)) == ["0", "1", "2"]
    assert [type(module) for module in model] == [nn.GELU, nn.GELU, nn.GELU, nn.ReLU6, nn.Sigmoid]


def test_a_shared_activation_stays_shared_and_modes_stay() -> None:
    """C21: one module in two places becomes one module in two places."""
    shared = nn.ReLU()
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.ReLU().eval())})
    assert replace_activations(model, new=nn.PReLU) == ["a.0", "b.0", "b.1"]
    assert model["a"][0] is model["b"][0] is not model["b"][1]
    assert [module.training for module in (model["a"][0], model["b"][1])] == [True, False]
    assert len(list(model.parameters())) == 2


def test_a_new_activations_parameters_are_made_as_the_models_are() -> None:
    """C21: PReLU has one."""
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.ReLU())
    replace_activations(model, new=nn.PReLU)
    assert model[1].weight.dtype is torch.float64
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()


def test_a_model_that_is_itself_the_activation_is_refused() -> None:
    """C21: with the way out."""
    with pytest.raises(ValueError, match=r"itself is a ReLU.*Sequential"):
        replace_activations(nn.ReLU())


@pytest.mark.filterwarnings("ignore:.*nested.tensor:UserWarning")
@pytest.mark.parametrize("given_as", ["relu", F.relu, torch.relu, nn.ReLU()])
@pytest.mark.parametrize("new", [nn.GELU, nn.SiLU, nn.LeakyReLU, lambda: nn.GELU("tanh")])
def test_torchs_transformer_layer_is_changed_for_training_and_for_its_fast_path(
    given_as: str | nn.Module | Callable[[Tensor], Tensor], new: Callable[[], nn.Module]
) -> None:
    """C21: in eval mode the layer believes a note it made of its activation, not the activation."""
    torch.manual_seed(0)
    given = copy.deepcopy(given_as)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=given, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    wanted = copy.deepcopy(model)
    wanted.use_nested_tensor = False
    for block in wanted.layers:
        block.activation, block.activation_relu_or_gelu = new(), 0  # 0: never the fast path
    inputs, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [3], [1]])
    assert replace_activations(model, new=new) == ["layers.0.activation", "layers.1.activation"]
    assert model.state_dict().keys() == wanted.state_dict().keys()
    torch.testing.assert_close(model(inputs), wanted(inputs))
    model.eval(), wanted.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), wanted(inputs), atol=1e-6, rtol=1e-5)
        padded = [one(inputs, src_key_padding_mask=padding)[~padding] for one in (model, wanted)]
        torch.testing.assert_close(*padded, atol=1e-6, rtol=1e-5)


def test_the_fast_path_is_kept_where_it_is_right() -> None:
    """C21: exact GELU and ReLU have one."""
    layer = nn.TransformerEncoderLayer(8, 2, activation="relu")
    replace_activations(layer, nn.ReLU, nn.GELU)
    assert layer.activation_relu_or_gelu == 2
    replace_activations(layer, nn.GELU, nn.ReLU)
    assert layer.activation_relu_or_gelu == 1
    decoder = nn.TransformerDecoderLayer(8, 2)
    assert replace_activations(decoder, nn.ReLU, nn.SiLU) == ["activation"]
    assert isinstance(decoder.activation, nn.SiLU)
