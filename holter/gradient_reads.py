"""The gradients of the step that comes: read at a clip or where an optimizer takes them, and whose step they belong to.

What was read at a clip belongs to the optimizers whose gradients were clipped, once each. Groups may be clipped one
after the other: then the first clip is the time to look. What an optimizer takes unclipped is read at its own step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

from torch import Tensor
from torch.optim import Optimizer

from holter.capture import Layers, held_by, parameters_of
from holter.clearing import Clearing
from holter.clipping import Clip
from holter.draft import Draft, RoleRows
from holter.logged import scalar_of
from holter.loss_scaler import gradient_scale_of
from holter.measuring import Measuring
from holter.problems import Problems
from holter.settings import Settings
from holter.statistics.device_rows import DeviceRows, select_rows
from holter.transfer import DeviceTimer

_OFTEN, _SELDOM = 8, 10  # the steps at first at each of which it is seen whether gradients are cleared; the pace then
_MOST_CLEARINGS = 4  # optimizers of which that is seen: a model may have one for each parameter


@dataclass(eq=False)
class _Read:
    """Rows, a part a device, with names and ids of their parameters; and the clips, if it was read at one."""

    at: str
    parts: list[tuple[list[str], list[int], DeviceRows]] = field(default_factory=list)
    present: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)  # gradients by their parameters' ids
    is_whole: bool = False  # present are all that the model had; else those that were clipped
    left_out: set[int] = field(default_factory=set)  # those of them that the user did not select
    clips: list[tuple[set[int], Clip | None]] = field(default_factory=list)  # of which parameters, and what is known
    used_by: set[int] = field(default_factory=set)  # optimizers whose step they have been recorded with

    @property
    def is_measured(self) -> bool:
        return bool(self.parts) or not self.present.keys() - self.left_out

    def is_fresh(self, parameters: Iterable[Tensor]) -> bool:
        """Whether their gradients are still those: where a clip's step was not taken, others came in their place. The
        first one speaks for all."""
        known = next((one for one in parameters if id(one) in self.present), None)
        return known is not None and known.grad is not None and known.grad is self.present[id(known)]()

    def lives(self) -> bool:
        """Whether its gradients are still there, as far as it has any. The first one speaks for all."""
        first = next(iter(self.present.values()), None)
        return first is None or first() is not None

    def is_clipped(self, own: set[int]) -> bool:
        """Whether all of these were."""
        return own <= set().union(*(ids for ids, _ in self.clips))

    def held(self, ids: set[int]) -> list[RoleRows]:
        """The rows of these parameters, as far as they were selected."""
        ids = ids - self.left_out
        found = []
        for names, owners, rows in self.parts:
            places = [place for place, owner in enumerate(owners) if owner in ids]
            if len(places) < len(names):
                rows, names = select_rows(rows, places), [names[place] for place in places]
            if names:
                found.append(RoleRows("gradient", tuple(names), rows))
        return found


@dataclass(eq=False)
class _Part:
    """What was read for some optimizers of a training step: of these parameters, times this scale."""

    read: _Read
    own: set[int]
    scale: Tensor | None


class GradientReads:
    def __init__(self, layers: Layers, measuring: Measuring, settings: Settings, problems: Problems) -> None:
        self._layers, self._measuring, self._settings, self._problems = layers, measuring, settings, problems
        self._at_clip: _Read | None = None
        # For the step that is being taken, and ids of parameters: those of its optimizer that have gradients.
        self._at_step: tuple[_Read, set[int]] | None = None
        self._parts: list[_Part] = []  # for the optimizers of this training step that have stepped
        # One parameter of each optimizer, and what its gradient was at the step before.
        self._before: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._are_kept = False  # whether gradients of this training step lie in the tensors of the one before
        self._left: list[float | Tensor] = []  # in gradients as this training step's backwards added to them
        # And for how many steps the optimizer's gradients have been kept. One that is gone takes its hook along.
        self._clearings: weakref.WeakKeyDictionary[Optimizer, tuple[Clearing, int]] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        for clearing, _ in list(self._clearings.values()):  # another thread may close
            clearing.leave()
        self._clearings.clear()

    def forget(self) -> None:
        """What was read belongs to a step that was not taken."""
        self._at_clip = self._at_step = None

    def read(self, at: str, optimizer: Optimizer, key: int) -> None:
        """Measures what this optimizer takes, unless it was seen at a clip. All optimizers of a training step have one
        `key`, and so one pace: the gradients of all of them are measured, or of none."""
        self._at_step = self._clipped(optimizer)
        if self._at_step is not None:
            return
        kind, read = f"gradient {key}", _Read(at)
        if self._parts:
            if any(part.read.parts for part in self._parts):
                self._measure(kind, read, *self._gradients_of(read, optimizer))
        elif self._measuring.cadence.is_wanted(kind, self._settings.every):
            self._measure(kind, read, *self._gradients(read, held_by(optimizer)))
        self._at_step = read, set(read.present)

    def _clipped(self, optimizer: Optimizer) -> tuple[_Read, set[int]] | None:
        """What was read at the clip of all that this optimizer takes."""
        read = self._at_clip
        if read is None or id(optimizer) in read.used_by:
            return None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not read.is_fresh(parameters):
            return None
        own = read.present.keys() & set(map(id, parameters))
        if not read.is_whole:
            own |= self._unclipped(read, parameters)
        return (read, own) if read.is_clipped(own) else None

    def _unclipped(self, read: _Read, parameters: Iterable[Tensor]) -> set[int]:
        """Those of the model that have gradients besides. To ask one for it takes a microsecond: only these are."""
        left = (one for one in parameters if id(one) not in read.present)
        found = {id(one) for one in left if one.grad is not None}
        if found - self._layers.known(found):
            self._layers.everything()  # a layer may be new
        return self._layers.known(found)

    # At a clip ------------------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> Tensor | None:
        """Measures all gradients and clips them in the same pass; returns their norm, or None if torch must clip them.

        The pass is made at every step, wanted or not: what a training computes must not depend on what is recorded.
        As it stands for torch's clip, it costs the budget nothing. Where torch must clip them, they are seen there.
        """
        if not self._layers.is_on_cuda():
            return None
        read, cadence = _Read("clip"), self._measuring.cadence
        owners, tensors = self._gradients(read)
        if not self._measuring.measurer.can_clip(tensors):
            return None
        is_due = self._settings.budget != 0 and cadence.is_due("gradient", self._settings.every)
        histograms = is_due and cadence.wants_histogram("gradient", self._settings.every)
        timer = DeviceTimer.start(tensors[0].device)
        done = self._measuring.measurer.measure_and_clip(tensors, max_norm, histograms=histograms)
        if done is None:
            return None
        rows, norm = done
        # The gradients are clipped: no failure from here on may keep that from the caller.
        with self._problems.contained("note the clip"):
            if is_due:
                cadence.note_measured("gradient", histograms)
                read.parts.append((list(owners), list(owners.values()), rows))
            if timer is not None:
                cadence.follow(timer, "gradient" if histograms else None)
            read.clips.append((set(read.present), self._kept(Clip(norm, max_norm, 2.0))))
            self._at_clip = read
        return norm

    def torch_clips(self, parameters: Sequence[Tensor], clip: Clip | None) -> bool:
        """Reads all gradients, where that is wanted, before torch scales those of these parameters, unless they were
        read since the last step; False where none of them is the model's."""
        if not self._layers.knows(parameters):
            return False
        present = {id(one): weakref.ref(gradient) for one in parameters if (gradient := one.grad) is not None}
        read = self._at_clip
        # One that is whole knows these gradients, or they are others. To the rest may join what is clipped now.
        is_known = (
            read is not None and not read.used_by and (read.is_fresh(parameters) if read.is_whole else read.lives())
        )
        if read is None or not is_known or any(not earlier.isdisjoint(present) for earlier, _ in read.clips):
            read = self._at_clip = _Read("clip")
            if self._measuring.cadence.is_wanted("gradient", self._settings.every):
                self._measure("gradient", read, *self._gradients(read))
        read.present.update(present)
        read.clips.append((set(present), None if clip is None else self._kept(clip)))
        return True

    def _kept(self, clip: Clip) -> Clip | None:
        """With the norm as it is now: a user may go on computing with it. None if it is no number."""
        with self._problems.contained("record the norm of a clip"):
            return Clip(scalar_of(clip.norm), float(clip.max_norm), clip.norm_type)
        return None

    # What there is --------------------------------------------------------------------------------------------

    def _gradients(self, read: _Read, held: set[int] | None = None) -> tuple[dict[str, int], list[Tensor]]:
        """The ids of the parameters that have gradients, by name, and these gradients; noted in `read`."""
        owners: dict[str, int] = {}
        tensors = []
        for name, parameter in zip(*self._layers.everything(), strict=True):
            gradient = parameter.grad
            if gradient is not None and (held is None or id(parameter) in held):
                owners[name] = id(parameter)
                tensors.append(gradient)
        read.present.update(zip(owners.values(), map(weakref.ref, tensors), strict=True))
        read.left_out.update(read.present.keys() & self._layers.left_out)
        read.is_whole = held is None
        return owners, tensors

    def _gradients_of(self, read: _Read, optimizer: Optimizer) -> tuple[dict[str, int], list[Tensor]]:
        """The same of this optimizer, without a walk through the model."""
        found = zip(*self._layers.among(parameters_of(optimizer)), strict=True)
        gradients = {name: (id(one), one.grad) for name, one in found if one.grad is not None}
        owners = {name: owner for name, (owner, _) in gradients.items()}
        tensors = [gradient for _, gradient in gradients.values() if gradient is not None]
        read.present.update(zip(owners.values(), map(weakref.ref, tensors), strict=True))
        return owners, tensors

    def _measure(self, kind: str, read: _Read, owners: dict[str, int], tensors: list[Tensor]) -> None:
        """Those that are to be recorded."""
        names = list(owners)
        if read.left_out:
            kept = [owner not in read.left_out for owner in owners.values()]
            names, tensors = list(compress(names, kept)), list(compress(tensors, kept))
        for part, rows in self._measuring.measure(kind, names, tensors, self._settings.every):
            read.parts.append((part, [owners[name] for name in part], rows))

    # The step -------------------------------------------------------------------------------------------------

    def take(self, optimizer: Optimizer) -> None:
        """This optimizer has stepped: what was read for that is of this training step."""
        taken, self._at_step = self._at_step, None
        if taken is None:
            return
        read, own = taken
        read.used_by.add(id(optimizer))
        scale = gradient_scale_of(optimizer)
        same = next((part for part in self._parts if part.read is read and part.scale is scale), None)
        if same is not None:
            same.own |= own
        elif read.present:  # else nothing was looked at
            self._parts.append(_Part(read, own, scale))
        if read.at != "replay":  # a CUDA graph writes into the same tensors each time
            is_kept = bool(read.present) and self._has_kept(read, optimizer)
            self._are_kept |= is_kept
            self._follow_clearing(optimizer, is_kept)

    def add_to(self, draft: Draft) -> None:
        """What was read in the training step that is over."""
        parts, self._parts = self._parts, []
        for part in parts:
            rows = part.read.held(part.own)
            draft.rows += rows if part.scale is None else [replace(one, scale=part.scale) for one in rows]
            draft.gradients_are_partial |= not part.read.left_out.isdisjoint(part.own)
            if rows:
                draft.notes["gradients_read_at"] = part.read.at
        measured = {part.read.is_measured for part in parts}
        draft.gradients_are_partial |= len(measured) > 1  # of some the budget did not allow it
        if self._are_kept:
            draft.set("gradients_kept", 1.0)
        if self._left:
            draft.values["gradients_left"] = [scalar_of(left) for left in self._left]
        self._are_kept, self._left = False, []
        if any(part.read.at == "clip" for part in parts):
            _add_clip(draft, parts)

    def _follow_clearing(self, optimizer: Optimizer, is_kept: bool) -> None:
        """See whether they were cleared, at the first steps that keep their tensors and at some of the later ones."""
        clearing, steps = self._clearings.pop(optimizer, (None, 0))
        left = clearing.take() if clearing is not None else None
        if left is not None:
            self._left.append(left)
        if not is_kept or self._settings.budget == 0 or len(self._clearings) >= _MOST_CLEARINGS:
            return
        clearing = clearing or Clearing(self._problems)
        self._clearings[optimizer] = clearing, steps + 1
        if steps < _OFTEN or steps % _SELDOM == 0:
            clearing.watch(parameters_of(optimizer))

    def _has_kept(self, read: _Read, optimizer: Optimizer) -> bool:
        """Whether the gradients lie in the tensors of the step before: `zero_grad` lets go of those, as a rule."""
        owner, before = self._before.get(id(optimizer), (0, None))
        now = next(iter(read.present.items()))
        self._before[id(optimizer)] = (owner, read.present[owner]) if owner in read.present else now
        gradient = read.present[owner]() if owner in read.present else None
        return before is not None and gradient is not None and before() is gradient


def _add_clip(draft: Draft, parts: Sequence[_Part]) -> None:
    """The clip of all that the optimizers take; if there were several, what became of the gradients is not known."""
    own = set().union(*(part.own for part in parts))
    clips = parts[0].read.clips if len(parts) == 1 else ()
    ids, clip = next(((ids, clip) for ids, clip in clips if own <= ids), (own, None))
    if clip is None:
        draft.clip_is_unknown = True
        return
    draft.set("clip_norm", clip.norm)
    draft.set("clip_max_norm", clip.max_norm)
    is_known = bool(parts[0].read.parts) and not draft.gradients_are_partial
    if not is_known and clip.norm_type == 2.0 and ids <= own:
        draft.set("gradient_norm", clip.norm)
