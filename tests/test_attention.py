"""Attention and output logits of armed steps, against the weights that the model itself gives out, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holter import attention
from holter.attention import ATTENTION, Heads, kind_of, logit_statistics, summarise
from tests.armed import armed, problems_of, watch

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
LLAMA = {**TINY, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 80}
BERT = {**TINY, "intermediate_size": 64, "max_position_embeddings": 90}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50, "n_positions": 80}


def build(name: str, implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    made: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: transformers.GPT2Config(**GPT2),
        "llama": lambda: transformers.LlamaConfig(**LLAMA),
        "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=None),
        "qwen2": lambda: transformers.Qwen2Config(**LLAMA),
        "bert": lambda: transformers.BertConfig(**BERT),
        "roberta": lambda: transformers.RobertaConfig(**BERT),
    }
    kind = transformers.AutoModelForMaskedLM if "bert" in name else transformers.AutoModelForCausalLM
    model: nn.Module = kind.from_config(made[name](), attn_implementation=implementation)
    for parameter in model.parameters():  # sharper than at the start, so that heads differ
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    for module in model.modules():  # the reference must see the same numbers
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for attribute in ("attention_dropout", "attn_pdrop"):
        for module in model.modules():
            if hasattr(module, attribute):
                setattr(module, attribute, 0.0)
    return model.train()


def entropy_of(weights: Tensor) -> Tensor:
    """Per query, from weights that sum to one."""
    return torch.special.entr(weights.detach()).sum(-1)


def _summary(logits: Tensor, dim: int) -> list[float]:
    return [float(logits.mean()), float(logits.logsumexp(dim).mean())]


NAMES = ("gpt2", "llama", "mistral", "qwen2", "bert", "roberta")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_entropy_is_that_of_the_models_own_attention_weights(name: str, padded: bool) -> None:
    model, truth = build(name), build(name, "eager").double()
    tokens = torch.randint(2, 50, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    if padded:
        mask[1, 14:] = 0
    capture = watch(model)
    capture.arm()
    output = model(tokens, attention_mask=mask)
    output.logits.sum().backward()
    found = capture.collect()
    assert found is not None and problems_of(capture) == []
    expected = truth(tokens, attention_mask=mask, output_attentions=True)
    assert len(found.attention) == len(expected.attentions) == 2
    for (layer, values), weights in zip(found.attention.items(), expected.attentions, strict=True):
        assert "attn" in layer or "attention" in layer
        assert float(values[1]) == pytest.approx(float(entropy_of(weights).mean()), rel=1e-3), layer
        assert 0 < float(values[1]) < math.log(20)
    logits = expected.logits.detach()
    assert found.logits is not None
    assert found.logits.tolist() == pytest.approx(_summary(logits, -1), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_logit_is_the_largest_that_went_into_the_softmax(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, truth = build(name), build(name, "eager").double()
    tokens = torch.randint(2, 50, (2, 20))
    found = armed(model, tokens)
    largest: list[float] = []
    softmax = nn.functional.softmax

    def keep(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        largest.append(float(x.detach().max()))
        return softmax(x, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "softmax", keep)
    truth(tokens)
    assert [float(values[0]) for values in found.attention.values()] == pytest.approx(largest, rel=1e-3)


def test_a_layer_without_its_rotation_or_its_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: the check above sees what is left out."""
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_rotated", lambda x, cos, sin: x)
        with pytest.raises(AssertionError):
            test_entropy_is_that_of_the_models_own_attention_weights("llama", False)
    monkeypatch.setattr(attention, "_transformers_mask", lambda mask: torch.zeros(1, 1, 1, 1))
    with pytest.raises(AssertionError):
        test_entropy_is_that_of_the_models_own_attention_weights("bert", True)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_transformers_model_is_trained_bit_exactly_and_its_blocks_are_seen(name: str) -> None:
    model = build(name)
    twin = copy.deepcopy(model)
    tokens = torch.randint(2, 50, (2, 20))
    capture = watch(model)
    capture.arm()
    mine, theirs = (one(tokens, labels=tokens) for one in (model, twin))
    for output in (mine, theirs):
        output.loss.backward()
    found = capture.collect()
    assert found is not None and len(found.blocks) == 2 and problems_of(capture) == []
    assert torch.equal(mine.logits, theirs.logits)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.grad is None if b.grad is None else torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_transformers_model_is_counted_once(reentrant: bool) -> None:
    model = build("llama")
    tokens = torch.randint(2, 50, (2, 20))
    expected = armed(model, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    model.enable_input_require_grads()  # type: ignore[operator]
    found = armed(model, tokens)
    assert found.order == expected.order and set(found.parts[0].calls) == {1}
    assert all(torch.equal(found.attention[layer], values) for layer, values in expected.attention.items())


# nn.MultiheadAttention ----------------------------------------------------------------------------------------


def _torch_case(case: str) -> tuple[nn.MultiheadAttention, tuple[Tensor, ...], dict[str, Any]]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_first": case != "batch second", "bias": case != "no bias"}
    if case == "other keys":
        options |= {"kdim": 5, "vdim": 6}
    module = nn.MultiheadAttention(16, 4, **options)
    x = torch.randn(2, 12, 16) * 4
    inputs: tuple[Tensor, ...] = (x, x, x)
    if case == "batch second":
        inputs = tuple(one.transpose(0, 1) for one in inputs)
    if case == "unbatched":
        inputs = (x[0], x[0], x[0])
    if case == "other keys":
        inputs = (x, torch.randn(2, 9, 5), torch.randn(2, 9, 6))
    given: dict[str, Any] = {}
    if case in ("causal", "causal and padded"):
        given["attn_mask"] = torch.ones(12, 12, dtype=torch.bool).triu(1)
    if case == "causal and padded":
        given["key_padding_mask"] = torch.arange(12).expand(2, 12) >= torch.tensor([[12], [7]])
    if case == "added":
        given["attn_mask"] = torch.randn(2 * 4, 12, 12)
    return module, inputs, given


CASES = ("plain", "batch second", "no bias", "unbatched", "other keys", "causal", "causal and padded", "added")


@pytest.mark.parametrize("case", CASES)
def test_torchs_own_attention_is_read_as_it_computes(case: str) -> None:
    module, inputs, given = _torch_case(case)
    capture = watch(module)
    capture.arm()
    module(*inputs, **given)
    found = capture.collect()
    assert found is not None and problems_of(capture) == []
    exact = copy.deepcopy(module).double()
    mask = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    _, weights = exact(*(x.double() for x in inputs), **mask, need_weights=True, average_attn_weights=False)
    values = dict(zip(ATTENTION, found.attention["model"].tolist(), strict=True))
    assert values["entropy"] == pytest.approx(float(entropy_of(weights).mean()), rel=1e-4)
    if case == "plain":
        q, k, _ = (
            nn.functional.linear(inputs[0].double(), exact.in_proj_weight, exact.in_proj_bias).detach().split(16, -1)
        )
        q, k = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k))
        assert values["max_logit"] == pytest.approx(float((q @ k.transpose(2, 3) / 2).max()), rel=1e-5)


def test_an_encoders_masks_reach_its_attention() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(7, 3, 16)
    capture = watch(model)
    capture.arm()
    model(x, mask=nn.Transformer.generate_square_subsequent_mask(7), is_causal=True)
    found = capture.collect()
    assert found is not None and problems_of(capture) == []
    # Seven queries see 1 to 7 keys: near the start all keys are about equally likely.
    uniform = sum(math.log(n) for n in range(1, 8)) / 7
    assert 0.7 * uniform < float(found.attention["layers.0.self_attn"][1]) <= uniform


def test_what_is_not_known_is_not_guessed() -> None:
    assert kind_of(nn.MultiheadAttention(8, 2, add_bias_kv=True)) is None
    assert kind_of(nn.MultiheadAttention(8, 2, add_zero_attn=True)) is None
    assert kind_of(nn.Linear(2, 2)) is None


# Arithmetic ---------------------------------------------------------------------------------------------------


def test_one_sharp_head_and_one_that_looks_everywhere() -> None:
    keys = torch.eye(8).view(1, 8, 1, 8)
    sharp = summarise(Heads(1e4 * torch.eye(8).view(1, 8, 1, 8), keys, 1.0))
    assert sharp.tolist() == [1e4, 0.0]
    even = summarise(Heads(torch.zeros(1, 8, 1, 8), keys, 1.0))
    assert even.tolist() == pytest.approx([0.0, math.log(8)])


def test_a_query_that_may_see_nothing_is_left_out() -> None:
    bias = torch.zeros(1, 1, 2, 4)
    bias[..., 0, :] = -math.inf
    found = summarise(Heads(torch.zeros(1, 2, 1, 3), torch.zeros(1, 4, 1, 3), 1.0, [bias]))
    assert found.tolist() == pytest.approx([0.0, math.log(4)])


def test_a_logit_that_is_not_finite_shows() -> None:
    queries = torch.full((1, 2, 1, 3), math.nan)
    assert torch.isnan(summarise(Heads(queries, torch.ones(1, 4, 1, 3), 1.0))).all()


def test_long_contexts_with_many_heads_take_fewer_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    heads = Heads(torch.randn(3, 200, 4, 8), torch.randn(3, 200, 2, 8), 1.0, is_causal=True)
    assert attention._logits(heads).shape == (2, 4, 64, 200)
    monkeypatch.setattr(attention, "_MOST_LOGITS", 2 * 4 * 10 * 200)
    logits = attention._logits(heads)
    assert logits.shape == (2, 4, 10, 200)
    seen = (logits != -math.inf).sum(-1)[0, 0] - 1  # the places of the sampled queries
    q = heads.queries[:2, seen].transpose(1, 2)
    k = heads.keys[:2].repeat_interleave(2, dim=2).transpose(1, 2)
    full = (q @ k.transpose(2, 3)).masked_fill(torch.arange(200) > seen[:, None], -math.inf)
    assert torch.allclose(logits, full, atol=1e-5)


def test_logits_of_images_classes_and_what_has_none() -> None:
    torch.manual_seed(0)
    for shape, dim in (((4, 9), 1), ((4, 5, 9), 2), ((2, 9, 3, 3), 1)):
        y = torch.randn(*shape)
        found = logit_statistics(y)
        assert found is not None
        assert found.tolist() == pytest.approx(_summary(y.double(), dim), abs=1e-5)
    assert logit_statistics(torch.randn(5)) is None and logit_statistics(torch.randn(5, 1)) is None
