"""One executor for all schedules: it goes through a rank's actions and knows nothing of how they were made.

    F  take the activations of the stage before, run the stage, send what it gives to the stage after
    B  take the gradients of what it gave, run backward, send the gradients of what it took
    I  as B, but products for the gradients of weights are put aside (``weights_later.py``)
    W  and done here

The batch is cut into micro-batches on every rank; what a stage needs of the batch itself (masks, positions) it takes
from there, so that only what stages compute is sent. Activations are let go of once backward needs them no longer, what
was sent once its receiver must have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nanopar_core import Axis, all_reduce
from nanopar_pipeline.passes import Message, Span, messages
from nanopar_pipeline.schedules import Action, Schedule
from nanopar_pipeline.stage import Stage, Stages
from nanopar_pipeline.transfer import Descriptions, Incoming, Outgoing, channels, describe, signature
from nanopar_pipeline.weights_later import WeightsLater

Loss = Callable[[Any, Any], Tensor]


class Runner:
    """Runs a schedule.

    Args:
        stages: this rank's, in the order of ``schedule.stages_of(rank)``: those of ``split``, also together as one
            module (``Stages``), or one's own modules, ``stage(*tensors) -> tensor or tuple of tensors``; the first one
            is called with the inputs.
        schedule: of as many ranks as the axis has.
        axis: of the ranks (``mesh.pp``). All ranks of the job make their runners together, since channels are made.
        loss_fn: ``loss_fn(output, target) -> scalar``: this micro-batch's share of the step's loss.
        scale: what is done to a loss before backward, such as ``optimizer.scale`` under fp16; on ranks without the last
            stage it is called once a step, with 0.
        on_first_forward: called with a stage's number before its first forward of a step.
        on_last_backward: called with a stage's number before its last backward (or weight part) of a step: gradients
            are complete after that.

    Attributes:
        spans: when the actions of the last step computed on this rank, in seconds since its begin, what they waited for
            left out; on CUDA, when they were launched.

    Raises:
        ValueError: a schedule that does not fit the axis or the stages.

    After an error in a step messages are left over: a runner that has failed must not be used again.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Stages,
        schedule: Schedule,
        axis: Axis,
        loss_fn: Loss,
        *,
        scale: Callable[[Tensor], Tensor] | None = None,
        on_first_forward: Callable[[int], object] | None = None,
        on_last_backward: Callable[[int], object] | None = None,
    ) -> None:
        numbers = schedule.stages_of(axis.rank) if schedule.ranks == axis.size else []
        self._together = stages if isinstance(stages, Stages) else None
        stages = list(stages.parts.values()) if isinstance(stages, Stages) else stages
        if schedule.ranks != axis.size:
            raise ValueError(f"the schedule is for {schedule.ranks} ranks, axis {axis.name} has {axis.size}")
        if len(stages) != len(numbers):
            raise ValueError(f"rank {axis.rank} has the stages {numbers}, but {len(stages)} modules were given")
        self.stages = dict(zip(numbers, stages, strict=True))
        self.schedule, self.axis, self.loss_fn = schedule, axis, loss_fn
        self.scale, self.on_first_forward, self.on_last_backward = scale, on_first_forward, on_last_backward
        self.spans: list[Span] = []
        device = _device(stages)
        self._forward = channels(schedule, axis, device, backward=False)
        self._backward = channels(schedule, axis, device, backward=True)
        self._is_broken = False
        self._known: dict[tuple[int, Hashable], Descriptions] = {}  # by giving stage and kind of micro-batch

    def step(self, inputs: Any, targets: Any = None) -> Tensor:
        """Forward and backward of a whole batch, in micro-batches; gradients are added to the parameters'.

        Args:
            inputs: a tensor, a tuple of them, or a dictionary by the names of the plan; on every rank. Tensors are cut
                along dim 0 as evenly as possible; those with one row, and what is no tensor, go to every micro-batch.
            targets: likewise, for the loss.

        Returns:
            The sum of the losses, the same on all ranks, without gradient.

        Raises:
            ValueError: fewer rows than micro-batches.
        """
        with torch.enable_grad():
            return self._run(inputs, targets, only_forward=False)[0]

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any = None) -> Tensor:
        """The same loss, without backward."""
        return self._run(inputs, targets, only_forward=True)[0]

    @torch.no_grad()
    def forward(self, inputs: Any) -> Any:
        """What the last stage gives, of all micro-batches together along dim 0; None on ranks without it."""
        outputs = self._run(inputs, None, only_forward=True, wants_outputs=True)[1]
        return (
            _together([outputs[number] for number in sorted(outputs)])
            if self.schedule.stages - 1 in self.stages
            else None
        )

    def _run(
        self, inputs: Any, targets: Any, *, only_forward: bool, wants_outputs: bool = False
    ) -> tuple[Tensor, dict[int, Any]]:
        if self._is_broken:
            raise RuntimeError(
                "an earlier step of this runner has failed, and its messages are mixed up: make a new one"
            )
        count = self.schedule.microbatches
        rows = _rows(inputs)
        if rows < count:
            raise ValueError(f"a batch of {rows} rows cannot be cut into {count} micro-batches")
        step = _Step(self, _cut(inputs, rows, count), _cut(targets, rows, count), only_forward, wants_outputs)
        self._is_broken = True
        step.run()
        self._is_broken = False
        self.spans = step.spans
        step.incoming.clear()  # which know the step
        return all_reduce(step.loss, self.axis, label="loss"), step.outputs


class _Step:
    """One step on this rank."""

    def __init__(
        self, runner: Runner, inputs: list[Any], targets: list[Any], only_forward: bool, wants_outputs: bool
    ) -> None:
        self.runner, self.inputs, self.targets = runner, inputs, targets
        self.only_forward, self.wants_outputs = only_forward, wants_outputs
        self.kinds: list[Hashable] = [(signature(one), only_forward) for one in inputs]  # what all ranks know of it
        schedule, rank = runner.schedule, runner.axis.rank
        self.actions = [a for a in schedule.actions[rank] if a.kind == "F" or not only_forward]
        self.device = _device(runner.stages.values())
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.outputs: dict[int, Any] = {}
        self.spans: list[Span] = []
        self.later = WeightsLater()
        self.taken: dict[Message, list[Tensor]] = {}  # by stage: leaves that were given to it
        self.given: dict[Message, list[GradientEdge | None]] = {}
        self.losses: dict[int, Tensor] = {}
        self.local: dict[tuple[str, Message], list[Tensor]] = {}  # between two stages of this rank
        self.incoming: dict[tuple[int, bool], Incoming] = {}
        self.outgoing: dict[tuple[int, bool], Outgoing] = {}
        self.started: set[int] = set()
        self.arrived = 0.0  # when the present action had what it needs from other ranks
        self.in_parts = {(action.stage, action.microbatch) for action in self.actions if action.kind == "W"}
        last = {action.stage: place for place, action in enumerate(self.actions) if action.kind in "BIW"}
        self.last = {place: stage for stage, place in last.items()}

    def run(self) -> None:
        """All actions, and the end of all messages."""
        self._open_channels()
        begin = time.perf_counter()
        for place, action in enumerate(self.actions):
            self._callbacks(place, action)
            self.arrived = time.perf_counter()
            getattr(self, f"_{action.kind}")(action.stage, action.microbatch)
            self.spans.append(Span(action, self.arrived - begin, time.perf_counter() - begin))
            for outgoing in self.outgoing.values():
                outgoing.release()
        for outgoing in self.outgoing.values():
            outgoing.finish()
        runner = self.runner
        if runner.scale is not None and not self.only_forward and runner.schedule.stages - 1 not in runner.stages:
            runner.scale(self.loss)  # nothing to scale here, but its owner must know that losses were, on all ranks

    def _callbacks(self, place: int, action: Action) -> None:
        if action.kind == "F" and action.stage not in self.started:
            self.started.add(action.stage)
            if self.runner.on_first_forward is not None:
                self.runner.on_first_forward(action.stage)
        if place in self.last and self.runner.on_last_backward is not None:
            self.runner.on_last_backward(self.last[place])

    def _open_channels(self) -> None:
        schedule, rank = self.runner.schedule, self.runner.axis.rank
        for backward in (False,) if self.only_forward else (False, True):
            made = self.runner._backward if backward else self.runner._forward
            for (sender, receiver), order in messages(schedule, backward=backward).items():
                label = "gradients" if backward else "activations"
                if sender == rank:
                    self.outgoing[receiver, backward] = Outgoing(made[sender, receiver], self.device, label)
                if receiver == rank:
                    describe_one = self._of_gradients if backward else self._description
                    channel = made[sender, receiver]
                    self.incoming[sender, backward] = Incoming(channel, order, describe_one, self.device, label)

    def _description(self, message: Message) -> Descriptions | None:
        """Of what a stage gives to the next, if that was seen before."""
        return self.runner._known.get((message.stage, self.kinds[message.microbatch]))

    def _of_gradients(self, message: Message) -> Descriptions | None:
        """Of the gradients of what the stage before gave: of those tensors that need any."""
        given = self._description(Message(message.stage - 1, message.microbatch))
        return None if given is None else tuple(one for one in given if one.needs_gradient)

    def _remember(self, message: Message, descriptions: Descriptions) -> None:
        self.runner._known[message.stage, self.kinds[message.microbatch]] = descriptions

    # ------------------------------------------------------------------------------------------------------- actions

    def _F(self, stage: int, number: int) -> None:  # noqa: N802
        schedule, module = self.runner.schedule, self.runner.stages[stage]
        taken = self._take_activations(stage, number) if stage else []
        with self._recording(stage, number):
            if self.runner._together is not None:
                output = self.runner._together(stage, taken, self.inputs[number])
            else:
                output = _call(module, taken, self.inputs[number], stage == 0)
        if stage == schedule.stages - 1:
            if self.wants_outputs:
                self.outputs[number] = output
                return
            with self._recording(stage, number):
                loss = self.runner.loss_fn(output, self.targets[number])
            if loss.dim():
                raise ValueError(f"loss_fn must return a scalar, not a tensor of shape {list(loss.shape)}")
            self.loss += loss.detach()
            if not self.only_forward:
                self.losses[number] = loss if self.runner.scale is None else self.runner.scale(loss)
                self.taken[Message(stage, number)] = taken
            return
        tensors = _tensors(output, stage)
        if not self.only_forward:
            self.taken[Message(stage, number)] = taken
            self.given[Message(stage, number)] = [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
        self._give_activations(stage, number, tensors)

    def _B(self, stage: int, number: int) -> None:  # noqa: N802
        taken, message = self.taken.pop(Message(stage, number)), Message(stage, number)
        if stage == self.runner.schedule.stages - 1:
            loss = self.losses.pop(number)
            module = self.runner.stages[stage]
            if not loss.requires_grad and any(one.requires_grad for one in (*taken, *module.parameters())):
                raise RuntimeError("loss_fn gave a loss without gradient, though the stage has something to train")
            if loss.requires_grad:
                # Not by the tensor: a backward that torch functions could change runs without their modes.
                torch.autograd.backward([get_gradient_edge(loss)], [torch.ones_like(loss)])
        else:
            edges = [edge for edge in self.given.pop(message) if edge is not None]
            gradients = self._take_gradients(stage, number)
            if edges:
                torch.autograd.backward(edges, gradients)
        if stage:
            leaves = [leaf for leaf in taken if leaf.requires_grad]
            self._give_gradients(
                stage, number, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            )

    def _I(self, stage: int, number: int) -> None:  # noqa: N802
        with self.later.recording(stage, number):  # what is recomputed in backward is put aside too
            self._B(stage, number)

    def _W(self, stage: int, number: int) -> None:  # noqa: N802
        self.later.run(stage, number)

    def _recording(self, stage: int, number: int) -> AbstractContextManager[None]:
        return self.later.recording(stage, number) if (stage, number) in self.in_parts else nullcontext()

    # ------------------------------------------------------------------------------------------------------ messages

    def _take_activations(self, stage: int, number: int) -> list[Tensor]:
        message, sender = Message(stage - 1, number), self.runner.schedule.rank_of(stage - 1)
        if sender == self.runner.axis.rank:
            tensors = self.local.pop(("forward", message))
        else:
            tensors = self.incoming[sender, False].take(message, lambda found: self._remember(message, found))
            self.arrived = time.perf_counter()
        described = self._description(message)
        assert described is not None
        return [
            tensor.detach().requires_grad_(one.needs_gradient and not self.only_forward)
            for tensor, one in zip(tensors, described, strict=True)
        ]

    def _give_activations(self, stage: int, number: int, tensors: list[Tensor]) -> None:
        message, receiver = Message(stage, number), self.runner.schedule.rank_of(stage + 1)
        described, before = describe(tensors), self._description(message)
        if before is not None and before != described:
            raise RuntimeError(
                f"stage {stage} gives {described} for micro-batch {number}, but gave {before} for one like it: outputs "
                "may depend on the shapes of the inputs only; make a new Runner after freezing or casting parameters"
            )
        self._remember(message, described)
        if receiver == self.runner.axis.rank:
            self.local["forward", message] = tensors
        else:
            self.outgoing[receiver, False].send(message, tensors, None if before is not None else described)

    def _take_gradients(self, stage: int, number: int) -> list[Tensor]:
        message, sender = Message(stage + 1, number), self.runner.schedule.rank_of(stage + 1)
        if sender == self.runner.axis.rank:
            return self.local.pop(("backward", message))
        gradients = self.incoming[sender, True].take(message)
        self.arrived = time.perf_counter()
        self.outgoing[sender, False].arrived(Message(stage, number))  # what it is the gradient of
        return gradients

    def _give_gradients(self, stage: int, number: int, gradients: list[Tensor]) -> None:
        message, receiver = Message(stage, number), self.runner.schedule.rank_of(stage - 1)
        if receiver == self.runner.axis.rank:
            self.local["backward", message] = gradients
        else:
            self.outgoing[receiver, True].send(message, gradients, None)


# -------------------------------------------------------------------------------------------------- values and batches


def _call(module: nn.Module, taken: list[Tensor], inputs: Any, is_first: bool) -> Any:
    if isinstance(module, Stage):
        return module(taken, inputs)
    if not is_first:
        return module(*taken)
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _tensors(output: Any, stage: int) -> list[Tensor]:
    tensors = list(output) if isinstance(output, (tuple, list)) else [output]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
        raise ValueError(f"stage {stage} must give a tensor or a tuple of tensors to the next, not {kinds}")
    return tensors


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, Mapping):
        for value in values.values():
            yield from _leaves(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def _rows(inputs: Any) -> int:
    sizes = [leaf.shape[0] for leaf in _leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes:
        raise ValueError("inputs hold no tensor with rows to cut into micro-batches")
    return max(sizes)


def _cut(values: Any, rows: int, count: int) -> list[Any]:
    """For every micro-batch its part."""
    if isinstance(values, Mapping):
        parts = {key: _cut(value, rows, count) for key, value in values.items()}
        return [{key: of_key[number] for key, of_key in parts.items()} for number in range(count)]
    if isinstance(values, (tuple, list)):
        columns = [_cut(value, rows, count) for value in values]
        return [tuple(column[number] for column in columns) for number in range(count)]
    if isinstance(values, Tensor) and values.dim() and values.shape[0] == rows:
        return list(values.tensor_split(count))
    if isinstance(values, Tensor) and values.dim() and values.shape[0] != 1:
        raise ValueError(f"a tensor of {values.shape[0]} rows cannot be cut beside one of {rows}")
    return [values] * count


def _together(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
    if isinstance(first, (tuple, list)):
        return tuple(_together(list(column)) for column in zip(*outputs, strict=True))
    return outputs


def _device(stages: Iterable[nn.Module]) -> torch.device:
    """That of the stages; the process's own where they have no parameters."""
    for stage in stages:
        for parameter in stage.parameters():
            return parameter.device
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
