"""Expert parallelism for mixture-of-experts layers.

Nothing is here yet. What is planned: ``parallelize(model, plan, axis)`` with all-to-all dispatch.
"""

__all__: list[str] = []
