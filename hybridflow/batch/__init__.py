"""The batch type: immutable named columns, each dense, jagged or object. Other packages import
everything from here.

Functions that need pyarrow are imported on first access.
"""

from typing import TYPE_CHECKING, Any

from hybridflow.batch.columns import Column, Deferred, objects
from hybridflow.batch.jagged import Jagged
from hybridflow.batch.protocol import DataProto
from hybridflow.batch.routes import FREE, ROUTED, ROUTES, unknown_routes, with_free_end
from hybridflow.batch.support import SUPPORT, SUPPORT_IDS, SUPPORT_SIZES, Supports, support_columns

if TYPE_CHECKING:
    from hybridflow.batch.arrow import (
        from_stream,
        from_table,
        iter_parquet,
        parquet_rows,
        pick_parquet,
        read_parquet,
        to_stream,
        to_table,
        write_parquet,
    )

__all__ = [
    "FREE",
    "ROUTED",
    "ROUTES",
    "SUPPORT",
    "SUPPORT_IDS",
    "SUPPORT_SIZES",
    "Column",
    "DataProto",
    "Deferred",
    "Jagged",
    "Supports",
    "from_stream",
    "from_table",
    "iter_parquet",
    "objects",
    "parquet_rows",
    "pick_parquet",
    "read_parquet",
    "support_columns",
    "to_stream",
    "to_table",
    "unknown_routes",
    "with_free_end",
    "write_parquet",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybridflow.batch import arrow

    return getattr(arrow, name)
