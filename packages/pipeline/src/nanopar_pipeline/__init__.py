"""Pipeline parallelism: schedules as data, one executor."""
