"""The batch: immutable named columns, dense, jagged or object. Everything that the rest of the system uses is imported
from here."""

from hybridflow.batch.jagged import Jagged
from hybridflow.batch.protocol import DataProto

__all__ = ["DataProto", "Jagged"]
