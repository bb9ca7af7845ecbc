"""Pipeline parallelism: schedules as data, one executor.

Nothing is here yet. What is planned: ``split``, ``schedules`` and ``Runner``.
"""

__all__: list[str] = []
