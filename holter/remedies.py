"""What the advice tells you to call: initialisation, warm-up, other activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from holter.modules import modules_and_wrappers, wrapped_in

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms of every dimension
)

Fill = Callable[[Tensor], Tensor]  # fills a weight in place


def init_weights(module: nn.Module) -> None:
    """Initialises every layer of a module for a stable start.

    Xavier for linear layers, Kaiming for convolutions, N(0, 0.02) for embeddings, zeros for biases, ones and
    zeros for normalisations; what is none of these keeps its weights. `init_weights(model)` is enough;
    `model.apply(init_weights)` works too.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    >>> init_weights(model)
    >>> bool((model[0].bias == 0).all() and (model[1].weight == 1).all())
    True
    """
    _initialise(module, nn.init.xavier_uniform_, _kaiming, embedding_std=0.02)


def bert_init_weights(module: nn.Module, std: float = 0.02) -> None:
    """Initialises as BERT does: N(0, std) for weights, zeros for biases, ones and zeros for normalisations.

    >>> model = torch.nn.Linear(512, 512)
    >>> bert_init_weights(model)
    >>> 0.0195 < model.weight.std().item() < 0.0205
    True
    """
    normal = partial(nn.init.normal_, mean=0.0, std=std)
    _initialise(module, normal, normal, embedding_std=std)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """The learning rate rises linearly from 0 over the warm-up, then falls linearly to 0 at the last step.

    Call `scheduler.step()` after every `optimizer.step()`.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(scheduler.get_last_lr()[0])
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if num_warmup_steps < 0 or num_training_steps < 1:
        raise ValueError(
            f"a schedule needs num_warmup_steps >= 0 and num_training_steps >= 1, "
            f"got {num_warmup_steps} and {num_training_steps}"
        )
    share = partial(_warmup_share, warmup=num_warmup_steps, total=num_training_steps)
    return LambdaLR(optimizer, share, last_epoch)


def advise_warmup_steps(n_parameters: int) -> tuple[int, int | None]:
    """The fewest and the most warm-up steps that suit a model of this size; None means no upper limit.

    >>> advise_warmup_steps(124_000_000)
    (2000, 5000)
    """
    if n_parameters < 1:
        raise ValueError(f"a model has at least one parameter, got {n_parameters}")
    if n_parameters < 100_000_000:
        return 500, 1000
    if n_parameters <= 1_000_000_000:
        return 2000, 5000
    return 10_000, None


def replace_activations(
    model: nn.Module,
    old: type[nn.Module] | tuple[type[nn.Module], ...] = nn.ReLU,
    new: Callable[[], nn.Module] = nn.GELU,
) -> list[str]:
    """Replaces every activation of type `old` in the model by `new()`; returns their names.

    Exactly that type, not its subclasses. A module that stands in several places is replaced by one module in
    the same places. Functions kept as attributes count too, such as `nn.TransformerEncoderLayer.activation`;
    calls written into a `forward` cannot be seen. To pass arguments: `new=lambda: nn.LeakyReLU(0.1)`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> replace_activations(model)
    ['1']
    >>> model[1]
    GELU(approximate='none')
    """
    kinds = old if isinstance(old, tuple) else (old,)
    if type(model) in kinds:
        raise ValueError(
            f"the model itself is a {type(model).__name__}, and has no parent in which to replace it: "
            f"use the new activation in its place, or wrap it in nn.Sequential first"
        )
    functions = [function for function, kind in _FUNCTIONS.items() if kind in kinds]
    replacements: dict[nn.Module, nn.Module] = {}
    names = []
    for path, parent in modules_and_wrappers(model):
        for name, value in [*parent._modules.items(), *vars(parent).items()]:
            if type(value) in kinds:
                if value not in replacements:
                    replacements[value] = _made_for(model, new, value.training)
                setattr(parent, name, replacements[value])
            elif any(value is function for function in functions):
                setattr(parent, name, _made_for(model, new, parent.training))
            else:
                continue
            _tell_fast_path(parent)
            is_wrapper = wrapped_in(parent) is not None and name in parent._modules
            names.append(path if is_wrapper else f"{path}.{name}".removeprefix("."))
    _tell_encoders(model)
    return names


_FUNCTIONS: dict[Callable[..., Tensor], type[nn.Module]] = {
    F.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    F.gelu: nn.GELU,
    F.silu: nn.SiLU,
    F.leaky_relu: nn.LeakyReLU,
    F.elu: nn.ELU,
    F.tanh: nn.Tanh,
    torch.tanh: nn.Tanh,
    F.sigmoid: nn.Sigmoid,
    torch.sigmoid: nn.Sigmoid,
}


def _made_for(model: nn.Module, new: Callable[[], nn.Module], training: bool) -> nn.Module:
    """A new activation in the mode of the old one; its parameters, as PReLU has, where the model's are."""
    made = new()
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is not None:
        made.to(device=like.device, dtype=like.dtype)
    return made.train(training)


def _tell_fast_path(layer: nn.Module) -> None:
    """TransformerEncoderLayer notes its activation when it is made, and in eval mode believes the note."""
    if isinstance(layer, nn.TransformerEncoderLayer):
        activation: object = layer.activation
        exact_gelu = isinstance(activation, nn.GELU) and activation.approximate == "none"
        layer.activation_relu_or_gelu = 1 if isinstance(activation, nn.ReLU) else 2 if exact_gelu else 0


def _tell_encoders(model: nn.Module) -> None:
    """TransformerEncoder makes nested tensors of padded batches in eval mode, and they know few activations."""
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            layers = [layer for layer in encoder.layers if isinstance(layer, nn.TransformerEncoderLayer)]
            encoder.use_nested_tensor &= all(layer.activation_relu_or_gelu for layer in layers)


def _warmup_share(step: int, warmup: int, total: int) -> float:
    """The share of the full rate at a step."""
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / max(1, total - warmup))


def _initialise(module: nn.Module, linear: Fill, convolution: Fill, embedding_std: float) -> None:
    with torch.no_grad():
        for layer in module.modules():
            _initialise_layer(layer, linear, convolution)
        # Last: where an output layer shares the embedding's weight, the embedding's smaller scale is right.
        for layer in module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                nn.init.normal_(layer.weight, std=embedding_std)
                if layer.padding_idx is not None:
                    layer.weight[layer.padding_idx].zero_()


def _initialise_layer(layer: nn.Module, linear: Fill, convolution: Fill) -> None:
    if isinstance(layer, _NORMS):
        layer.reset_parameters()  # ones and zeros, and running statistics as of a new layer
    elif isinstance(layer, nn.MultiheadAttention):
        _initialise_attention(layer, linear)
    elif isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":  # GPT-2's linear, transposed
        _fill(layer, linear)
    elif isinstance(layer, _CONVOLUTIONS):
        _fill(layer, convolution)
    elif isinstance(layer, _TRANSPOSED):
        _fill(layer, linear)  # their weight is laid out in x out: only a rule that treats both alike is right


def _initialise_attention(layer: nn.MultiheadAttention, linear: Fill) -> None:
    """The projections of query, key and value are three linear layers, also where they lie in one tensor."""
    if layer.in_proj_weight is not None:
        projections = layer.in_proj_weight.chunk(3)
    else:
        projections = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    for projection in projections:
        linear(projection)
    if layer.in_proj_bias is not None:
        nn.init.zeros_(layer.in_proj_bias)


def _fill(layer: nn.Module, fill: Fill) -> None:
    assert isinstance(layer.weight, Tensor)
    fill(layer.weight)
    if isinstance(layer.bias, Tensor):
        nn.init.zeros_(layer.bias)


_kaiming = partial(nn.init.kaiming_normal_, nonlinearity="relu")
