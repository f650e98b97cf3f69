"""TrainingSteps: which steps of optimizers make up one training step, and so one record.

A training step is over at once when every parameter that some optimizer holds has had its turn: of one optimizer, as
soon as it has stepped. Otherwise it is over when the next one shows: a training forward begins, an optimizer that has
stepped steps again, or one steps with a closure, which runs a forward of its own. So two optimizers that share one
backward are one step, and those of a GAN, with a forward between them, are two.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holter.capture import Layers, held_by

DESCRIBED = 16  # optimizers whose settings are recorded; those of one per parameter are alike


@dataclass(eq=False)
class Member:
    """An optimizer that trains the model. One that comes in its place, for the same parameters, has its numbers."""

    optimizer: weakref.ref[Any]
    number: int
    groups: list[int] = field(default_factory=list)  # the number of each of its parameter groups
    held: frozenset[int] = frozenset()  # ids of its parameters
    _looked_at: tuple[tuple[int, int], ...] = ()

    def has_changed(self) -> bool:
        """Looks again at what it holds, if its parameter groups are others than before."""
        optimizer = self.optimizer()
        if optimizer is None:
            return False
        groups = tuple((id(group["params"]), len(group["params"])) for group in optimizer.param_groups)
        if groups == self._looked_at:
            return False
        self._looked_at, self.held = groups, frozenset(held_by(optimizer))
        return True


class TrainingSteps:
    """Of one model. Holds no optimizer."""

    def __init__(self, layers: Layers, optimizers: Iterable[Any]) -> None:
        self._layers = layers
        self._stepping = 0  # the number of the member that is taking a step, or took the last one
        self._members: dict[int, Member] = {}  # by the ids of their optimizers
        self._numbers = self._groups = 0
        self._stepped: dict[int, Member] = {}  # in the training step that is being taken, by number
        self._done = 0  # how many parameters they hold, one that several hold counted for each
        self._all: int | None = None  # how many parameters all members hold; None: to be counted again
        self._is_stepping = False
        # Whether optimizers that nobody has told of would have been seen by now.
        self._is_settled = False
        for optimizer in optimizers:
            self._add(optimizer)

    @property
    def is_open(self) -> bool:
        """Whether an optimizer has stepped, and others may still do so in the same training step."""
        return bool(self._stepped)

    @property
    def key(self) -> int:
        """The number of the member that stepped first: what has a pace goes by it, so that in trainings whose
        optimizers take turns each is looked at."""
        return next(iter(self._stepped), self._stepping)

    @property
    def count(self) -> int:
        """How many optimizers there have been; one that came in the place of another is not counted again."""
        return self._numbers

    def optimizers(self) -> Iterator[Any]:
        """All that train the model, as far as they have been seen."""
        return (optimizer for one in tuple(self._members.values()) if (optimizer := one.optimizer()) is not None)

    def member(self, optimizer: Any) -> Member:
        """The one that this optimizer is; a new one, if it was not seen before."""
        found = self._members.get(id(optimizer))
        return found if found is not None and found.optimizer() is optimizer else self._add(optimizer, joins=True)

    def number_of_group(self, member: Member, place: int) -> int:
        """Numbers of parameter groups go on from one optimizer to the next."""
        while len(member.groups) <= place:
            member.groups.append(self._groups)
            self._groups += 1
        return member.groups[place]

    def ends_before(self, optimizer: Any, has_closure: bool) -> bool:
        """Whether the step that this optimizer is about to take is part of the next training step."""
        return self.is_open and (has_closure or self.member(optimizer).number in self._stepped)

    def ends_at_forward(self) -> bool:
        """Whether a training forward that begins now does so in the next training step. Within a step it is that of a
        closure, within a backward one of activation checkpointing."""
        return self.is_open and not self._is_stepping and torch._C._current_graph_task_id() == -1

    def begin(self, optimizer: Any) -> bool:
        """This optimizer is about to step; whether it is the first of the training step."""
        self._stepping, self._is_stepping = self.member(optimizer).number, True
        if not self._stepped:
            self._layers.may_have_changed()
        return not self._stepped

    def give_up(self) -> None:
        """The step that was begun raised."""
        self._is_stepping = False

    def take(self, optimizer: Any) -> bool:
        """This optimizer has stepped, or was kept from it; whether the training step is over."""
        member, self._is_stepping = self.member(optimizer), False
        self._stepped[member.number] = member
        if len(self._members) > 1 or not self._is_settled:
            if member.has_changed():
                self._all = None
            self._done += len(member.held)
            if len(self._stepped) < len(self._members) and not self._have_all_stepped():
                return False
        return self._is_settled or not self._may_have_others()

    def end(self) -> None:
        """The training step is over."""
        self._stepped, self._done, self._is_settled = {}, 0, True
        if len(self._members) > 1:
            gone = [place for place, one in self._members.items() if one.optimizer() is None]
            for place in gone:
                del self._members[place]
            self._all = None if gone else self._all

    def _add(self, optimizer: Any, joins: bool = False) -> Member:
        new = Member(weakref.ref(optimizer), self._numbers)
        new.has_changed()
        before = next((place for place, one in self._members.items() if joins and self._gives_way(one, new)), None)
        if before is not None:
            old = self._members.pop(before)
            new.number, new.groups = old.number, old.groups
        else:
            self._numbers += 1
        self._members[id(optimizer)] = new
        for place in range(len(optimizer.param_groups)):
            self.number_of_group(new, place)
        self._all, self._is_settled = None, False
        return new

    def _gives_way(self, old: Member, new: Member) -> bool:
        return old.number not in self._stepped and not old.held.isdisjoint(new.held)

    def _have_all_stepped(self) -> bool:
        """Whether every parameter that some optimizer holds has had its turn."""
        count = self._count()
        return self._done >= count and len(_union(self._stepped)) == count

    def _count(self) -> int:
        if self._all is None:
            self._all = len(_union(self._members))
        return self._all

    def _may_have_others(self) -> bool:
        """Whether gradients wait for an optimizer that nobody has told of."""
        held = _union(self._members)
        _, parameters = self._layers.everything()
        waiting = any(one.grad is not None and id(one) not in held for one in parameters)
        self._is_settled = not waiting
        return waiting


def _union(members: Mapping[int, Member]) -> frozenset[int]:
    """The ids of all parameters that these hold."""
    return frozenset().union(*(one.held for one in members.values()))
