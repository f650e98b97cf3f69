"""Judgements over series and names, against brute force and against the names that real models have."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holter.verdicts
from holter.verdicts import (
    advise_max_norm,
    categorize_problem_layers,
    check_loss,
    compare_gradient_distributions,
    find_exploding,
    find_unstable,
    find_vanishing,
    validate_fix_effectiveness,
)

norms_of_any_kind = st.lists(
    st.sampled_from([0.0, 1e-9, 1e-7, 2e-7, 0.5, 1.0, 3.0, 50.0, 100.0, 101.0, 1e6, math.inf, math.nan]), max_size=30
)


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(holter.verdicts)
    assert outcome.attempted >= 8 and outcome.failed == 0


def test_a_series_has_one_dimension() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        find_vanishing(np.zeros((2, 2)))


# C2-C4: series of norms


@given(norms_of_any_kind, st.integers(1, 4))
def test_vanishing_is_every_long_enough_stretch_below_the_threshold(norms: list[float], consecutive: int) -> None:
    """C2: step by step, a step is in a span where it lies in a run of enough norms < 1e-7."""
    inside = {step for span in find_vanishing(norms, consecutive=consecutive) for step in range(span.start, span.stop)}
    for step in range(len(norms)):
        windows = [norms[max(0, first) : first + consecutive] for first in range(step - consecutive + 1, step + 1)]
        expected = any(len(window) == consecutive and all(norm < 1e-7 for norm in window) for window in windows)
        assert (step in inside) is expected


def test_one_small_norm_is_not_yet_vanishing() -> None:
    """C2: several consecutive steps; the threshold is the caller's."""
    assert find_vanishing([1, 1e-8, 1, 1e-8, 1e-8, 1]) == []
    assert [(s.start, s.stop) for s in find_vanishing([1, 1e-8, 1, 1e-8, 1e-8], consecutive=2)] == [(3, 5)]
    assert [(s.start, s.stop) for s in find_vanishing([0.5, 0.5, 0.5], threshold=0.6)] == [(0, 3)]


@given(norms_of_any_kind)
def test_exploding_holds_every_norm_above_the_threshold_or_not_finite(norms: list[float]) -> None:
    """C3: each with the reason that is true of it, and no healthy norm with either."""
    spans = find_exploding(norms, consecutive=10**6)
    for step, norm in enumerate(norms):
        reasons = [span.reason for span in spans if span.start <= step < span.stop]
        assert reasons == ([] if norm <= 100 else ["norm > 100"] if math.isfinite(norm) else ["norm is not finite"])


def test_exponential_growth_is_found_below_the_threshold() -> None:
    """C3: five doublings are exponential; four are not, nor is a rise that pauses, nor a linear one."""
    (span,) = find_exploding([1, *(0.01 * 2.0**k for k in range(6)), 0.2, 0.2])
    assert (span.start, span.stop) == (1, 7)
    assert "1.5x" in span.reason
    assert find_exploding([0.01 * 2.0**k for k in range(5)]) == []
    assert find_exploding([0.01, 0.02, 0.04, 0.04, 0.08, 0.16, 0.32]) == []
    assert find_exploding(np.linspace(10, 90, 50)) == []
    assert find_exploding([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]) == []
    assert len(find_exploding([1, 1.2, 1.44, 1.73], growth=1.15, consecutive=3)) == 1


@given(norms_of_any_kind)
def test_unstable_is_every_change_by_more_than_ten(norms: list[float]) -> None:
    """C4: up or down; to and from zero, and to and from what is not finite."""
    inside = {step for span in find_unstable(norms) for step in range(span.start, span.stop)}
    for step in range(1, len(norms)):
        before, now = norms[step - 1], norms[step]
        if math.isfinite(before) and math.isfinite(now):
            expected = now > 10 * before or before > 10 * now
        else:
            expected = math.isfinite(before) != math.isfinite(now)
        assert (step in inside) is expected
    assert 0 not in inside


def test_the_factor_of_instability_is_the_callers() -> None:
    """C4."""
    assert find_unstable([1, 3]) == []
    assert [(s.start, s.stop) for s in find_unstable([1, 3, 1], factor=2)] == [(1, 3)]


# C5: losses


@given(st.lists(st.floats(0.01, 100), min_size=10, max_size=25))
def test_the_loss_check_is_its_definition(losses: list[float]) -> None:
    """C5: std > 2 x mean of the last 10; all of the last 10 > 0.99 of the first of them."""
    last = np.array(losses[-10:])
    found = check_loss(losses)
    assert found.high_variance is bool(last.std() > 2 * last.mean())
    assert found.plateau is all(loss > last[0] * 0.99 for loss in last)
    assert found.nonfinite is False


def test_the_loss_check_finds_each_problem_and_only_that() -> None:
    """C5: and names it."""
    assert check_loss(np.linspace(2, 1, 30)).problems == ()
    assert check_loss([5.0] * 3 + [1.0] * 10).problems == ("plateau",)
    assert check_loss([1.0] + [0.991] * 9).problems == ("plateau",)
    assert check_loss([1.0] * 9 + [0.989]).problems == ()
    assert check_loss([1.0] + [1e-3] * 8 + [100.0]).problems == ("high_variance",)
    for bad in (math.nan, math.inf):
        assert check_loss([1.0] * 20 + [bad]).problems == ("nonfinite",)
        assert check_loss([bad] + [1.0] * 5).problems == ()  # over by now, and too few to judge
    assert check_loss([1.0] * 9).problems == check_loss([]).problems == ()
    assert check_loss([1.0] * 3, window=3).problems == ("plateau",)
    assert check_loss(-np.linspace(1, 2, 10)).problems == ()  # a loss below zero that falls
    assert check_loss([-1.0] * 10).problems == ("plateau",)


# C10, C11: did the fix work


def test_the_comparison_gives_means_deviations_and_the_verdict() -> None:
    """C10: mappings by layer or plain series."""
    found = compare_gradient_distributions({"a": 100.0, "b": 300.0}, iter([1.0, 3.0]))
    assert (found.mean_before, found.mean_after, found.std_before, found.std_after) == (200.0, 2.0, 100.0, 1.0)
    assert (found.vanishing_fixed, found.exploding_fixed, found.steadier) == (False, True, True)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1e-9, 3e-9], [0.1, 0.3], (True, False, False)),
        ([1.0, 3.0], [10.0, 30.0], (True, False, False)),  # ten times is enough
        ([1.0, 3.0], [9.9, 29.9], (False, False, False)),
        ([10.0, 30.0], [1.0, 3.0], (False, True, True)),
        ([10.0, 30.0], [1.1, 3.1], (False, False, True)),
        ([1.0, 3.0], [1.5, 2.5], (False, False, True)),  # halved is enough
        ([1.0, 3.0], [1.4, 2.6], (False, False, False)),
        ([1.0, 1.0], [1.0, 1.0], (False, False, False)),
        ([0.0, 0.0], [0.0, 0.0], (False, False, False)),
        ([0.0, 0.0], [0.1, 0.1], (True, False, False)),
        ([math.nan, 1.0], [1.0, 2.0], (False, True, False)),
        ([math.inf, 1.0], [1.0, 2.0], (False, True, False)),
        ([1.0, 1.0], [math.inf, 1.0], (False, False, False)),
        ([1.0, 1.0], [math.nan, 1.0], (False, False, False)),
        ([math.nan], [math.nan], (False, False, False)),
    ],
)
def test_the_verdict_of_the_comparison(
    before: list[float], after: list[float], verdict: tuple[bool, bool, bool]
) -> None:
    """C10: vanishing fixed where the mean rose 10x, exploding fixed where it fell 10x, steadier where std halved."""
    found = compare_gradient_distributions(before, after)
    assert (found.vanishing_fixed, found.exploding_fixed, found.steadier) == verdict


def test_nothing_to_compare_is_an_error_that_says_what_to_do() -> None:
    """C10, C11."""
    with pytest.raises(ValueError, match="backward"):
        compare_gradient_distributions({}, {"a": 1.0})
    with pytest.raises(ValueError, match="got 0 and 1"):
        validate_fix_effectiveness([], [1.0])
    with pytest.raises(ValueError, match="window"):
        validate_fix_effectiveness([1.0], [1.0], window=1)


@given(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=80),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=80),
    st.integers(2, 60),
)
def test_the_effect_of_a_fix_is_numpys(before: list[float], after: list[float], window: int) -> None:
    """C11: slopes by polyfit, and the improvement of the mean in percent, over the last `window` of each."""
    found = validate_fix_effectiveness(before, after, window)
    old, new = np.array(before[-window:]), np.array(after[-window:])
    assert found.slope_before == pytest.approx(np.polyfit(np.arange(len(old)), old, 1)[0], abs=1e-9)
    assert found.slope_after == pytest.approx(np.polyfit(np.arange(len(new)), new, 1)[0], abs=1e-9)
    assert found.improvement_percent == pytest.approx(100 * (old.mean() - new.mean()) / old.mean(), abs=1e-9)
    assert found.effective is bool(new.mean() < old.mean())


def test_losses_that_are_not_finite_are_told_apart() -> None:
    """C11: a fix that ends the NaNs is effective, one that brings them is not; slopes are of the finite losses."""
    cured = validate_fix_effectiveness([1.0, 2.0, math.nan, 4.0], [5.0, 5.0])
    assert (cured.effective, cured.slope_before) == (True, pytest.approx(1.0))
    assert math.isnan(cured.improvement_percent)
    assert validate_fix_effectiveness([5.0, 5.0], [1.0, math.nan]).effective is False
    assert validate_fix_effectiveness([math.nan, 5.0], [1.0, math.nan]).effective is False
    assert math.isnan(validate_fix_effectiveness([5.0], [1.0, 1.0]).slope_before)
    assert validate_fix_effectiveness([-1.0, -1.0], [-2.0, -2.0]).improvement_percent == pytest.approx(100)


# C17: advice for clipping


@pytest.mark.parametrize(
    ("norms", "max_norm", "share", "advised"),
    [
        ([], 3.0, 0.0, 1.0),  # start at 1.0
        ([0.5, 0.6, 0.7, 1.5], 1.0, 0.25, 1.0),  # now and then: keep
        ([0.5, 0.6, 500.0, 0.6], 1.0, 0.25, 0.5),  # still explodes
        ([0.5, 0.6, 500.0, 0.6], 5.0, 0.25, 1.0),  # one step down at a time
        ([0.5, 0.6, 500.0, 0.6], 0.5, 0.75, 0.5),  # as low as it goes
        ([3.0, 3.0, 3.0, 0.5], 1.0, 0.75, 5.0),  # nearly always and calm: too slow
        ([6.0, 7.0, 8.0, 7.0], 1.0, 1.0, 7.0),
        ([50.0, 60.0, 50.0, 60.0], 1.0, 1.0, 10.0),
        ([50.0, 60.0, 50.0, 60.0], 20.0, 1.0, 20.0),  # never advises less where nothing explodes
        ([1.0, 1.0], 1.0, 0.0, 1.0),  # at the limit is not above it
        ([math.nan, 0.5], 1.0, 0.5, 1.0),
    ],
)
def test_the_advice_for_max_norm_follows_the_share_of_clipped_steps(
    norms: list[float], max_norm: float, share: float, advised: float
) -> None:
    """C17: start at 1.0, 0.5 if it still explodes, 5-10 if training is too slow."""
    found = advise_max_norm(norms, max_norm)
    assert (found.clipped_share, found.max_norm) == (share, advised)
    assert found.reason


# C7: categories

EXPECTED = {
    # GPT-2 (transformers)
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "embedding",
    "transformer.h.0.ln_1.weight": "other",
    "transformer.h.0.attn.c_attn.weight": "attention",
    "transformer.h.0.attn.c_attn.bias": "attention",
    "transformer.h.0.attn.c_proj.weight": "attention",
    "transformer.h.11.ln_2.bias": "other",
    "transformer.h.11.mlp.c_fc.weight": "ffn",
    "transformer.h.11.mlp.c_proj.bias": "ffn",
    "transformer.ln_f.weight": "other",
    "lm_head.weight": "output",
    # Llama
    "model.embed_tokens.weight": "embedding",
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.0.self_attn.o_proj.weight": "attention",
    "model.layers.0.self_attn.q_norm.weight": "attention",
    "model.layers.0.mlp.gate_proj.weight": "ffn",
    "model.layers.0.mlp.up_proj.weight": "ffn",
    "model.layers.0.mlp.down_proj.weight": "ffn",
    "model.layers.0.input_layernorm.weight": "other",
    "model.layers.0.post_attention_layernorm.weight": "other",
    "model.norm.weight": "other",
    # Llama as Meta wrote it, Mixtral
    "tok_embeddings.weight": "embedding",
    "layers.0.attention.wq.weight": "attention",
    "layers.0.attention.wo.weight": "attention",
    "layers.0.feed_forward.w1.weight": "ffn",
    "layers.0.attention_norm.weight": "other",
    "output.weight": "output",
    "model.layers.0.block_sparse_moe.experts.3.w2.weight": "ffn",
    # BERT
    "bert.embeddings.word_embeddings.weight": "embedding",
    "bert.embeddings.position_embeddings.weight": "embedding",
    "bert.embeddings.LayerNorm.weight": "embedding",
    "bert.encoder.layer.0.attention.self.query.weight": "attention",
    "bert.encoder.layer.0.attention.output.dense.weight": "attention",
    "bert.encoder.layer.0.attention.output.LayerNorm.bias": "attention",
    "bert.encoder.layer.0.intermediate.dense.weight": "ffn",
    "bert.encoder.layer.0.output.dense.weight": "ffn",
    "bert.encoder.layer.0.output.LayerNorm.weight": "ffn",
    "bert.pooler.dense.weight": "other",
    "cls.predictions.bias": "output",
    "cls.predictions.transform.dense.weight": "output",
    "cls.predictions.decoder.weight": "output",
    "cls.seq_relationship.weight": "output",
    "classifier.weight": "output",
    "qa_outputs.bias": "output",
    # T5, GPT-NeoX, DistilBERT, ViT, ResNet, a plain stack
    "shared.weight": "embedding",
    "encoder.block.0.layer.0.SelfAttention.q.weight": "attention",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "attention",
    "encoder.block.0.layer.1.DenseReluDense.wo.weight": "ffn",
    "gpt_neox.layers.0.attention.query_key_value.weight": "attention",
    "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": "ffn",
    "gpt_neox.embed_in.weight": "embedding",
    "embed_out.weight": "output",
    "distilbert.transformer.layer.0.ffn.lin1.weight": "ffn",
    "distilbert.transformer.layer.0.attention.q_lin.weight": "attention",
    "cls_token": "embedding",
    "pos_embed": "embedding",
    "patch_embed.proj.weight": "embedding",
    "blocks.0.attn.qkv.weight": "attention",
    "head.weight": "output",
    "fc.weight": "output",
    "blocks.0.attention_block.mlp.fc1.weight": "ffn",
    "h.0.c_fc.weight": "ffn",
    "layer1.0.conv1.weight": "other",
    "layer1.0.bn1.weight": "other",
    "0.weight": "other",
    "": "other",
}


@pytest.mark.parametrize(("name", "category"), EXPECTED.items())
def test_names_of_real_models_get_their_category(name: str, category: str) -> None:
    """C7: GPT-2, Llama, BERT and others, as their parameters are named."""
    assert [found for found, names in categorize_problem_layers([name]).items() if names] == [category]


def test_torchs_own_transformer_is_categorised() -> None:
    """C7: every parameter of nn.Transformer, encoder and decoder."""
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    found = categorize_problem_layers(name for name, _ in model.named_parameters())
    assert {name.split(".")[3] for name in found["attention"]} == {"self_attn", "multihead_attn"}
    assert {name.split(".")[3] for name in found["ffn"]} == {"linear1", "linear2"}
    assert all("norm" in name for name in found["other"])
    assert len(found["attention"]) == 12 and len(found["ffn"]) == 8 and not found["embedding"] + found["output"]


@given(st.lists(st.text() | st.sampled_from(sorted(EXPECTED))))
def test_no_name_is_lost(names: list[str]) -> None:
    """C7: the rest goes to "other", whatever it is called."""
    found = categorize_problem_layers(names)
    assert list(found) == ["attention", "ffn", "embedding", "output", "other"]
    assert sorted(name for part in found.values() for name in part) == sorted(names)


def test_names_may_come_with_their_norms() -> None:
    """C7: a mapping or pairs, as a diagnosis gives them."""
    norms = {"lm_head.weight": 3.0, "h.0.mlp.c_fc.weight": 1e-9}
    assert categorize_problem_layers(norms) == categorize_problem_layers(list(norms.items()))
    assert categorize_problem_layers(norms)["output"] == ["lm_head.weight"]
