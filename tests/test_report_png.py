"""The PNG files of a run: what is in them, read back from their pixels, of real trainings, sick and healthy."""

from __future__ import annotations

import base64
import copy
import doctest
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

import holter
from holter.report import picture
from holter.report.picture import ALARM, VIOLET, page_of
from holter.report.picture_data import comparable, read_map, read_series
from holter.report.png import _figures, draw_lines, write_pngs
from holter.report.reading import Follower
from holter.report.strip_picture import draw_strip
from holter.report.view import run_view
from tests import sick_trainings

Floats = npt.NDArray[np.float64]
View = dict[str, Any]
CHARTS = {"loss.png", "norms.png", "rate.png", "gradient-flow.png", "activations.png", "machine.png"}
HOSTILE = (
    r"$\frac{1}{0}$ $",
    "<script>alert(1)</script>&amp;",
    "nul\0bell\a\x1b[31m",
    "\u202eright to left \u05d0\u05d1\u0627",
    "../../etc/passwd\n\n\r",
    "\ud800 broken, 汉字 and 🙂",
    "x" * 65536,
    "",
)


def line(steps: npt.ArrayLike, values: npt.ArrayLike, spread: float = 0.0) -> View:
    def plain(numbers: Floats) -> list[float | None]:
        return [float(number) if np.isfinite(number) else None for number in numbers]

    at, height = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    ends = {"low": plain(height - spread), "high": plain(height + spread)}
    return {"steps": [int(step) for step in at], "values": plain(height), **ends}


def strip(values: npt.ArrayLike, layers: list[str] | None = None, name: str = "gradient/norm") -> View:
    """A map of these values [layers, steps], as a page holds it."""
    table = np.asarray(values, dtype="<f4")
    role, statistic = name.split("/", 1)
    packed = {"dtype": "f4", "bdata": base64.b64encode(table.tobytes()).decode(), "shape": str(table.shape)[1:-1]}
    names = layers if layers is not None else [f"layers.{i}.weight" for i in range(len(table))]
    says = {"id": name, "role": role, "statistic": statistic, "title": "gradient norm", "log": True}
    return {**says, "layers": names, "steps": list(range(table.shape[1])), "values": packed}


def finding(cause: str, since: int, layer: str | None = None, severity: str = "critical") -> View:
    place = "layer" if layer is not None else "lr"
    return {"cause": cause, "where": place, "layer": layer, "since": since, "until": None, "severity": severity}


def small_view(**parts: Any) -> View:
    verdict = {"state": "sick", "severity": "critical", "sentence": "Lr jump since step 12. Go back."}
    return {"run": {"name": "run"}, "verdict": verdict, "findings": [], "scalars": {}, "maps": [], "flow": [], **parts}


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def drawn_strip(chart: View, view: View | None = None) -> Figure:
    read = read_map(chart)
    assert read is not None
    return draw_strip(read, page_of(view or small_view()))


def pixels(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def colour_at(figure: Figure, picture_of: npt.NDArray[np.uint8], step: float, row: float) -> tuple[int, ...]:
    """The colour of the file at a place of the first chart."""
    x, y = figure.axes[0].transData.transform((step, row))
    return tuple(int(part) for part in picture_of[round(len(picture_of) - y), round(x)])


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.lstrip("#")))


def is_near(one: tuple[int, ...], other: tuple[int, ...], most: int = 3) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) <= most


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, View]:
    """The pages of three real trainings: a healthy one, one with a dead layer, one with a NaN in a weight."""
    root = tmp_path_factory.mktemp("runs")
    sick_trainings.healthy(root / "healthy", steps=40)
    sick_trainings.dead_relu(root / "dead", steps=40)
    sick_trainings.nan_in_weights(root / "broken")
    return {path.name: _view_of(path) for path in sorted(root.iterdir())}


def _view_of(run: Path) -> View:
    follower = Follower(run, examine=True)
    follower.read_on()
    return run_view(follower, follower.examined())


SOME = ("gradient/norm", "update/ratio", "activation/dead")


@pytest.mark.parametrize("name", ["healthy", "broken"])
def test_the_main_charts_of_a_real_run_are_written(name: str, views: Mapping[str, View], tmp_path: Path) -> None:
    """C14: PNG files of a size to look at, each with something in it; no others."""
    view = views[name]
    if name == "broken":
        view = {**view, "maps": [chart for chart in view["maps"] if chart["id"] in SOME]}
    maps = {f"strip-{chart['role']}-{chart['statistic']}.png" for chart in view["maps"]}
    written = write_pngs(view, tmp_path / "new" / "folder")
    assert {path.name for path in written} == CHARTS | maps
    assert {"strip-gradient-norm.png", "strip-update-ratio.png", "strip-activation-dead.png"} <= maps
    assert sorted(written) == sorted((tmp_path / "new" / "folder").iterdir())
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        shown = pixels(path)
        assert shown.shape[1] == 1500 and 400 < shown.shape[0] < 2000
        assert shown.std() > 10, "a blank picture"


def test_the_verdict_stands_at_the_top_and_a_finding_at_its_onset(views: Mapping[str, View]) -> None:
    """C14: of the sick run alone; its layer is framed and its name has the colour of the finding."""
    said = {}
    for name in ("healthy", "dead"):
        chart = next(one for one in views[name]["maps"] if one["id"] == "activation/dead")
        figure = drawn_strip(chart, views[name])
        said[name] = words(figure)
        assert " ".join(said[name]).count(views[name]["verdict"]["sentence"][:40]) == 1
        frames = [one for one in figure.axes[0].patches if isinstance(one, Rectangle)]
        assert bool(frames) == (name == "dead")
    (leading, *_) = views["dead"]["findings"]
    assert leading["cause"] == "dead-relu"
    label = f"{leading['title']} · {leading['layer']}"
    assert label in said["dead"] and label not in said["healthy"]


def test_every_cell_of_a_real_strip_has_the_colour_of_its_value(views: Mapping[str, View], tmp_path: Path) -> None:
    """C14: a larger norm is farther along the scale, read from the file and held against the history."""
    view = views["healthy"]
    chart = next(one for one in view["maps"] if one["id"] == "gradient/norm")
    figure = drawn_strip(chart, view)
    write_pngs({**view, "scalars": {}, "flow": [], "maps": [chart]}, tmp_path)
    shown = pixels(tmp_path / "strip-gradient-norm.png")
    scale = colormaps["viridis"](np.arange(256))[:, :3] * 255
    values = np.frombuffer(base64.b64decode(chart["values"]["bdata"]), "<f4").reshape(len(chart["layers"]), -1)
    found = []
    for row, column in itertools.product(range(values.shape[0]), range(0, values.shape[1], 3)):
        colour = np.array(colour_at(figure, shown, chart["steps"][column] + 0.5, row))
        distances = np.abs(scale - colour).max(axis=1)
        assert distances.min() <= 2, "not a colour of the scale"
        found.append((float(values[row, column]), int(distances.argmin())))
    places = [place for _, place in sorted(found)]
    assert places[-1] - places[0] > 150
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(places))


def test_a_layer_that_is_a_thousand_times_larger_has_another_colour(tmp_path: Path) -> None:
    """C14: from the step on at which it grew, and only it; without the planted fault all have one colour."""
    colours = {}
    for name, factor in (("planted", 1000.0), ("plain", 1.0)):
        values = np.full((12, 40), 0.5)
        values[5, 20:] *= factor
        chart = strip(values)
        write_pngs(small_view(maps=[chart]), tmp_path / name)
        shown = pixels(tmp_path / name / "strip-gradient-norm.png")
        figure = drawn_strip(chart)
        places = ((5, 30.5), (5, 10.5), (4, 30.5), (6, 30.5))
        colours[name] = [colour_at(figure, shown, step, row) for row, step in places]
    assert len(set(colours["plain"])) == 1
    large, *others = colours["planted"]
    assert len(set(others)) == 1
    assert max(abs(a - b) for a, b in zip(large, others[0], strict=True)) > 100


def test_equal_ratios_are_equally_far_apart_on_the_scale(tmp_path: Path) -> None:
    """C14: colour is the logarithm of the statistic; of a share it is the share."""
    scale = colormaps["viridis"](np.arange(256))[:, :3] * 255
    for log, values in ((True, np.geomspace(1e-3, 1e3, 9)), (False, np.linspace(0, 1, 9))):
        chart = {**strip(values[:, None] * np.ones(20)), "log": log}
        figure = drawn_strip(chart)
        figure.savefig(tmp_path / "strip.png")
        shown = pixels(tmp_path / "strip.png")
        colours = [np.array(colour_at(figure, shown, 10.5, row)) for row in range(9)]
        places = [int(np.abs(scale - colour).max(axis=1).argmin()) for colour in colours]
        assert np.abs(np.diff(places) - 32).max() <= 2


def test_zero_not_finite_and_not_measured_have_colours_of_their_own(tmp_path: Path) -> None:
    """C14: none of which is on the scale, and each named below; a strip without them names none."""
    values = np.geomspace(1e-4, 10, 12)[:, None] * np.ones(30)
    plain = drawn_strip(strip(values))
    for row, odd in enumerate((0.0, np.inf, np.nan)):
        values[row] = odd
    chart = strip(values)
    figure = drawn_strip(chart)
    figure.savefig(tmp_path / "strip.png")
    shown = pixels(tmp_path / "strip.png")
    zero, broken, absent = (colour_at(figure, shown, 15.5, row) for row in range(3))
    assert is_near(broken, rgb(ALARM)) and absent == (255, 255, 255)
    scale = [tuple(round(255 * part) for part in colour[:3]) for colour in colormaps["viridis"](np.arange(256))]
    assert not any(is_near(zero, colour, 20) or is_near(broken, colour, 20) for colour in scale)
    names = {"zero", "not finite", "not measured"}
    assert names <= set(words(figure)) and not names & set(words(plain))


def test_what_a_nan_spoils_is_shown_in_the_strip_of_a_real_run(views: Mapping[str, View]) -> None:
    """C14: the norm of what is left of a gradient would hide it."""
    said = {
        name: words(drawn_strip(next(one for one in views[name]["maps"] if one["id"] == "gradient/norm"), views[name]))
        for name in ("healthy", "broken")
    }
    assert "not finite" in said["broken"] and "not finite" not in said["healthy"]


def test_a_finding_is_marked_in_the_column_of_its_onset(tmp_path: Path) -> None:
    """C14: a line from top to bottom there, and nowhere else."""
    shown = {}
    for name, findings in (("sick", [finding("lr-jump", 12)]), ("healthy", [])):
        view = small_view(findings=findings, maps=[strip(np.ones((12, 40)))])
        view["verdict"] = {"state": "healthy", "severity": None, "sentence": "x"}
        figure = drawn_strip(view["maps"][0], view)
        shown[name] = pixels(write_pngs(view, tmp_path / name)[0])
        column = round(figure.axes[0].transData.transform((12, 0))[0])
    red = {name: (np.abs(one.astype(int) - rgb(ALARM)).max(axis=2) < 40).sum(axis=0) for name, one in shown.items()}
    assert not red["healthy"].any()
    assert red["sick"][column - 3 : column + 4].max() > 100
    assert red["sick"][: column - 10].max() == 0  # the label stands to the right


def test_labels_of_many_findings_do_not_overlap() -> None:
    """C14: those for which there is no room have their line alone; what failed of Holter's own is not marked."""
    many = [finding(f"cause-{i}", 3 * i, f"layers.{i}") for i in range(13)]
    many.append({**finding("monitor-degraded", 5), "where": "monitor"})
    figure = drawn_strip(strip(np.ones((12, 40))), small_view(findings=many))
    figure.draw_without_rendering()
    labels = [text for text in figure.findobj(Text) if text.get_text().startswith("cause")]
    assert len(labels) >= 8 and "monitor degraded" not in words(figure)
    boxes = [label.get_window_extent() for label in labels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= 1500 for box in boxes)
    onsets = {float(np.asarray(one.get_xdata())[0]) for one in figure.axes[0].lines if one.get_linestyle() == "--"}
    assert onsets == {3.0 * i for i in range(13)}


def test_three_hundred_layers_and_a_long_run_stay_legible(tmp_path: Path) -> None:
    """C14: names are thinned out, that of a finding stays, and an odd step of 5,000 is still to be seen."""
    values = np.ones((300, 5000))
    values[150, 4321] = 1e6
    values[[20, 220], [2000, 2001]] = np.inf, 0.0
    layers = [f"transformer.h.{i // 6}.part_{i % 6}.weight" for i in range(300)]
    chart = strip(values, layers)
    view = small_view(maps=[chart], findings=[finding("dead-layer", 100, layers[77])])
    figure = drawn_strip(chart, view)
    figure.draw_without_rendering()
    names = {label.get_text(): label.get_window_extent() for label in figure.axes[0].get_yticklabels()}
    heights = sorted(box.intervaly.tolist() for box in names.values())
    assert 40 < len(names) <= 60 and layers[77] in names
    assert all(lower[1] <= upper[0] + 0.5 for lower, upper in itertools.pairwise(heights))
    shown = pixels(write_pngs(view, tmp_path)[0])
    assert shown.shape[0] < 2000
    yellow = (np.abs(shown[:, :1380].astype(int) - (253, 231, 36)).max(axis=2) < 8).sum()
    assert yellow >= 2, "the odd step is gone"
    assert {"zero", "not finite"} <= set(words(figure))


@pytest.mark.parametrize(("values", "scale"), [([3.0, 0.02], "log"), ([3.0, 1.0], "linear"), ([3.0, -0.02], "linear")])
def test_a_loss_that_spans_decades_is_drawn_on_a_logarithmic_scale(values: list[float], scale: str) -> None:
    """C14: one that does not, or is below zero, is not."""
    series = read_series(line([0, 1], values))
    assert series is not None
    assert draw_lines("Loss", [("loss", series)], page_of(small_view())).axes[0].get_yscale() == scale


def test_the_loss_has_its_validation_its_extremes_and_what_is_not_finite(tmp_path: Path) -> None:
    """C14: a null is a mark at the upper edge and a gap, zero on a logarithmic scale a mark at the lower one."""
    losses = read_series(line(range(6), [4.0, 2.0, np.nan, 1.0, 0.0, 0.01]))
    wide = read_series(line(range(6), np.ones(6), spread=0.5))
    assert losses is not None and wide is not None
    axes = draw_lines("Loss", [("loss", losses), ("val_loss", wide)], page_of(small_view())).axes[0]
    curves = {one.get_label(): (np.asarray(one.get_xdata()).tolist(), one.get_color()) for one in axes.lines}
    assert curves["not finite"][0] == [2] and curves["zero"][0] == [4]
    assert next(one for one in axes.lines if one.get_label() == "zero").get_markerfacecolor() == VIOLET
    band = axes.collections[1].get_datalim(axes.transData)
    assert (band.y0, band.y1) == (0.5, 1.5)
    view = small_view(scalars={"val_loss": line([0], [1.0]), "loss": line([0], [2.0]), "accuracy": line([0], [1.0])})
    assert [path.name for path in write_pngs(view, tmp_path)] == ["loss.png"]


def without_loss_flow_and_verdict(view: View) -> None:
    del view["verdict"], view["run"], view["findings"], view["flow"], view["scalars"]["loss"]


def with_damaged_rate_and_strip(view: View) -> None:
    view["scalars"]["learning_rate"]["steps"].pop()
    view["maps"][0]["values"]["bdata"] = "AAAA"


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (without_loss_flow_and_verdict, {"rate.png", "strip-gradient-norm.png"}),
        (with_damaged_rate_and_strip, {"loss.png", "gradient-flow.png", "activations.png"}),
    ],
)
def test_what_is_missing_or_damaged_has_no_file_and_hides_no_other(
    spoil: Callable[[View], None], left: set[str], views: Mapping[str, View], tmp_path: Path
) -> None:
    """C14: a damaged or half-written run shows what is there."""
    view = copy.deepcopy(views["healthy"])
    view["maps"] = [chart for chart in view["maps"] if chart["id"] == "gradient/norm"]
    view["scalars"] = {name: view["scalars"][name] for name in ("loss", "learning_rate")}
    spoil(view)
    assert {path.name for path in write_pngs(view, tmp_path)} == left


def test_steps_that_do_not_grow_or_are_beyond_counting_are_no_series() -> None:
    for steps in ([0, 1, 1], [2, 1, 0], [0, 2**60, 2**62], []):
        assert read_series(line(steps, [1.0] * len(steps))) is None
    assert read_series(line([0, 1, 2**40], [1.0] * 3)) is not None


def test_a_view_of_nothing_writes_nothing(tmp_path: Path) -> None:
    assert write_pngs({}, tmp_path) == []
    assert write_pngs(small_view(), tmp_path) == []
    assert not any(tmp_path.iterdir())


def test_hostile_names_are_drawn_as_they_are_and_lead_nowhere(tmp_path: Path) -> None:
    """P22: no formula, no missing glyph, no file outside of the directory, no giant picture."""
    layers = [f"{name}{i}" for i, name in enumerate(HOSTILE)]
    values = np.geomspace(1, 10, len(layers))
    view = small_view(
        run={"name": HOSTILE[3]},
        verdict={"state": "sick", "severity": "critical", "sentence": " ".join(name[:200] for name in HOSTILE)},
        findings=[finding(name, i, layers[i]) for i, name in enumerate(HOSTILE)],
        scalars={f"loss {name}": line([0, 1], [2.0, 1.0]) for name in HOSTILE},
        maps=[{**strip(values[:, None] * np.ones(9), layers), "role": name, "title": name} for name in HOSTILE[2:6]],
        flow=[
            {
                "id": "gradient",
                "title": HOSTILE[0],
                "layers": layers,
                "curves": [{"name": HOSTILE[0], "step": 1, "values": values.tolist()}],
            }
        ],
    )
    target = tmp_path / "deep" / "pictures"
    written = write_pngs(json.loads(json.dumps(view)), target)
    assert sorted(written) == sorted(target.iterdir()) and [one.name for one in tmp_path.iterdir()] == ["deep"]
    assert {"loss.png", "gradient-flow.png"} <= {path.name for path in written}
    assert len(written) == len(set(written)) == 4 + 2, "one took the place of another"
    for path in written:
        assert len(path.name) < 120 and path.name.isascii()
        assert pixels(path).shape[1] == 1500 and pixels(path).shape[0] < 1500
    texts = words(drawn_strip(view["maps"][0], view))
    assert any(r"$\frac{1}{0}$ $0" in text for text in texts) and not any(
        "\0" in text or "\u202e" in text for text in texts
    )


def test_the_flow_by_depth_is_that_of_weights_without_norms_and_biases(tmp_path: Path) -> None:
    """A line through all of them would go to and fro between sizes that cannot be compared."""
    layers = ["wte.weight", "h.0.attn.weight", "h.0.attn.bias", "h.0.ln_1.weight", "h.0.norm2.weight", "h.0.mlp.weight"]
    assert comparable(layers) == [0, 1, 5]
    assert comparable(["a", "b.bias", "c.weight"]) == [0, 1, 2], "of one weight there is no flow"
    curve = {"name": "first", "step": 0, "values": [1.0, 2.0, 1e-3, 1e-4, 1e-5, 3.0]}
    flow = {"id": "gradient", "title": "gradient norm by depth", "layers": layers, "curves": [curve]}
    (figure,) = [figure for name, figure in _figures(small_view(flow=[flow]), page_of(small_view()))]
    [axes] = figure.axes
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.lines] == [[1.0, 2.0, 3.0]]
    assert not any("bias" in text or "ln_1" in text for text in words(figure) if "without" not in text)
    assert any("of weights without norms and biases" in text for text in words(figure))


DAMAGED_VIEWS = 5
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    10**400,
    "x",
    "",
    [],
    [None],
    [[1]],
    {},
    {"a": 1},
    [1, "2", None],
    [5, 4, 3],
)


def test_a_view_with_anything_in_any_place_raises_nothing(tmp_path: Path) -> None:
    """C14: what is not as it should be is left out."""
    curve = {"name": "first", "step": 0, "values": [1.0, 0.0, 3.0]}
    view = small_view(
        findings=[finding("lr-jump", 2, "layers.1")],
        scalars={"loss": line(range(4), [4, 2, 1e-9, 0]), "time/data": line([0, 1], [0.1, 0.2])},
        maps=[strip(np.ones((3, 4)))],
        flow=[{"id": "gradient", "title": "t", "layers": ["a", "b", "c"], "curves": [curve]}],
    )
    random = np.random.default_rng(0)
    for _ in range(DAMAGED_VIEWS):
        damaged = copy.deepcopy(view)
        for _ in range(4):
            _spoil(damaged, random)
        for path in write_pngs(damaged, tmp_path):
            assert path.parent == tmp_path


def _spoil(node: Any, random: np.random.Generator) -> None:
    """Puts junk in one place, at any depth."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[random.integers(len(keys))]
        if isinstance(node[key], (dict, list)) and node[key] and random.random() < 0.8:
            node = node[key]
            continue
        node[key] = JUNK[random.integers(len(JUNK))]
        return


def run_python(code: str) -> str:
    root = Path(holter.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_drawing_needs_neither_torch_nor_pyplot(tmp_path: Path) -> None:
    """C14: and matplotlib only when something is drawn."""
    view = json.dumps(small_view(scalars={"loss": line([0, 1], [2.0, 1.0])}))
    code = f"""
import sys, json, pathlib
from holter.report.png import write_pngs
print('matplotlib' in sys.modules)
print(len(write_pngs(json.loads({view!r}), pathlib.Path({str(tmp_path)!r}))))
print('torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)
"""
    assert run_python(code).split() == ["False", "1", "False", "False"]


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys, pathlib
sys.modules['matplotlib'] = None
from holter.report.png import write_pngs
try:
    write_pngs({{}}, pathlib.Path({str(tmp_path / "new")!r}))
except ImportError as error:
    print(error)
"""
    assert run_python(code) == "holter report --png needs matplotlib: pip install 'holter[report]'\n"
    assert not (tmp_path / "new").exists()


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(picture)
    assert outcome.attempted >= 1 and outcome.failed == 0
