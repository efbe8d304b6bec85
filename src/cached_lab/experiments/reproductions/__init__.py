"""Tables of the GRC paper (arXiv:2312.12742): `cached reproduce NAME` runs one of `REPRODUCTIONS` or `MEASURED`."""

from .base import Reproduction, TableRow
from .images import TABLES
from .table5 import TABLE5
from .table9 import SUMMARY
from .text_tables import TABLE4, TABLE4_IWSLT14, TABLE6

__all__ = ["MEASURED", "REPRODUCTIONS", "Reproduction", "TableRow"]

REPRODUCTIONS = {**TABLES, "table4": TABLE4, "table4_iwslt14": TABLE4_IWSLT14, "table5": TABLE5, "table6": TABLE6}
"""Tables whose rows are trained and compared."""
MEASURED = {"table9": SUMMARY}
"""Summaries of tables whose rows are timed."""
