"""Pipeline parallelism: schedules as data, one executor; simulated, drawn and executed from the same table.

Example:
    >>> from nanopar_pipeline import schedules
    >>> print(schedules.one_f_one_b(2, 1, 3))
    rank 0 |F0 F1 .  .  B0 .  F2 B1 .  .  B2 .
    rank 1 |.  F0 B0 .  F1 B1 .  F2 B2 .
"""

from nanopar_pipeline import schedules as schedules
from nanopar_pipeline.drawing import as_chrome_trace as as_chrome_trace
from nanopar_pipeline.drawing import write_svg as write_svg
from nanopar_pipeline.files import read_csv as read_csv
from nanopar_pipeline.files import write_csv as write_csv
from nanopar_pipeline.runner import Runner as Runner
from nanopar_pipeline.schedules import Action as Action
from nanopar_pipeline.schedules import Schedule as Schedule
from nanopar_pipeline.split import split as split
from nanopar_pipeline.stage import Stage as Stage
from nanopar_pipeline.stage import Stages as Stages

__all__ = [
    "Action",
    "Runner",
    "Schedule",
    "Stage",
    "Stages",
    "as_chrome_trace",
    "read_csv",
    "schedules",
    "split",
    "write_csv",
    "write_svg",
]
