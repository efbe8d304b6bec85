"""A sample of what test_support.py does with all families; and what each family is given of its own."""

from __future__ import annotations

from typing import Any

import pytest
from integrations import family_checks as checks
from integrations.families import DECODERS, Family, families
