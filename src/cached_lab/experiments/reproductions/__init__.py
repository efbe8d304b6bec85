"""Tables of the GRC paper (arXiv:2312.12742): `cached reproduce NAME` runs one of `REPRODUCTIONS` or `MEASURED`."""

from .base import Reproduction, TableRow
from .table1 import TABLE1
from .table2 import TABLE2
from .table4 import TABLE4, TABLE4_IWSLT14
from .table5 import TABLE5
from .table6 import TABLE6
from .table8 import TABLE8
from .table9 import TABLE9, ThroughputTable
from .table10 import TABLE10

__all__ = ["MEASURED", "REPRODUCTIONS", "Reproduction", "TableRow", "ThroughputTable"]

REPRODUCTIONS = {
    "table1": TABLE1,
    "table2": TABLE2,
    "table4": TABLE4,
    "table4_iwslt14": TABLE4_IWSLT14,
    "table5": TABLE5,
    "table6": TABLE6,
    "table8": TABLE8,
    "table10": TABLE10,
}
"""Tables whose rows are trained and compared."""
MEASURED = {"table9": TABLE9}
"""Tables whose rows are timed."""
