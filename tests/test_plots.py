"""The picture of the gradient flow: what is in it, read back from its parts and from its pixels."""

import doctest
import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

import holter.plots
from holter.plots import plot_gradient_flow

HEALTHY = {f"layer.{i}.weight": 0.5 + 0.1 * (i % 7) for i in range(12)}


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def names(figure: Figure) -> dict[int, str]:
    axes = figure.axes[0]
    return {int(row): label.get_text() for row, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}


def heads(figure: Figure) -> dict[int, tuple[float, tuple[float, ...]]]:
    """Row -> (norm, colour) of every layer that is drawn to scale."""
    (scatter,) = [c for c in figure.axes[0].collections if len(c.get_offsets()) and c.get_paths()[0].codes is not None]
    points = zip(np.asarray(scatter.get_offsets()), scatter.get_facecolors(), strict=True)
    return {round(row): (norm, tuple(colour)) for (norm, row), colour in points}


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(holter.plots)
    assert outcome.attempted >= 1 and outcome.failed == 0


def test_the_picture_is_a_png_file(tmp_path: Path) -> None:
    """C14: at the path that is returned, whether its suffix was given or not."""
    for given in (tmp_path / "flow.png", str(tmp_path / "other")):
        written = plot_gradient_flow(HEALTHY, given)
        assert written == Path(f"{str(given).removesuffix('.png')}.png")
        assert written.read_bytes().startswith(b"\x89PNG")
    assert plot_gradient_flow(HEALTHY, tmp_path / "flow.svg").read_text("utf-8").startswith("<?xml")


def test_every_layer_is_drawn_at_its_norm_from_the_first_on_top() -> None:
    """C14: on a logarithmic scale, under its name."""
    figure = plot_gradient_flow(HEALTHY)
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.yaxis_inverted()
    assert names(figure) == dict(enumerate(HEALTHY))
    assert [norm for _, (norm, _) in sorted(heads(figure).items())] == pytest.approx(list(HEALTHY.values()))
    low, high = axes.get_xlim()
    assert all(low < norm < high for norm in HEALTHY.values())
    assert "12 layers" in words(figure)[0] and "none stands out" in words(figure)[0]


@pytest.mark.parametrize(("factor", "word"), [(0.01, "100× below"), (1 / 2500, "2,500× below"), (100.0, "100× above")])
def test_a_layer_a_hundred_times_off_is_plain_to_see(factor: float, word: str) -> None:
    """A6: it says so, has the colour of no other, and stands two decades apart."""
    norms = dict.fromkeys(HEALTHY, 0.8) | {"layer.5.weight": 0.8 * factor}
    figure = plot_gradient_flow(norms)
    assert [text for text in words(figure) if "×" in text] == [word]
    drawn = heads(figure)
    colours = {colour for row, (_, colour) in drawn.items() if row != 5}
    assert len(colours) == 1
    assert np.abs(np.subtract(drawn[5][1], colours.pop())).max() > 0.3
    where = [figure.axes[0].transData.transform((drawn[row][0], 0))[0] for row in (4, 5)]
    assert abs(where[0] - where[1]) > 200  # pixels of 1500


def test_a_layer_a_hundred_times_smaller_leaves_its_mark_in_the_pixels(tmp_path: Path) -> None:
    """A6: a long violet stem in its row that the healthy picture does not have."""
    violet = []
    for norms in (dict.fromkeys(HEALTHY, 0.8), dict.fromkeys(HEALTHY, 0.8) | {"layer.5.weight": 0.008}):
        red, green, blue = np.moveaxis(imread(plot_gradient_flow(norms, tmp_path / "flow.png"))[..., :3], -1, 0)
        violet.append(int(((blue - green > 0.2) & (red > green + 0.1)).sum()))
    assert violet[0] == 0
    assert violet[1] > 1000


def test_layers_ninety_times_off_are_not_called_out() -> None:
    """A6: the threshold is a hundred."""
    figure = plot_gradient_flow(dict.fromkeys(HEALTHY, 1.0) | {"layer.5.weight": 1 / 90})
    assert not any("×" in text for text in words(figure))


def test_zero_and_what_is_not_finite_are_shown_as_such() -> None:
    """C14: not left out, and not drawn at some number."""
    odd = {"a": 0.0, "b": math.nan, "c": math.inf}
    figure = plot_gradient_flow({**odd, **HEALTHY})
    assert words(figure)[:3] == ["zero", "NaN", "infinite"]
    assert sorted(heads(figure)) == list(range(3, 15))
    assert "3 stand out" in words(figure)[-1]
    only = plot_gradient_flow(odd)
    assert words(only)[:3] == ["zero", "NaN", "infinite"] and "nan" not in words(only)[-1]
    assert words(plot_gradient_flow({})) == ["no gradients: call backward() first"]


@pytest.mark.parametrize("n_odd", [2, 200])
def test_three_hundred_layers_stay_readable(n_odd: int) -> None:
    """C14: no two names overlap, all are marked, few that stand out are all named, and the picture is not too tall."""
    norms = {f"transformer.h.{i}.mlp.c_fc.weight": 1.0 + i % 3 for i in range(300)}
    odd = list(norms)[7 : 7 + n_odd] if n_odd > 100 else list(norms)[43::199]
    norms |= dict.fromkeys(odd, 0.0)
    figure = plot_gradient_flow(norms)
    figure.draw_without_rendering()
    boxes = sorted(label.get_window_extent().intervaly.tolist() for label in figure.axes[0].get_yticklabels())
    assert len(boxes) > 40
    assert all(lower[1] <= upper[0] for lower, upper in itertools.pairwise(boxes))
    assert figure.get_size_inches().max() < 20
    assert sum(len(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "o") == n_odd
    if n_odd < 100:
        assert set(odd) <= set(names(figure).values())
        assert words(figure).count("zero") == n_odd


def test_names_are_written_as_they_are_but_never_run() -> None:
    """P22: mathematics, control characters and length; the ends of a long name are what tells it apart."""
    hostile = {"a$\\frac{x$": 1.0, "b\n\x1b[31m\0": 1.0, "é" * 3: 1.0, "start" + "x" * 5000 + "end": 1.0, "": 1.0}
    figure = plot_gradient_flow(hostile)
    figure.draw_without_rendering()
    shown = names(figure)
    assert shown[0] == "a$\\frac{x$"
    assert shown[1] == "b??[31m?"
    assert shown[3].startswith("start") and shown[3].endswith("end") and len(shown[3]) < 60
    assert all(text.isascii() and text.isprintable() for text in shown.values())


def test_the_widest_range_of_norms_can_be_drawn() -> None:
    """B3: from the smallest subnormal of float32 to 1e38 and beyond."""
    figure = plot_gradient_flow({"a": 1e-45, "b": 1.0, "c": 1e38, "d": 5e-324, "e": 1e308})
    figure.draw_without_rendering()
    assert len(heads(figure)) == 5


def test_a_model_is_measured() -> None:
    """C14: the names and norms of its parameters that have a gradient."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    model(torch.ones(2, 3)).sum().backward()
    model[0].bias.grad = None
    figure = plot_gradient_flow(model)
    expected = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    assert list(names(figure).values()) == list(expected)
    assert [norm for _, (norm, _) in sorted(heads(figure).items())] == pytest.approx(list(expected.values()))


def test_pyplot_and_torch_stay_out_of_it(tmp_path: Path) -> None:
    """C14: no window, no global state, and a mapping of norms is drawn without torch."""
    code = (
        "import sys; from holter.plots import plot_gradient_flow; "
        f"plot_gradient_flow({{'a': 1.0}}, {str(tmp_path / 'a.png')!r}); "
        "print({'matplotlib.pyplot', 'torch'} & sys.modules.keys(), 'matplotlib' in sys.modules)"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=110)
    assert done.stdout == "set() True\n", done.stderr


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'holter\[report\]'"):
        plot_gradient_flow(HEALTHY)
