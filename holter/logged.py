"""What a user logs: on which step it lands, and as what."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch._subclasses import FakeTensor

from holter.attention import LOGITS
from holter.batch import INPUTS, MOST, NOTHING, TARGETS, Amount, BatchRole, measurable_in
from holter.draft import Draft
from holter.measuring import Measuring
from holter.problems import Complaint, Problems
from holter.record import is_validation
from holter.statistics.measure import unmeasurable

# Names of Holter's own; what a user logs under one of them is kept as logged/<name>.
OWN = {
    *("learning_rate", "gradient_norm", "gradient_norm_clipped", "gradient_nonfinite", "clip_norm", "clip_max_norm"),
    *("gradient_norm_selected", "gradient_nonfinite_selected"),
    *("gradients_kept", "gradients_left"),
    *("skipped", "loss_scale", "step_time", "monitor_cost", "dropped", *LOGITS),
    *("samples_per_second", "tokens_per_second", "weight_decay", "optimizer_step"),
}
OWN_PREFIXES = ("learning_rate/", "weight_decay/", "machine/", "time/", "batch/")
NONFINITE = "batch/nonfinite"  # the share of what was logged of further micro-batches that held NaN or infinity
FIRST_NONFINITE = "batch/first_nonfinite"  # the same of the first one, where its rows were not measured
_FEW, _IN_VAIN = 10, 1000  # logs before the first step: so many are odd at the end, and at any time
_NO_STEP = (
    "values are logged, but no optimizer that it watches has taken a step: call optimizer.step(), or give watch() the "
    "optimizer that does"
)

_LOSSES = {
    *("train_loss", "train/loss", "train.loss", "training_loss", "training/loss"),
    *("loss_train", "loss/train", "total_loss"),
}


@dataclass
class Told:
    """What a step has been told so far."""

    values: dict[str, list[float | Tensor]] = field(default_factory=dict)
    batch: set[str] = field(default_factory=set)  # inputs, targets
    logged: Amount = NOTHING  # as inputs
    loaded: Amount = NOTHING  # by the loader of `monitor.batches`, and trained on
    seconds: float = 0.0  # that the step took; 0 while it is being taken

    def has_any(self, names: Mapping[str, Any]) -> bool:
        return not (self.values.keys() | self.batch).isdisjoint(names)

    @property
    def has_lost_loss(self) -> bool:
        """Whether the last loss is known, without a wait, to be no finite number."""
        last = self.values.get("loss", ())[-1:]
        return any(isinstance(loss, float) and not math.isfinite(loss) for loss in last)

    def amounts(self) -> Iterator[tuple[str, float]]:
        """Size and throughput, over all micro-batches, as scalars.

        The inputs that were logged tell; unless those were fewer than the loader gave, as where only the last
        micro-batch is logged.
        """
        are_all = self.logged.batches >= self.loaded.batches
        sources = [source for source in (self.logged, self.loaded) if source.batches][0 if are_all else -1 :]
        samples = next((source.samples for source in sources if source.samples is not None), None)
        tokens = next((source.tokens for source in sources if source.tokens is not None), None)
        if samples is not None:
            yield "batch/size", float(samples)
        for name, count in (("samples_per_second", samples), ("tokens_per_second", tokens)):
            if count is not None and self.seconds > 0:
                yield name, count / self.seconds


class Logged:
    """Adds values to the step they belong to: the one being prepared, or the one just taken."""

    def __init__(self, measuring: Measuring, every: int, post: Callable[[Draft], None], problems: Problems) -> None:
        self._role = BatchRole(measuring, every)
        self._post, self._problems = post, problems
        self._has_loss = False  # by that name
        self.restart()

    def restart(self) -> None:
        """What follows is another line of training: there is no last step."""
        self._next = Told()
        self._last: Told | None = None
        self._validation = Told()  # since the last step
        self._loading: Amount | None = None  # of the batch that the loader gave last, until it is trained on
        self._forward_since_step = False
        self._forwards_are_visible = False
        self._in_vain = 0  # times that something was logged, and no step has been taken yet

    def ask_for_a_step(self) -> None:
        """Say that none was seen, where many are awaited. A few values may be logged before the first."""
        if self._last is None and self._in_vain >= _FEW:
            self._problems.add("see a step", Complaint(_NO_STEP))

    def loaded(self, batch: Any) -> None:
        """A batch from `monitor.batches`. It counts when a training forward follows: that of an evaluation does not."""
        self._loading = Amount.of(batch)

    def training_forward(self) -> None:
        self._forward_since_step = True
        if self._loading is not None:
            self._next.loaded += self._loading
            self._loading = None

    def add_throughput(self, draft: Draft) -> None:
        """Of the step that is over, whose draft tells how long it took."""
        self._next.seconds = float(draft.values["step_time"][0])
        for name, value in self._next.amounts():
            draft.set(name, value)

    def step_taken(self) -> None:
        self._last, self._next, self._validation = self._next, Told(), Told()
        self._forwards_are_visible, self._forward_since_step = self._forward_since_step, False

    def has_again(self, values: Mapping[str, Any]) -> bool:
        """Whether the step that is being taken has been told one of these, where no forward shows that it is over."""
        return not self._forward_since_step and self._next.has_any(self._with_loss(values))

    def log(self, values: Mapping[str, Any], pending: Draft, step: int, has_stepped: bool) -> None:
        """`pending` is the draft of this step, which is being prepared, or `has_stepped` and may do so again.

        Validation tells of the weights as the last step left them: it lands there, whatever has begun since.
        """
        values = self._with_loss(values)
        validation = {name: value for name, value in values.items() if is_validation(name)}
        training = {name: value for name, value in values.items() if name not in validation}
        if self._last is None or has_stepped:
            self._add_all(pending, self._next, values)
            self._in_vain = 0 if has_stepped else self._in_vain + 1
            if self._in_vain >= _IN_VAIN:
                self.ask_for_a_step()
            return
        late = Draft(step=step - 1, time=time.time(), late=True)
        self._add_all(late, self._validation, validation)
        if self._belongs_to_last_step(self._last, training):
            self._add_all(late, self._last, training)
            if INPUTS in training:
                for name, value in self._last.amounts():
                    late.set(name, value)
        else:
            self._add_all(pending, self._next, training)
        if late.values or late.rows:
            self._post(late.seal())

    def _with_loss(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Who calls the loss of the training by another of its usual names has a loss all the same."""
        if "loss" in values:
            self._has_loss = True
        if self._has_loss:
            return values
        found = next((value for name, value in values.items() if name.lower() in _LOSSES), None)
        return values if found is None else {**values, "loss": found}

    def _belongs_to_last_step(self, last: Told, values: Mapping[str, Any]) -> bool:
        """A value logged after a step and before the next training forward belongs to the step just taken.

        Where forwards cannot be seen (compiled away, or the model's own methods are called), a name that the last
        step has already been told belongs to the next one.
        """
        if self._forward_since_step:
            return False
        return self._forwards_are_visible or not last.has_any(values)

    def _add_all(self, draft: Draft, told: Told, values: Mapping[str, Any]) -> None:
        batches = {}
        for name, value in values.items():
            if name in OWN or name.startswith(OWN_PREFIXES):
                self._problems.add(f"log {name}", Complaint(f"that name is Holter's own; it is kept as logged/{name}"))
                name = f"logged/{name}"
            if name in (INPUTS, TARGETS) and not isinstance(value, int | float):
                batches[name] = value
                continue
            with self._problems.contained(f"log {name}"):
                # Several in one step, micro-batches say, are one value: their mean, also where a part comes late.
                number = scalar_of(value)
                told.values.setdefault(name, []).append(number)
                draft.values[name] = list(told.values[name])
        for name, value in batches.items():
            with self._problems.contained(f"log {name}"):
                self._add_batch(draft, told, name, value)

    def _add_batch(self, draft: Draft, told: Told, name: str, value: Any) -> None:
        """All micro-batches count; what is measured, the first stands for the step. Any may hold a NaN, and most of all
        one whose loss is lost."""
        is_first = name not in told.batch
        told.batch.add(name)
        if name == INPUTS:
            told.logged += Amount.of(value)
        tensors, why_none = measurable_in(value, name)
        if is_first:
            if why_none:
                raise Complaint(why_none)
            if len(tensors) > MOST:
                self._problems.add(f"measure all of {name}", Complaint(f"only its first {MOST} tensors are measured"))
            rows = self._role.measure(name, tensors)
            draft.rows += rows
            if rows:
                return
        is_bad = self._role.holds_nonfinite(name, tensors, told.has_lost_loss)
        if is_bad is not None:
            known = told.values.setdefault(FIRST_NONFINITE if is_first else NONFINITE, [])
            known.append(is_bad)
            draft.values[FIRST_NONFINITE if is_first else NONFINITE] = list(known)


def scalar_of(value: Any) -> float | Tensor:
    """A number, or a tensor of one element, which is read where that takes no waiting and else when it arrives."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise Complaint("only inputs= and targets= take whole tensors, other values are single numbers")
        value = _local(value)
        # On the host it can be read at once; elsewhere a copy is kept, which later changes do not reach.
        return float(value.detach()) if value.device.type == "cpu" else value.detach().clone().view(())
    try:
        return float(value.item() if isinstance(value, np.ndarray | np.generic) else value)
    except OverflowError:
        raise Complaint("it is larger than any float64") from None
    except (TypeError, ValueError):
        raise Complaint(f"it is a {type(value).__name__}, not a number") from None


def _local(value: Tensor) -> Tensor:
    """As this process holds it; refused where it holds no number, or would have to ask the others for it."""
    if type(value) is not Tensor and hasattr(value, "to_local"):
        if not all(placement.is_replicate() for placement in getattr(value, "placements", ())):
            raise Complaint("it is spread over several processes: log its full_tensor()")
        value = value.to_local()
    refused = "it is a complex number" if value.is_complex() else unmeasurable(value)
    if refused is None and isinstance(value, FakeTensor):
        refused = "it is a FakeTensor and holds no value"
    if refused is not None:
        raise Complaint(refused)
    return value
