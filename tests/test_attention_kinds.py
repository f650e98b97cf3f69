"""Attention that others wrote: one that only has a known name is not looked at, and nothing is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

import holter
from tests.armed import armed, problems_of, watch
from tests.test_attention import BERT, LLAMA, TINY, build, entropy_of

transformers = pytest.importorskip("transformers")


def seen(model: nn.Module, forward: Callable[[], Tensor]) -> set[str]:
    """The attentions that two watched steps show, without a word of complaint."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    options: dict[str, Any] = {"run": False, "budget": None, "machine": False, "diagnose": False, "activations": 1}
    with holter.watch(model, optimizer, **options) as monitor:
        for _ in range(2):
            forward().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [finding.evidence for finding in monitor.findings] == []
    assert "activation" in monitor.history.roles
    return set(monitor.history.layers("attention"))


# Written by hand ------------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """As in nanoGPT."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(2, (self.n_head, -1)).transpose(1, 2) for one in self.c_attn(x).split(self.n_embd, 2))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Separate(nn.Module):
    """Four query heads share two key heads; `project` is how queries and keys are made."""

    def __init__(self, width: int = 16, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        size = width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, shared * size), nn.Linear(width, shared * size)
        self.heads, self.shared = heads, shared

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x)

    def attend(self, x: Tensor) -> Tensor:
        q, k = self.project(x)
        q, k, v = (
            one.unflatten(2, (n, -1)).transpose(1, 2)
            for one, n in ((q, self.heads), (k, self.shared), (self.v_proj(x), self.shared))
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class Sized(Separate):
    """Has all of Llama's attributes; its rotation, if any, is its own."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.head_dim, self.scaling, self.is_causal, self.layer_idx = 4, 0.5, True, 0


class Rotated(Sized):
    """Takes what Llama's takes; `turns` are of another shape or make."""

    turns: Any = (torch.ones(1, 6, 2), torch.zeros(1, 6, 2))
    mask: Any = None
    cache: Any = None

    def forward(
        self, x: Tensor, position_embeddings: Any = None, attention_mask: Any = None, past_key_values: Any = None
    ) -> Tensor:
        if position_embeddings is None and self.turns is not None:
            return self(x, self.turns, self.mask, past_key_values=self.cache)  # type: ignore[no-any-return]
        return self.attend(x)


class Unrotated(Rotated):
    turns = None


class OneTurn(Rotated):
    turns = torch.ones(1, 6, 4)


_FULL = (torch.ones(1, 6, 4), torch.zeros(1, 6, 4))


class Masked(Rotated):
    """By an object, as flex attention's BlockMask."""

    turns, mask = _FULL, {"of": "blocks"}


class MaskedWider(Rotated):
    turns, mask = _FULL, torch.ones(2, 1, 6, 9, dtype=torch.bool)


class Cached(Rotated):
    turns, cache = _FULL, [(torch.ones(2, 2, 9, 4), torch.ones(2, 2, 9, 4))]


class Windowed(Rotated):
    turns, sliding_window = _FULL, 4


class ByFunction(Sized):
    """The projection is a function of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.query_weight = self._modules.pop("q_proj")

    def q_proj(self, x: Tensor) -> Tensor:  # type: ignore[no-redef]
        return self.query_weight(x)  # type: ignore[misc, no-any-return]

    def forward(self, x: Tensor, position_embeddings: Any = _FULL, attention_mask: Any = None) -> Tensor:
        return self.attend(x)


class Uncalled(Rotated):
    """Its projections hold weights, and are not called."""

    turns = _FULL

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return linear(x, self.q_proj.weight), linear(x, self.k_proj.weight)


class Several(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Pairs(Rotated):
    """Its projections give out tuples, as those of tensor-parallel libraries do."""

    turns = _FULL

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = Several(16, 16), Several(16, 8)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_proj(x)[0], self.k_proj(x)[0]


class Flat(Rotated):
    """Its projections give out [batch, heads, tokens, width]."""

    turns = _FULL

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Sequential(nn.Linear(16, 16), nn.Unflatten(2, (4, 4)))
        self.k_proj = nn.Sequential(nn.Linear(16, 8), nn.Unflatten(2, (2, 4)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_proj(x).flatten(2), self.k_proj(x).flatten(2)


class Odd(Fused):
    """Has GPT-2's attributes, and queries, keys and values of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.split_size, self.head_dim = nn.Linear(16, 32), 16, 4

    def forward(self, x: Tensor, attention_mask: Any = None) -> Tensor:
        q, k, v = (one.unflatten(2, (-1, 4)).transpose(1, 2) for one in self.c_attn(x).split((16, 8, 8), 2))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Torchs(nn.MultiheadAttention):
    """Takes one sequence, and makes of it what it likes."""

    def __init__(self) -> None:
        super().__init__(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.flip(1), x, x, need_weights=False)[0]


NAMED: list[tuple[str, type[nn.Module]]] = [
    *(("CausalSelfAttention", kind) for kind in (Fused, Separate)),
    *(("GPT2Attention", kind) for kind in (Fused, Odd)),
    *(("LlamaAttention", kind) for kind in (Fused, Separate, Sized, Rotated, Unrotated, OneTurn, ByFunction, Uncalled)),
    *(("LlamaAttention", kind) for kind in (Masked, MaskedWider, Cached, Windowed, Pairs, Flat)),
    *(("MistralAttention", kind) for kind in (Separate, Rotated)),
    *(("BertSelfAttention", kind) for kind in (Fused, Separate)),
    ("MultiheadAttention", Torchs),
]


@pytest.mark.parametrize(("name", "kind"), NAMED, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_what_only_has_a_known_name_is_left_alone(name: str, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    attention = type(name, (kind,), {})()
    model = nn.Sequential(nn.Linear(5, 16), attention, nn.Linear(16, 2))
    x = torch.randn(2, 6, 5)
    assert seen(model, lambda: model(x).square().mean()) == set()


# Others' models -------------------------------------------------------------------------------------------------

WHISPER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50, "num_mel_bins": 8}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
ONE = {"num_hidden_layers": 1}
SEEING = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 8, "patch_size": 4} | ONE

MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA | ONE, head_dim=8),
    "gemma": lambda: transformers.GemmaConfig(**LLAMA | ONE, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**LLAMA | ONE, head_dim=8),
    "distilbert": lambda: transformers.DistilBertConfig(dim=32, n_heads=4, n_layers=1, hidden_dim=64, vocab_size=50),
    "t5": lambda: transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=50, decoder_start_token_id=0
    ),
    "bart": lambda: transformers.BartConfig(**WHISPER | TOKENS, max_position_embeddings=40),
    "vit": lambda: transformers.ViTConfig(**SEEING, num_labels=3),
    "opt": lambda: transformers.OPTConfig(**TINY | ONE, ffn_dim=64, word_embed_proj_dim=32),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**BERT | ONE),
    "phi": lambda: transformers.PhiConfig(**BERT | ONE),
    "falcon": lambda: transformers.FalconConfig(**TINY | ONE),
    "mamba": lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50, state_size=4),
    "whisper": lambda: transformers.WhisperConfig(**WHISPER | TOKENS, max_source_positions=10, max_target_positions=20),
    "clip": lambda: transformers.CLIPConfig(
        text_config=BERT | ONE | {"eos_token_id": 2}, vision_config=SEEING, projection_dim=16
    ),
}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    tokens, images = torch.randint(3, 50, (2, 12)), torch.randn(2, 3, 8, 8)
    config = MODELS[name]()
    if name == "vit":
        return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.tensor([0, 1])}
    if name == "clip":
        given = {"input_ids": tokens, "pixel_values": images, "return_loss": torch.tensor(True)}
        return transformers.CLIPModel(config), given
    if name == "whisper":
        given = {"input_features": torch.randn(2, 8, 20), "labels": tokens}
        return transformers.WhisperForConditionalGeneration(config), given
    if name in ("t5", "bart"):
        model: nn.Module = transformers.AutoModelForSeq2SeqLM.from_config(config)
    elif name == "distilbert":
        model = transformers.AutoModelForMaskedLM.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("name", MODELS)
def test_attention_of_other_architectures_leads_to_no_complaint(name: str) -> None:
    torch.manual_seed(0)
    model, given = made(name)
    assert seen(model.train(), lambda: model(**given).loss) == set()


class Added(nn.Module):
    """A projection and something small beside it, as of LoRA."""

    def __init__(self, base: nn.Module, width: int, size: int) -> None:
        super().__init__()
        self.base_layer, self.a, self.b = base, nn.Linear(width, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))  # type: ignore[no-any-return]


class Rounded(nn.Module):
    """A projection whose weights are kept as small whole numbers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = float(base.weight.detach().abs().max()) / 127
        self.register_buffer("weight", (base.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype) * self.scale)


def _wrapped(model: nn.Module, how: str) -> nn.Module:
    torch.manual_seed(1)
    for block in model.model.layers:  # type: ignore[union-attr]
        attention: Any = block.self_attn
        if how == "added to":
            attention.q_proj = Added(attention.q_proj, 32, 32)
        else:
            attention.q_proj, attention.k_proj = Rounded(attention.q_proj), Rounded(attention.k_proj)
    return model


@pytest.mark.parametrize("how", ["added to", "rounded"])
def test_projections_that_are_no_linear_layers_are_read_as_they_compute(how: str) -> None:
    model, truth = _wrapped(build("llama"), how), _wrapped(build("llama", "eager"), how).double()
    tokens = torch.randint(2, 50, (2, 20))
    found = armed(model, tokens).attention
    expected = truth(tokens, output_attentions=True).attentions
    entropies = [float(entropy_of(weights).mean()) for weights in expected]
    assert [float(values[1]) for values in found.values()] == pytest.approx(entropies, rel=1e-3)


@pytest.mark.parametrize("window", [4, 64])
def test_a_window_is_that_of_the_models_own_attention(window: int) -> None:
    model, truth = (build("mistral", how) for how in ("sdpa", "eager"))
    for one in (model, truth):
        one.config.sliding_window = window  # type: ignore[union-attr]
        for block in one.model.layers:  # type: ignore[union-attr]
            block.self_attn.sliding_window = window  # type: ignore[union-attr]
    tokens = torch.randint(2, 50, (2, 20))
    found = armed(model, tokens).attention
    expected = truth.double()(tokens, output_attentions=True).attentions
    entropies = [float(entropy_of(weights).mean()) for weights in expected]
    assert [float(values[1]) for values in found.values()] == pytest.approx(entropies, rel=1e-3)
    assert max(entropies) < math.log(min(window, 20))


def test_attention_to_keys_besides_its_own_is_left_alone() -> None:
    """As of a prefix that is learnt: its keys are not among those that are projected."""
    model = build("llama")
    prefix = [torch.randn(2, 2, 3, 8) for _ in range(2)]
    cache = transformers.DynamicCache()
    for place in range(2):
        cache.update(*prefix, place)
    capture = watch(model)
    capture.arm()
    model(torch.randint(2, 50, (2, 20)), past_key_values=cache).logits.sum().backward()
    found = capture.collect()
    assert found is not None and found.attention == {} and problems_of(capture) == []
