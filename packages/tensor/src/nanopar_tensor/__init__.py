"""Tensor, sequence and context parallelism.

Nothing is here yet. What is planned: ``parallelize(model, plan, axis)`` for any Hugging Face tensor-parallel plan.
"""

__all__: list[str] = []
