"""The stages of ZeRO in one table, which the code executes (Rajbhandari et al. 2020, section 5; "ZeRO", figure 1).

    N ranks on the data axis, P bytes of parameters as they are communicated (padding included), M micro-batches a step

    stage  states        gradients      parameters     after a backward      after step     bytes a rank sends a step
    0      on all ranks  on all ranks   on all ranks   all_reduce            -              2 P (N-1)/N
    1      1/N each      whole, reduced on all ranks   reduce_scatter        all_gather     2 P (N-1)/N
                         to 1/N
    2      1/N each      1/N each       on all ranks   reduce_scatter, in    all_gather     (M+1) P (N-1)/N
                                                       every micro-batch
    3      1/N each      1/N each       1/N each       reduce_scatter, in    -              3 M P (N-1)/N
                                                       every micro-batch

Stage 3 gathers a unit's parameters before its forward and again before its backward; without resharding after forward
once per micro-batch, 2 M P (N-1)/N in all, and held over the whole step once, (M+1) P (N-1)/N.

"States" are the optimizer's moments and, under a ``PrecisionPolicy``, the master weights. In stages 0 and 1 ``no_sync``
lets gradients add up whole on each rank, so that a step of many micro-batches reduces once; stages 2 and 3 keep only
their part of a gradient and therefore reduce every backward.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What each rank of the data axis holds only its part of."""

    number: int
    divides_states: bool
    divides_gradients: bool
    divides_parameters: bool

    def bytes_sent(
        self, parameter_bytes: int, ranks: int, micro_batches: int = 1, *, gathers: int | None = None
    ) -> int:
        """Bytes that one rank sends in a step, scalars for norms aside.

        Args:
            parameter_bytes: P, padding included, gradients and parameters communicated in one dtype.
            ranks: N on the data axis.
            micro_batches: M, in stages 0 and 1 all but the last under ``no_sync``.
            gathers: how often stage 3 gathers a parameter in the step; 2 M where not given.
        """
        reductions = micro_batches if self.divides_gradients else 1
        if self.divides_parameters:
            gathers = 2 * micro_batches if gathers is None else gathers
        else:
            gathers = 1  # after the step; the second half of stage 0's all_reduce is one as well
        return (reductions + gathers) * parameter_bytes * (ranks - 1) // ranks

    def state_bytes(
        self, elements: int, ranks: int, *, parameter: int = 4, master: int = 0, moments: int = 8, gradient: int = 4
    ) -> int:
        """Bytes that one rank holds between backward and step, for a model of ``elements`` parameters.

        ``parameter``, ``master``, ``moments``, ``gradient``: bytes of each per element, for instance 2, 4, 8, 4 for
        bf16 computation with Adam. The gathered units and the gradients in flight of stages 2 and 3 come on top.
        """
        states = (master + moments) / (ranks if self.divides_states else 1)
        gradients = gradient / (ranks if self.divides_states else 1)
        parameters = parameter / (ranks if self.divides_parameters else 1)
        return round(elements * (states + gradients + parameters))


STAGES = {
    0: Stage(0, divides_states=False, divides_gradients=False, divides_parameters=False),
    1: Stage(1, divides_states=True, divides_gradients=False, divides_parameters=False),
    2: Stage(2, divides_states=True, divides_gradients=True, divides_parameters=False),
    3: Stage(3, divides_states=True, divides_gradients=True, divides_parameters=True),
}
