"""Roles of layers: every parameter of real models against roles written down by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from holter import layer_roles
from holter.layer_roles import ROLES, module_roles, role_of_module, roles_of, tied_parameters

Expected = Mapping[str, str]  # a layer's name -> the role of its parameters
SMALL = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 20}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.hidden, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)


class Wrapper(nn.Module):
    """As DistributedDataParallel wraps a model."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Mlp()


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )
        self.fc = nn.Linear(4, 10)


class LstmClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True)
        self.cell = nn.GRUCell(8, 8)
        self.answer = nn.Linear(16, 3)


class Encoder(nn.Module):
    """A vision transformer of torch's own parts, with the parameters that hang on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.temperature = nn.Parameter(torch.ones(()))
        self.patches = nn.Conv2d(3, 8, 4, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))
        self.heads = nn.Linear(8, 3)


def per_block(prefix: str, layers: Expected, blocks: int = 2) -> dict[str, str]:
    return {f"{prefix}.{block}.{name}": role for block in range(blocks) for name, role in layers.items()}


TORCH_BLOCK = {"self_attn": "attention", "self_attn.out_proj": "attention", "linear1": "ffn", "linear2": "ffn"}
TORCH_BLOCK |= {"norm1": "norm", "norm2": "norm"}
GPT2_BLOCK = {"ln_1": "norm", "attn.c_attn": "attention", "attn.c_proj": "attention"}
GPT2_BLOCK |= {"ln_2": "norm", "mlp.c_fc": "ffn", "mlp.c_proj": "ffn"}
LLAMA_BLOCK = {f"self_attn.{letter}_proj": "attention" for letter in "qkvo"}
LLAMA_BLOCK |= {"mlp.gate_proj": "ffn", "mlp.up_proj": "ffn", "mlp.down_proj": "ffn"}
LLAMA_BLOCK |= {"input_layernorm": "norm", "post_attention_layernorm": "norm"}
BERT_BLOCK = {f"attention.self.{name}": "attention" for name in ("query", "key", "value")}
BERT_BLOCK |= {"attention.output.dense": "attention", "attention.output.LayerNorm": "norm"}
BERT_BLOCK |= {"intermediate.dense": "ffn", "output.dense": "ffn", "output.LayerNorm": "norm"}
BERT = {f"bert.embeddings.{name}_embeddings": "embedding" for name in ("word", "position", "token_type")}
BERT |= {"bert.embeddings.LayerNorm": "norm", **per_block("bert.encoder.layer", BERT_BLOCK)}

CASES: dict[str, tuple[Callable[[], nn.Module], Expected]] = {
    "sequential": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        {"0": "ffn", "2": "ffn", "4": "output"},
    ),
    "mlp": (Mlp, {"fc1": "ffn", "hidden": "ffn", "fc2": "output"}),
    "wrapped": (Wrapper, {"module.fc1": "ffn", "module.hidden": "ffn", "module.fc2": "output"}),
    "cnn": (
        Cnn,
        {"features.0": "conv", "features.1": "norm", "features.3": "conv", "features.4": "norm", "fc": "output"},
    ),
    "lstm": (LstmClassifier, {"words": "embedding", "lstm": "recurrent", "cell": "recurrent", "answer": "output"}),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        per_block("layers", TORCH_BLOCK),
    ),
    "vision": (
        Encoder,
        {"patches": "conv", **per_block("encoder.layers", TORCH_BLOCK), "encoder.norm": "norm", "heads": "output"}
        | {"": "other"},  # by layer; cls_token and pos_embed are named below
    ),
    "gpt2": (
        lambda: transformers_model("GPT2", "LMHeadModel", n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=8),
        {"transformer.wte": "embedding", "transformer.wpe": "embedding", "transformer.ln_f": "norm"}
        | {"lm_head": "embedding", **per_block("transformer.h", GPT2_BLOCK)},
    ),
    "gpt2-classifier": (
        lambda: transformers_model(
            "GPT2", "ForSequenceClassification", n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=8
        ),
        {"transformer.wte": "embedding", "transformer.wpe": "embedding", "transformer.ln_f": "norm"}
        | {"score": "output", **per_block("transformer.h", GPT2_BLOCK)},
    ),
    "llama": (
        lambda: transformers_model("Llama", "ForCausalLM", num_key_value_heads=1, **SMALL),
        {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "output"}
        | per_block("model.layers", LLAMA_BLOCK),
    ),
    "bert-classifier": (
        lambda: transformers_model("Bert", "ForSequenceClassification", max_position_embeddings=8, **SMALL),
        BERT | {"bert.pooler.dense": "other", "classifier": "output"},
    ),
    "bert-masked": (
        lambda: transformers_model("Bert", "ForMaskedLM", max_position_embeddings=8, **SMALL),
        BERT
        | {"cls.predictions": "output", "cls.predictions.transform.dense": "output"}
        | {"cls.predictions.transform.LayerNorm": "norm", "cls.predictions.decoder": "output"},
    ),
}
# Parameters whose role is not that of their layer.
EXCEPTIONS = {
    "vision": {"cls_token": "embedding", "pos_embed": "embedding"},
    "bert-masked": {"cls.predictions.decoder.weight": "embedding"},
}


def transformers_model(family: str, kind: str, **sizes: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"{family}{kind}")(config)
    return model


def faults(case: str) -> list[str]:
    """Parameters whose role is not the expected one; layers that were expected and are not there."""
    build, expected = CASES[case]
    model = build()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    truth = {name: expected.get(name.rpartition(".")[0], "not written down") for name in names}
    truth |= EXCEPTIONS.get(case, {})
    found = roles_of(model)
    wrong = [f"{name}: {found.get(name)}, not {truth[name]}" for name in truth if found.get(name) != truth[name]]
    return wrong + [f"no {layer}" for layer in expected if layer not in {name.rpartition(".")[0] for name in names}]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_of_a_real_model_has_its_role(case: str) -> None:
    assert faults(case) == []


@pytest.mark.parametrize(
    ("case", "gate", "planted"),
    [
        ("sequential", "_is_linear", lambda module: False),
        ("gpt2", "_role_by_type", lambda module: "conv" if type(module).__name__.startswith("Conv") else None),
        ("wrapped", "_on_main_path", lambda module, name: iter(())),
        ("cnn", "_TYPES", ()),
        ("llama", "_NORM_CLASS", re.compile("$^")),
        ("bert-classifier", "_WORDS", ()),
        ("transformer", "_WORDS", ()),
        ("vision", "_WORDS", ()),
        ("llama", "_matching", lambda table, text: None),
    ],
)
def test_planted_faults_are_seen(case: str, gate: str, planted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_roles, gate, planted)
    assert faults(case)


def test_tied_weights_have_one_role_and_are_noted() -> None:
    gpt2 = CASES["gpt2"][0]()
    assert tied_parameters(gpt2) == {"lm_head.weight": "transformer.wte.weight"}
    assert roles_of(gpt2)["lm_head.weight"] == roles_of(gpt2)["transformer.wte.weight"] == "embedding"
    assert module_roles(gpt2)["lm_head"] == "output"  # what comes out of it is the output all the same
    assert tied_parameters(Mlp()) == {}


def test_a_head_that_is_registered_before_its_tied_embedding() -> None:
    model = nn.ModuleDict({"head": nn.Linear(8, 20, bias=False), "words": nn.Embedding(20, 8)})
    model["words"].weight = model["head"].weight
    assert roles_of(model) == {"head.weight": "embedding", "words.weight": "embedding"}


def test_every_module_has_a_role_of_the_list() -> None:
    model = Encoder()
    roles = module_roles(model)
    assert set(roles) == {name for name, _ in model.named_modules()} and set(roles.values()) <= set(ROLES)
    assert roles["encoder.layers.0.self_attn"] == "attention" and roles[""] == "other"


@pytest.mark.parametrize(
    ("name", "module", "role"),
    [
        ("blocks.3.attn.qkv", nn.Linear(2, 2), "attention"),
        ("net.query", nn.Linear(2, 2), "attention"),
        ("value", nn.Linear(2, 1), "other"),  # a critic's
        ("blocks.0.head", nn.Linear(2, 2), "other"),  # a block's, not the model's
        ("blocks.0.sa.heads.1.key", nn.Linear(2, 2), "attention"),
        ("layers.0.attention.norm", nn.LayerNorm(2), "norm"),
        ("layers.0.ffn.0", nn.Linear(2, 2), "ffn"),
        ("a.b.c", nn.Linear(2, 2), "other"),
        ("decoder", nn.Linear(2, 9), "output"),
        ("decoder", nn.Sequential(nn.Linear(2, 9)), "other"),
        ("anything", nn.RMSNorm(2), "norm"),
        ("anything", nn.Conv1d(2, 2, 1), "conv"),
        ("anything", nn.GRU(2, 2), "recurrent"),
        ("anything", nn.MultiheadAttention(2, 1), "attention"),
        ("", nn.Linear(2, 2), "other"),
    ],
)
def test_a_role_from_type_and_name_alone(name: str, module: nn.Module, role: str) -> None:
    assert role_of_module(name, module) == role


def test_a_parent_whose_class_is_attention_counts_though_its_name_says_nothing() -> None:
    class CausalSelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.LayerNorm(2)

    class PreNorm(nn.Module):  # a wrapper named like a norm is none
        def __init__(self) -> None:
            super().__init__()
            self.fn = CausalSelfAttention()

    roles = module_roles(nn.Sequential(PreNorm(), nn.Linear(2, 2)))
    assert (roles["0"], roles["0.fn.a"], roles["0.fn.b"], roles["1"]) == ("other", "attention", "norm", "output")


def test_a_linear_layer_before_convolutions_is_no_output() -> None:
    model = nn.ModuleDict({"time": nn.Linear(2, 2), "last": nn.Conv2d(2, 2, 1)})
    assert module_roles(model)["time"] == "ffn"
