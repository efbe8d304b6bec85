"""Tables of the GRC paper (arXiv:2312.12742) as comparisons: `cached reproduce NAME` runs one of `REPRODUCTIONS`."""

from .base import Reproduction, Row
from .table5 import TABLE5
from .table6 import TABLE6

__all__ = ["REPRODUCTIONS", "Reproduction", "Row"]

REPRODUCTIONS = {"table5": TABLE5, "table6": TABLE6}
