"""Tables of the GRC paper (arXiv:2312.12742) as comparisons: `cached reproduce NAME` runs one of `REPRODUCTIONS`."""

from .base import Reproduction, Row
from .table1 import TABLE1
from .table2 import TABLE2
from .table5 import TABLE5
from .table6 import TABLE6
from .table10 import TABLE10

__all__ = ["REPRODUCTIONS", "Reproduction", "Row"]

REPRODUCTIONS = {"table1": TABLE1, "table2": TABLE2, "table5": TABLE5, "table6": TABLE6, "table10": TABLE10}
