"""The model in a layout: every strategy applied in one place, and the one way in which all commands run the result.

divide       PhiMoE on the meta device: nothing is allocated
               tensor.parallelize     tp, sp, cp                                       specs
               expert.parallelize     ep, etp                                        + specs
               set_recompute
               pipeline.split         pp: this rank's stages                         + specs
shard        zero.shard               dp, cp, dp_replicate; each unit's values are made or read as it is built
or fill      the same values without an optimizer, to evaluate and generate

train        micro-batches --cp: this rank's positions--> [pipeline] --> logits --> share of the step's loss
answer       whole sequences: the ranks of dp_replicate, dp and cp each have their own, those of tp and pp work on them
             together

What is sent is the strategies' own business: see their packages. Beside it the app sends, of a pipeline, the logits of
the next token from its last stage; with tp, the parts of these logits; with ep, whether all ranks' answers have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanopar_core as core
import nanopar_expert as expert
import nanopar_models as models
import nanopar_pipeline as pipeline
import nanopar_tensor as tensor
import nanopar_zero as zero
from nanopar_core import Axis, Mesh, ParamSpec
from nanopar_core.along import all_gather_along
from nanopar_core.mesh import DENSE
from nanopar_core.sharding import places_of_part, whole_shape
from nanopar_models.cache import KVCache
from nanopar_models.loss import IGNORE
from nanopar_pipeline import schedules
from nanopar_sft.batches import Batches, MicroBatch
from nanopar_sft.layout import Layout

ValueOf = Callable[[str, tuple[int, ...], Sequence[Sequence[range]]], Tensor]
"""``value_of(name, whole shape, places)``: what lies at these places of a parameter (``places_of_part``)."""


@dataclass
class Axes:
    """The axes that the app itself communicates over, beside the mesh's own."""

    data: Axis  # of ranks with sequences, or positions, of their own, within a replica
    everyone_with_data: Axis  # over all replicas
    world: Axis


class ParallelModel:
    """A Phi-MoE divided among the ranks of ``mesh``; made by all ranks together.

    Args:
        model: on the meta device; what is not to be trained frozen. It is changed.
        layout: sizes of the mesh's axes, and how they are used.
        schedule: of a pipeline, by its name in ``nanopar_pipeline.schedules.NAMED``.
        longest: no sequence that is trained on has more tokens.
        recompute: activations in backward.
    """

    def __init__(
        self,
        model: models.PhiMoE,
        layout: Layout,
        mesh: Mesh,
        *,
        schedule: str = "1f1b",
        longest: int | None = None,
        recompute: bool = False,
    ) -> None:
        self.model, self.layout, self.mesh = model, layout, mesh
        self.optimizer: zero.ZeroOptimizer | None = None
        self.axes = Axes(_flat(mesh, "dp", "cp"), _flat(mesh, "dp_replicate", "dp", "cp"), _flat(mesh, *DENSE))
        make_schedule = schedules.NAMED[schedule] if layout.pp > 1 else schedules.gpipe
        self._schedule = make_schedule(layout.pp, layout.chunks, layout.microbatches)
        self._runner: pipeline.Runner | None = None  # of training
        self._answering: pipeline.Runner | None = None  # of evaluation and generation: one micro-batch at a time
        self._count_of_step = 1  # divides losses; kept here, since a runner's loss_fn takes output and target only
        self._held_back = ExitStack()  # no_sync, until the last backward of a pipeline's step
        self._stages_to_end = 0
        specs = [self._divide_tensors(longest), self._divide_experts()]
        model.set_recompute(recompute, core.keep_communicated if recompute else None)
        self.part: nn.Module = model
        if layout.pp > 1:
            placement = self._schedule.placement
            stages, of_stages = pipeline.split(model, None, mesh.pp, chunks=layout.chunks, placement=placement)
            specs.append(of_stages)
            self.part = pipeline.Stages(stages)
        here = {name for name, _ in self.part.named_parameters()}
        merged = core.merge_specs(*specs)
        self.specs = {name: spec for name, spec in merged.items() if name in here}

    def _divide_tensors(self, longest: int | None) -> dict[str, ParamSpec]:
        layout, mesh = self.layout, self.mesh
        plan = {**self.model.tp_plan, "lm_head": "colwise"}  # logits stay divided: the loss takes them so
        if layout.ep > 1 or layout.etp < layout.tp:
            plan = {name: style for name, style in plan.items() if ".experts" not in name}
            plan["model.layers.*.mlp"] = "whole_sequence"
        if layout.tp > 1:
            self.model.loss = tensor.VocabParallelLoss(mesh.tp, core.split_sizes(self._vocabulary, layout.tp))
        return tensor.parallelize(
            self.model,
            plan,
            mesh.tp,
            sequence=layout.sp,
            context_axis=mesh.cp if layout.cp > 1 else None,
            context_method=layout.cp_method,
            longest=longest,
        )

    def _divide_experts(self) -> dict[str, ParamSpec]:
        layout, mesh = self.layout, self.mesh
        if layout.ep == 1 and layout.etp == layout.tp:
            return {}
        return expert.parallelize(
            self.model,
            None,
            mesh.ep,
            data_axis=mesh.edp,
            tensor_axis=mesh.etp,
            token_axis=mesh.tp if layout.etp < layout.tp else None,
        )

    @property
    def bubble(self) -> float:
        """The share of a pipeline's time in which ranks wait, if all stages take equally long."""
        return self._schedule.simulate().bubble

    @property
    def _vocabulary(self) -> int:
        return self.model.config.vocab_size

    # ---------------------------------------------------------------------------------------------------------- values

    def shard(
        self,
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        value_of: ValueOf,
        *,
        stage: int,
        groups: Sequence[Mapping[str, Any]],
        policy: zero.PrecisionPolicy | None = None,
        device: torch.device,
    ) -> zero.ZeroOptimizer:
        """Fill the model unit by unit and put data parallelism on it; gradients are summed: losses are shares.

        ``groups`` name parameters of the whole model.
        """
        here = dict(self.part.named_parameters())
        own = [{**group, "params": [name for name in group["params"] if name in here]} for group in groups]
        with torch.device(device):
            self.optimizer = zero.shard(
                self.part,
                make_optimizer,
                axis=self.axes.data,
                stage=stage,
                replicate=self.mesh.dp_replicate if self.layout.dp_replicate > 1 else None,
                groups=own,
                specs=self.specs,
                init=self._filler(value_of),
                policy=policy,
                reduce="sum",
            )
        if self.layout.pp > 1:
            self._runner = pipeline.Runner(
                cast(pipeline.Stages, self.part),
                self._schedule,
                self.mesh.pp,
                self._share_of_loss,
                scale=self.optimizer.scale,
                on_last_backward=self._reduce_after_last,
            )
        self._make_answering_runner()
        return self.optimizer

    @torch.no_grad()
    def fill(self, value_of: ValueOf, *, device: torch.device, dtype: torch.dtype) -> None:
        """Give the model its values and nothing to train them with."""
        fill = self._filler(value_of)
        for module in list(self.part.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype), False))
            fill(module)
        self._make_answering_runner()

    def _filler(self, value_of: ValueOf) -> Callable[[nn.Module], None]:
        """What fills the parameters of one module in place."""
        prefixes = {id(module): f"{name}." if name else "" for name, module in self.part.named_modules()}

        def fill(module: nn.Module) -> None:
            for child, parameter in module.named_parameters(recurse=False):
                name = prefixes[id(module)] + child
                spec = self.specs.get(name, ParamSpec())
                shape = whole_shape(parameter, spec)
                parameter.copy_(value_of(name, shape, places_of_part(shape, spec)))

        return fill

    def _make_answering_runner(self) -> None:
        """Another runner of the same stages; channels are made, so all ranks come here."""
        if self.layout.pp > 1:
            shape = self._schedule
            once = schedules.gpipe(shape.ranks, shape.chunks, 1, shape.placement)
            stages = cast(pipeline.Stages, self.part)
            self._answering = pipeline.Runner(stages, once, self.mesh.pp, self._share_of_loss)

    # -------------------------------------------------------------------------------------------------------- training

    def micro_batches(self, batches: Batches, step: int, packed: int = 0) -> list[MicroBatch]:
        """What this rank computes of a step (from 0); the same on all ranks of cp, tp and pp."""
        place = self.mesh.dp_replicate.rank * self.layout.dp + self.mesh.dp.rank
        return batches.local(step, place, self.layout.batches, self.layout.microbatches, packed)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], counted: int, device: torch.device) -> Tensor:
        """Forward and backward of this rank's micro-batches; gradients are complete after ``clip_grad_norm_``.

        Args:
            micro_batches: the same on all ranks of cp, tp and pp.
            counted: tokens that count in the step's whole batch.

        Returns:
            This rank's share of the step's loss, to be added up over ``axes.everyone_with_data``; the same on all
            ranks of tp and pp.
        """
        assert self.optimizer is not None
        self._count_of_step = counted
        if self._runner is not None:
            return self._through_pipeline(self._runner, micro_batches, device)
        total = torch.zeros((), device=device)
        for number, micro in enumerate(micro_batches, start=1):
            with nullcontext() if number == len(micro_batches) else self.optimizer.no_sync():
                inputs, labels = self._part_of(together([micro], self._shortest)[0], device)
                output = self.model(**inputs)
                loss = self._share_of_loss(output.logits, labels)
                if output.aux_loss is not None:  # batch-wide: check_layout admits it where the batch is not cut
                    loss = loss + self.model.config.router_aux_loss_coef * output.aux_loss
                self.optimizer.scale(loss).backward()
                total = total + loss.detach()
        return total

    def _through_pipeline(
        self, runner: pipeline.Runner, micro_batches: Sequence[MicroBatch], device: torch.device
    ) -> Tensor:
        assert self.optimizer is not None
        pieces = [self._part_of(micro, device) for micro in together(micro_batches, self._shortest)]
        inputs = {key: torch.cat([part[key] for part, _ in pieces]) for key in pieces[0][0]}
        labels = torch.cat([part for _, part in pieces])
        if self.layout.sp:
            tensor.set_sequence_length(self.part, labels.shape[1])
        self.optimizer.hold(gradients=True)
        self._stages_to_end = self.layout.chunks
        try:
            with self._held_back:
                self._held_back.enter_context(self.optimizer.no_sync())
                return runner.step(inputs, labels)
        finally:
            self.optimizer.release()

    def _reduce_after_last(self, _stage: int) -> None:
        """A stage's last backward begins. With that of this rank's last stage gradients are complete, and travel."""
        self._stages_to_end -= 1
        if not self._stages_to_end:
            self._held_back.close()

    def _part_of(self, micro: MicroBatch, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """What this rank gives the model of a micro-batch: its positions; and the labels that it must predict."""
        labels = models.next_token_labels(micro.labels, micro.attention_mask)
        mask, ids, positions, samples = micro.attention_mask, micro.input_ids, micro.position_ids, micro.sample_ids
        if self.layout.cp > 1:
            axis = self.mesh.cp
            mask, ids, positions, samples = (
                tensor.split_sequence(one, axis) for one in (mask, ids, positions, samples)
            )
            labels = tensor.split_sequence(labels, axis, padding=IGNORE)
        inputs = {"input_ids": ids, "position_ids": positions, "sample_ids": samples}
        moved = {name: one.to(device, non_blocking=True) for name, one in inputs.items()}
        return {**moved, "attention_mask": mask}, labels.to(device, non_blocking=True)

    @property
    def _shortest(self) -> int:
        """Every rank of a divided sequence needs a position."""
        return self.layout.tp * self.layout.cp if self.layout.sp else 0

    def _share_of_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(logits, labels, self._count_of_step)
        return loss

    # ------------------------------------------------------------------------------------------------------- answering

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block the model can evaluate and generate: whole sequences; weights divided by tp, ep, pp only."""
        weights = zero.gathered(self.part) if self.optimizer is not None else nullcontext()
        with weights, tensor.whole_sequences(self.part):
            yield

    @torch.no_grad()
    def sum_of_losses(self, micro: MicroBatch, device: torch.device) -> Tensor:
        """Of all counted tokens of a batch; within ``whole``. The same on all ranks of tp and pp."""
        self._count_of_step = 1
        training = self.model.training
        self.model.eval()
        labels = models.next_token_labels(micro.labels, micro.attention_mask).to(device)
        inputs = {"input_ids": micro.input_ids.to(device), "position_ids": micro.position_ids.to(device)}
        inputs["attention_mask"] = micro.attention_mask
        if self._answering is not None:
            loss = self._answering.evaluate(inputs, labels)
        else:
            loss = self._share_of_loss(self.model(**inputs).logits, labels)
        self.model.train(training)
        return loss

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KVCache) -> Tensor:
        """``[B, V]`` after the last of some further tokens, for ``models.generate``; within ``whole``."""
        if self._answering is not None:
            inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, "cache": cache}
            output = self._answering.forward(inputs)
            cache.advance(tokens.shape[1])
            shape = (tokens.shape[0], self._local_vocabulary)
            last = self._answering.schedule.rank_of(self._answering.schedule.stages - 1)
            dtype = next(self.part.parameters()).dtype
            logits = tokens.new_empty(shape, dtype=dtype) if output is None else output[:, -1].contiguous()
            core.broadcast(logits, self.mesh.pp, src=last, label="next token")
        else:
            hidden = self.model.model(tokens, positions, mask, cache=cache)
            logits = self.model.lm_head(hidden[:, -1:])[:, 0]
        if self.layout.tp == 1:
            return logits
        sizes = core.split_sizes(self._vocabulary, self.layout.tp)
        return all_gather_along(logits, self.mesh.tp, -1, sizes, label="next token").wait()

    @property
    def _local_vocabulary(self) -> int:
        return core.split_sizes(self._vocabulary, self.layout.tp)[self.mesh.tp.rank]

    def is_over(self, finished: bool) -> bool:
        """Whether generation has come to its end on all ranks that have to go on together.

        Experts on other ranks are reached by all ranks at once, or not at all.
        """
        if self.layout.ep == 1:
            return finished
        flag = torch.tensor([float(finished)], device=next(self.part.parameters()).device)
        return bool(core.all_reduce(flag, self.axes.data, op="min", label="all ended?").item())

    @property
    def in_step(self) -> bool:
        """Whether ranks with sequences of their own must call the model equally often."""
        return self.layout.ep > 1


def _flat(mesh: Mesh, *names: str) -> Axis:
    """One axis from those that have several ranks: that axis itself, by its own name, where there is only one."""
    several = [name for name in names if mesh.sizes[name] > 1]
    if len(several) > 1:
        return mesh.flatten(*several)
    axis: Axis = getattr(mesh, several[0] if several else "dp")
    return axis


def together(micro_batches: Sequence[MicroBatch], shortest: int = 0) -> list[MicroBatch]:
    """The same padded to one shape, as a pipeline needs them, at least ``shortest`` long: what is added is padding."""
    rows = max(micro.input_ids.shape[0] for micro in micro_batches)
    length = max(shortest, *(micro.input_ids.shape[1] for micro in micro_batches))

    def padded(values: Tensor, fill: int = 0) -> Tensor:
        return F.pad(values, (0, length - values.shape[1], 0, rows - values.shape[0]), value=fill)

    return [
        MicroBatch(
            padded(micro.input_ids),
            padded(micro.labels, IGNORE),
            padded(micro.attention_mask),
            padded(micro.position_ids),
            padded(micro.sample_ids),
        )
        for micro in micro_batches
    ]
